"""Masters follow what is done to their parameters, and lose no bit where nothing was done."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import sherd
from sherd.engine.parameters.masters import follow_edits
from tests.helpers.half import loss_of, masters_of, network
from tests.helpers.training import STRATEGIES, connected, same

TRANSPORTS = ("host", "c10d")


@pytest.mark.pure
def test_only_what_was_written_changes_a_master():
    master = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded, before = master.bfloat16(), master.clone()
    follow_edits(master, rounded)
    assert torch.equal(master, before)
    rounded[3], rounded[7], rounded[9] = 0.5, float("nan"), -0.0
    master[9] = before[9] = 0.0
    follow_edits(master, rounded)
    assert master[3] == 0.5 and master[7].isnan() and str(master[9].item()) == "-0.0"
    others = torch.ones(1000, dtype=torch.bool)
    others[[3, 7, 9]] = False
    assert torch.equal(master[others], before[others])


def trained(c, strategy, **options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c, precision="bf16", **options)
    step(model, optimizer, c, 0)
    return model, optimizer


def step(model, optimizer, c, number):
    loss_of(model, c.rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def edited_by_hand(model, c):
    with torch.no_grad():
        model.second.weight[3, 2] = 5.0


def edited_past_torch(model, c):
    model.second.weight.data[3, 2] = 5.0


def edited_whole(model, c):
    with sherd.full_parameters(model), torch.no_grad():
        model.second.weight[3, 2] = 5.0


def edited_masters(model, c):
    with sherd.full_parameters(model, masters=True), torch.no_grad():
        model.second.weight[3, 2] = 5.0


def moved(model, c):
    changed = model.second.weight.detach().clone()
    changed[3, 2] = 5.0
    model.second.weight.data = changed


EDITS = (edited_by_hand, edited_past_torch, edited_whole, edited_masters, moved)


def edits(transport):
    found = {}
    with connected(transport) as c:
        for strategy, edit in itertools.product(STRATEGIES, EDITS):
            model, optimizer = trained(c, strategy)
            before = masters_of(model)
            edit(model, c)
            after = masters_of(model)
            step(model, optimizer, c, 1)
            found[strategy, edit.__name__] = before, after, masters_of(model)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_edit_reaches_the_master_and_nothing_else_changes(ranks, transport):
    for found in ranks(2).run(edits, transport):
        for what, (before, after, stepped) in found.items():
            assert after["second.weight"][3, 2] == 5.0, what
            before["second.weight"][3, 2] = 5.0
            same(after, before, what)
            assert abs(stepped["second.weight"][3, 2] - 5.0) < 0.1, what  # it was stepped from there
        for strategy, edit in itertools.product(STRATEGIES, EDITS):
            same(found[strategy, edit.__name__][2], found["ddp", "edited_by_hand"][2], (strategy, edit))


def reloads(transport):
    found = {}
    with connected(transport) as c:
        for strategy in STRATEGIES:
            model, optimizer = trained(c, strategy)
            with sherd.full_parameters(model, masters=True):
                saved = copy.deepcopy(model.state_dict())
            state = copy.deepcopy(optimizer.state_dict())
            step(model, optimizer, c, 1)
            ahead = masters_of(model)
            model.load_state_dict(saved)
            optimizer.load_state_dict(state)
            back = masters_of(model)
            step(model, optimizer, c, 1)
            again = masters_of(model)
            part = {"first.weight": torch.full((7, 15), 1 / 3)}
            model.load_state_dict(part, strict=False)
            partly = masters_of(model)
            model.load_state_dict(model.state_dict())  # 16-bit values, all of them the same as before
            found[strategy] = saved, back, ahead, again, partly, masters_of(model)
            kinds = {value["exp_avg"].dtype for value in optimizer.state_dict()["state"].values()}
            assert kinds == {torch.float32}
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_masters_are_saved_and_loaded_with_all_their_bits(ranks, transport):
    for found in ranks(2).run(reloads, transport):
        for strategy, (saved, back, ahead, again, partly, reloaded) in found.items():
            same(back, dict(saved), strategy)
            same(again, ahead, strategy)
            assert not torch.equal(ahead["first.weight"], back["first.weight"])
            again["first.weight"] = torch.full((7, 15), 1 / 3)
            same(partly, again, strategy)
            partly["first.weight"] = reloaded["first.weight"]  # what was loaded in 16 bits is not one third any more
            same(reloaded, partly, strategy)


# ---------------------------------------------------------------- what reviews found


def pending_edit_then_partial_load(c, strategy):
    model, _ = trained(c, strategy)
    with torch.no_grad():
        model.last.weight.fill_(0.5)
    model.load_state_dict({"first.weight": torch.zeros(7, 15)}, strict=False)
    return masters_of(model)


def adafactor_resumed(c, strategy):
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c, precision="bf16")
    step(model, optimizer, c, 0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = {v.dtype for each in optimizer.state_dict()["state"].values() for v in each.values() if v.dim()}
    assert kept == {torch.float32}, kept
    step(model, optimizer, c, 1)
    return masters_of(model)


def adafactor_by_closure(c, strategy):
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c, precision="bf16")
    for number in range(2):

        def closure(number=number):
            assert model.first.weight.dtype == torch.bfloat16
            optimizer.zero_grad()
            loss = loss_of(model, c.rank, number)
            loss.backward()
            return loss

        optimizer.step(closure)
    return masters_of(model)


def found_in_reviews():
    with connected() as c:
        cases = (pending_edit_then_partial_load, adafactor_resumed, adafactor_by_closure)
        return {(case.__name__, strategy): case(c, strategy) for case in cases for strategy in STRATEGIES}


def test_pending_edits_resumed_state_and_closures_have_the_same_bits(ranks):
    for found in ranks(2).run(found_in_reviews):
        for (case, strategy), masters in found.items():
            same(masters, found[case, "ddp"], (case, strategy))
        assert (found["pending_edit_then_partial_load", "zero2"]["last.weight"] == 0.5).all()


@pytest.mark.fake
def test_masters_inside_rounded_parameters_and_gradients_of_other_dtypes_are_refused():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = sherd.distribute(model, optimizer, precision="bf16")
    rounded = pytest.raises(sherd.SherdError, match="is lent in 16 bits by a full_parameters around this")
    with sherd.full_parameters(model), rounded, sherd.full_parameters(model, masters=True):
        pass
    with sherd.full_parameters(model, masters=True), sherd.full_parameters(model, masters=True):
        assert model.first.weight.dtype == torch.float32
    loss_of(model, 0, 0).backward()
    model.first.weight.grad = torch.zeros(7, 15, dtype=torch.float64)
    with pytest.raises(
        sherd.SherdError, match=r"p.grad of 'first.weight' was set to a gradient of torch.float64; write"
    ):
        optimizer.step()
    model.first.weight.grad = None  # or backwards of other models would say so too


def experts(c):
    torch.manual_seed(0)
    names = {0: ["a"], 1: ["b", "c"]}[c.rank]
    model = nn.ModuleDict({"shared": nn.Linear(5, 5), **{f"expert_{name}": nn.Linear(5, 5) for name in names}})
    groups = {"expert_a.*": [0], "expert_b.*": [1], "expert_c.*": [1]}
    optimizer = torch.optim.AdamW(model.parameters())
    return sherd.distribute(model, optimizer, strategy="zero2", comm=c, precision="bf16", groups=groups)


def loads_with_groups():
    with connected() as c:
        model, _ = experts(c)
        state = {name: torch.full_like(value, 1 / 3, dtype=torch.float32) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        if c.rank == 1:
            model["expert_b"].load_state_dict({"weight": torch.full((5, 5), 1 / 7), "bias": torch.zeros(5)})
        return masters_of(model)


def test_ranks_that_hold_different_parameters_load_them(ranks):
    first, second = ranks(2).run(loads_with_groups)
    assert (first["expert_a.weight"] == torch.tensor(1 / 3)).all()
    assert (second["expert_b.weight"] == torch.tensor(1 / 7)).all()
    assert (second["expert_c.weight"] == torch.tensor(1 / 3)).all()
