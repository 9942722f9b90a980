"""16-bit parameters: masters have the bits of a dense reference under every strategy, world and transport."""

from __future__ import annotations

import itertools

import pytest
import torch

import sherd
from sherd import CommOptions, comm
from tests.helpers.half import BACKWARDS, expected, recorded
from tests.helpers.training import STRATEGIES, connected, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIRE = {BF16: BF16, FP16: FP16, FP32: FP32}
SCALE = 2.0**10
FP16_OPTIONS = {"precision": "fp16", "loss_scale": sherd.LossScale(initial=SCALE)}
WINDOW = {"accumulate": BACKWARDS}
CASES = {
    "bf16": ({"precision": "bf16"}, {"wire": WIRE}),
    "fp32 on the wire": ({"precision": "bf16", "wire_dtype": "fp32"}, {"wire": dict.fromkeys(WIRE, FP32)}),
    "bf16 sums": ({"precision": "bf16", "grad_dtype": "bf16", "keep_fp32": []}, {"wire": WIRE, "kept": BF16}),
    "fp32 parameters": ({"wire_dtype": "bf16"}, {"wire": dict.fromkeys(WIRE, BF16)}),
    "fp16": (FP16_OPTIONS, {"wire": WIRE, "scale": SCALE}),
    "fp16 windows": ({**FP16_OPTIONS, **WINDOW}, {"wire": WIRE, "backwards": BACKWARDS, "scale": SCALE}),
    "windows": ({"precision": "bf16", **WINDOW}, {"wire": WIRE, "backwards": BACKWARDS}),
}


def runs(transport, cases):
    with connected(transport) as c:
        return {case: recorded(c, case[0], **CASES[case[1]][0]) for case in cases}


def check(by_rank, case, group=None):
    """All ranks have the masters of the reference, and parameters that are these, rounded."""
    strategy, name = case
    options, how = CASES[name]
    mine = [found[case] for found in by_rank]
    at = "rank" if strategy in ("ddp", "zero1") else "owner"
    after = expected(mine, at=at, group=group, **how)
    converts = options.get("precision", "fp32") != "fp32"
    for rank, (_, masters, parameters) in enumerate(mine):
        for step, (found, wanted) in enumerate(zip(masters[1:], after, strict=True)):
            same(found, wanted, (case, rank, step))
        for key, value in parameters.items():
            rounded = converts and ("norm" not in key or options.get("keep_fp32") == [])
            half = FP16 if "fp16" in name else BF16
            assert value.dtype == (half if rounded else FP32), (case, key)
            assert torch.equal(value, masters[-1][key].to(value.dtype)), (case, key)
    return mine[0][1][-1]


@pytest.mark.parametrize(
    ("world", "transport"),
    [(1, "auto"), (2, "host"), pytest.param(2, "c10d", marks=pytest.mark.fuzz), (3, "host"), (3, "c10d")],
)
def test_masters_are_those_of_fp32_training_on_the_rounded_gradients(ranks, world, transport):
    cases = list(itertools.product(STRATEGIES, CASES if world > 1 else ["bf16", "bf16 sums", "windows", "fp16"]))
    by_rank = ranks(world).run(runs, transport, cases)
    found = {case: check(by_rank, case) for case in cases}
    for strategy, name in cases:
        if "windows" not in name:  # where they accumulate, strategies differ in where
            same(found[strategy, name], found["ddp", name], (strategy, name))
    assert not torch.equal(found["ddp", "bf16"]["second.weight"], found["ddp", "bf16 sums"]["second.weight"])
    if world > 1:
        assert not torch.equal(found["ddp", "fp32 parameters"]["second.weight"], found["ddp", "bf16"]["second.weight"])


def runs_in_groups(transport, cases):
    with comm.connect(CommOptions(transport=transport, group=2, timeout=40.0)) as c:
        return {case: recorded(c, case[0], **CASES[case[1]][0]) for case in cases}


def test_a_groups_partial_sum_is_rounded_to_the_wire(ranks):
    cases = list(itertools.product(STRATEGIES, ("bf16", "fp16", "fp32 parameters")))
    by_rank = ranks(4).run(runs_in_groups, "c10d", cases)
    flat = {case: expected([found[case] for found in by_rank], **CASES[case[1]][1])[-1] for case in cases}
    for case in cases:
        found = check(by_rank, case, group=2)
        assert not torch.equal(found["second.weight"], flat[case]["second.weight"])


@pytest.mark.hosts
def test_two_hosts_of_two_ranks_have_the_same_bits(hosts):
    cases = list(itertools.product(STRATEGIES, ("bf16", "fp16", "fp32 parameters")))
    by_rank = hosts(2, 2).run(runs, "cluster", cases)
    for case in cases:
        check(by_rank, case, group=2)
