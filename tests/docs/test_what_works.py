"""Every case of tests/what_works, the page that is made from them, and whether a wrong case is found out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sherd import RankFailed
from tests.helpers.training import double, loss_of, sgd, train, weights
from tests.what_works import every_case
from tests.what_works.cases import GATHERED, Case
from tests.what_works.page import COMMAND, PAGE, page
from tests.what_works.running import verify

CASES = every_case()


@pytest.mark.parametrize("name", CASES)
def test_case(ranks, name):
    case = CASES[name]
    verify(dataclasses.replace(case, strategies=case.often or case.strategies), ranks(2))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.often])
def test_case_that_takes_seconds_under_every_strategy(ranks, name):
    verify(CASES[name], ranks(2))


ALONE = r"model\.state_dict\(\) is collective: call it on every rank, and save it on one\. Here ranks"
APART = "which all ranks must make"
WHOLE_GRAPHS = "without fullgraph=True it works"
GATHERED_OTHERWISE = {
    "saving.state_is_kept": "kept.0.weight differs",  # it holds copies
    "saving.state_on_one_rank": ALONE,
    "hugging_face.pretrained": ALONE,
    "gradients.unused_on_some_ranks": APART,
    "gradients.unused_in_many_buckets": APART,
    "gradients.skipped_by_rank": APART,
    "batch_norm.sync_batch_norm_and_branches": APART,
    **dict.fromkeys(("compiled.blocks_before", "compiled.blocks_after"), WHOLE_GRAPHS),
    **dict.fromkeys(("compiled.model_before", "compiled.model_after"), WHOLE_GRAPHS),
    "compiled.inductor": "differs by",  # graphs of other operations, which round otherwise
}
"""What is not as in other strategies where zero3 gathers parameters on use."""


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "zero3" in case.strategies])
def test_case_where_parameters_are_gathered(ranks, name):
    case = CASES[name]
    first = () if "ddp" not in case.strategies else ("ddp",)
    gathered = dataclasses.replace(case, strategies=(*first, GATHERED))
    if name not in GATHERED_OTHERWISE:
        verify(gathered, ranks(2))
        return
    with pytest.raises((AssertionError, RuntimeError, RankFailed), match=GATHERED_OTHERWISE[name]):
        verify(gathered, ranks(2))


@pytest.mark.pure
def test_the_page_is_what_the_cases_say():
    assert PAGE.read_text() == page(), f"docs/{PAGE.name} is stale: run `{COMMAND}`"


# -------------------------------------------------------------------- a wrong case is found out


def other_rows(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(start=0 if run.plain else 1))
    return weights(model)


def ranks_differ(run):
    return {"rank": torch.tensor(float(run.rank))}


def strategies_differ(run):
    return {"strategy": run.strategy}


def nothing_to_compare(run):
    return {}


def raises(run):
    if run.strategy == "zero1":
        raise ValueError("something else")
    return {"number": 1}


def refused_on_one_rank(run):
    model = double()
    model, _ = run.distribute(model, sgd(model))
    if run.rank == 0:
        loss_of(model, next(run.batches())).backward(create_graph=True)


def refused_in_other_words(run):
    model = double()
    model, _ = run.distribute(model, sgd(model))
    loss_of(model, next(run.batches())).backward(create_graph=True)


WRONG = {
    other_rows: (None, r"the ranks, and plain torch: 0\.weight differs by"),
    ranks_differ: (None, r"on rank 1, and ddp on rank 0: rank differs by 1"),
    strategies_differ: (None, r"zero1 on rank 0, .*'zero1' and 'ddp'"),
    nothing_to_compare: (None, "nothing was compared"),
    raises: (None, "raises under zero1: ValueError: something else"),
    refused_on_one_rank: ("create_graph", "on rank 1 was not refused"),
    refused_in_other_words: ("another reason", "expected 'another reason'"),
}


@pytest.mark.parametrize("script", WRONG, ids=lambda script: script.__name__)
def test_a_wrong_case_fails(ranks, script):
    refusal, match = WRONG[script]
    with pytest.raises((AssertionError, RuntimeError), match=match):
        verify(Case("Wrong", "a wrong case", "", script, refusal=refusal), ranks(2))
