"""What programs do around a step, with parameters that one rank owns whole: everything has the bits of ddp."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

import sherd
from sherd.api.training import training_of
from sherd.engine.contents import Role, pieces, scalars
from tests.engine.optimizer.test_whole import adafactor, loss_of, model_of_matrices, muon_and_adamw
from tests.helpers.training import STRATEGIES, connected, same, weights

pytestmark = pytest.mark.ranks
MAKERS = (muon_and_adamw, adafactor)


class Branches(nn.Module):
    """Of two matrices, a step uses those that it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(20, 30), nn.Linear(20, 30), nn.Linear(30, 11)
        self.empty = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x, used):
        hidden = sum((each(x) for each, use in zip((self.first, self.second), used, strict=True) if use), 0.0)
        return self.third(torch.as_tensor(hidden).tanh() if any(used) else x.new_zeros(len(x), 30)) + self.empty.sum()


def step(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def plain(c, model, optimizers):
    for number in range(3):
        loss_of(model, c.rank, number).backward()
        step(*optimizers)


def accumulating(c, model, optimizers):
    for number in range(4):
        loss_of(model, c.rank, number).backward()
        step(*optimizers)


def gradients_read_and_written(c, model, optimizers):
    kept = []
    for number in range(3):
        loss_of(model, c.rank, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        model[3].weight.grad.clamp_(-0.01, 0.01)
        model[5].weight.grad = model[5].weight.grad.clone() * 2
        model[7].weight.grad.mul_(0.5)
        kept.append(model[0].weight.grad)
        step(*optimizers)
    assert len({float(each.abs().sum()) for each in kept}) == 3, "each of its own step"


def not_finite(c, model, optimizers):
    for number in range(4):
        loss = loss_of(model, c.rank, number)
        (loss * (float("nan") if number == 1 and c.rank == c.world - 1 else 1.0)).backward()
        step(*optimizers)


def frozen_for_a_while(c, model, optimizers):
    for parameter in (model[3].weight, model[7].weight, model[7].bias):
        parameter.requires_grad_(True)
    plain(c, model, optimizers)


def scheduled(c, model, optimizers):
    schedules = [optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for number in range(3):
        loss_of(model, c.rank, number).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            step(optimizer)
            schedule.step()
    optimizers[0].param_groups[0]["lr"] = 1e-4
    loss_of(model, c.rank, 7).backward()
    step(*optimizers)


def saved_and_loaded(c, model, optimizers):
    plain(c, model, optimizers)
    saved = copy.deepcopy((model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))
    loss_of(model, c.rank, 5).backward()
    step(*optimizers)
    model.load_state_dict(saved[0])
    for optimizer, state in zip(optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    plain(c, model, optimizers)


HABITS = {
    plain: {},
    accumulating: {"accumulate": 2, "accumulate_at": "owner"},
    gradients_read_and_written: {},
    not_finite: {"clip_norm": 0.2},
    frozen_for_a_while: {},
    scheduled: {},
    saved_and_loaded: {},
}


def kept_by(optimizers):
    return [optimizer.state_dict() for optimizer in optimizers]


def same_state(found, expected, what):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["param_groups"] == theirs["param_groups"], what
        assert ours["state"].keys() == theirs["state"].keys(), what
        for number, state in theirs["state"].items():
            assert list(ours["state"][number]) == list(state), what
            for key, value in state.items():
                mine = ours["state"][number][key]
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(value)), (what, number, key)
                if isinstance(value, torch.Tensor) and value.dim() > 1:
                    assert mine.stride() == value.stride(), (what, number, key)


def run(c, make, strategy, habit, options):
    model = model_of_matrices()
    if habit is frozen_for_a_while:
        for parameter in (model[3].weight, model[7].weight, model[7].bias):
            parameter.requires_grad_(False)
    optimizers = make(model)
    sherd.distribute(model, *optimizers, strategy=strategy, comm=c, **options)
    habit(c, model, optimizers)
    return weights(model), kept_by(optimizers)


def every_habit(transport):
    with connected(transport) as c:
        for make in MAKERS:
            for habit, options in HABITS.items():
                expected, state = run(c, make, "ddp", habit, options)
                for strategy in STRATEGIES[1:]:
                    what = (make.__name__, habit.__name__, strategy)
                    found, its = run(c, make, strategy, habit, options)
                    same(found, expected, what)
                    same_state(its, state, what)


@pytest.mark.parametrize(("world", "transport"), [(3, "host"), (2, "c10d")])
def test_every_habit_has_the_bits_of_ddp(ranks, world, transport):
    ranks(world).run(every_habit, transport)


def branches(strategy, c):
    model = Branches()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizers = [optim.Muon(matrices, lr=0.02), optim.Adafactor([p for p in model.parameters() if p.dim() < 2])]
    sherd.distribute(model, *optimizers, strategy=strategy, comm=c)
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * number + c.rank)
        used = [(True, True), (True, False), (False, False), (c.rank == 1, True), (True, True), (False, True)][number]
        model(torch.randn(4, 20, generator=generator), used).square().mean().backward()
        step(*optimizers)
    return weights(model), kept_by(optimizers)


def unused_parameters():
    with connected() as c:
        expected, state = branches("ddp", c)
        for strategy in STRATEGIES[1:]:
            found, its = branches(strategy, c)
            same(found, expected, strategy)
            same_state(its, state, strategy)


def test_parameters_that_a_step_does_not_use_are_left_alone(ranks):
    for world in (2, 3):
        ranks(world).run(unused_parameters)


def resumed(states=None):
    """Weights and state after three steps, from the start or from what was saved."""
    with connected() as c:
        found = {}
        for make in MAKERS:
            for strategy in ("ddp", "zero3"):
                model = model_of_matrices()
                optimizers = make(model)
                sherd.distribute(model, *optimizers, strategy=strategy, comm=c)
                if states is not None:
                    saved = copy.deepcopy(states[make.__name__])  # torch's own go on in what they were given
                    model.load_state_dict(saved[0])
                    for optimizer, state in zip(optimizers, saved[1], strict=True):
                        optimizer.load_state_dict(state)
                plain(c, model, optimizers)
                whole = model.state_dict(), kept_by(optimizers)
                if strategy == "ddp":
                    found[make.__name__] = whole
                else:
                    same(whole[0], found[make.__name__][0], make.__name__)
                    same_state(whole[1], found[make.__name__][1], make.__name__)
        return found


def test_state_is_loaded_at_any_world_size(ranks):
    states = ranks(3).run(resumed)[0]
    for world in (2, 1, 3):
        states = ranks(world).run(resumed, states)[0]


def contents():
    """Everything that this rank owns, and what the whole is."""
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            model = model_of_matrices()
            optimizers = muon_and_adamw(model)
            sherd.distribute(model, *optimizers, strategy=strategy, comm=c)
            plain(c, model, optimizers)
            engine = training_of(model).engine
            whole = [bucket for bucket in engine.buckets.buckets if bucket.holder is not None]
            assert bool(whole) == (strategy != "ddp")
            assert all(
                (bucket.optimizer is optimizers[0]) == (bucket in whole) for bucket in engine.buckets.buckets
            ) or (strategy == "ddp")
            owned = [(p.name, p.key, p.role, p.region, p.tensor.clone()) for p in pieces(engine)]
            told = sherd.describe(model)
            found[strategy] = owned, [tuple(each) for each in scalars(engine)], weights(model), told
        return found


def test_what_ranks_own_is_everything_once(ranks):
    by_rank = ranks(3).run(contents)
    for strategy in STRATEGIES:
        whole = by_rank[0][strategy][2]
        times = {name: torch.zeros(value.numel()) for name, value in whole.items()}
        momentum = set()
        for rank, found in enumerate(by_rank):
            owned, _, _, told = found[strategy]
            for name, key, role, region, tensor in owned:
                if role is Role.PARAMETER:
                    times[name][region.start : region.start + region.numel] += 1
                elif key == "momentum_buffer":
                    assert strategy == "ddp" or region.numel == whole[name].numel()
                    momentum.add((name, region))
                assert tensor.numel() == region.numel
            assert ("owned whole" in told) == (strategy != "ddp"), (rank, told)
        assert all(bool((count == 1).all()) for count in times.values())
        assert {name for name, _ in momentum} == {name for name, value in whole.items() if value.dim() == 2}
        names = [(name, key) for found in by_rank for name, key, _ in found[strategy][1]]
        assert len(names) == len(set(names)) > 0


def given_later():
    """A frozen parameter in no group at first, and then in one of Muon's or of AdamW's."""
    with connected() as c:
        for to in (0, 1):
            found = []
            for strategy in STRATEGIES:
                model = model_of_matrices()
                model[5].weight.requires_grad_(False)
                matrices = [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]
                others = [p for p in model.parameters() if p.dim() != 2]
                optimizers = optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01)
                sherd.distribute(model, *optimizers, strategy=strategy, comm=c)
                plain(c, model, optimizers)
                model[5].weight.requires_grad_(True)
                optimizers[to].add_param_group({"params": [model[5].weight], "lr": 0.03})
                plain(c, model, optimizers)
                found.append((weights(model), kept_by(optimizers)))
                same(found[-1][0], found[0][0], (to, strategy))
                same_state(found[-1][1], found[0][1], (to, strategy))


def test_a_parameter_may_be_given_to_either_optimizer_later(ranks):
    ranks(2).run(given_later)


class Counting(optim.Optimizer):
    """Looks at the first parameter of a group, and counts steps in groups and in an attribute: by rows of a matrix."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            assert group["params"][0].device.type == "cpu"
            group["count"] = group.get("count", 0) + any(p.grad is not None for p in group["params"])
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = p.grad  # kept as it is, until the next step
                    p -= group["lr"] / group["count"] * p.grad / (1 + p.grad.norm())


def counting():
    with connected() as c:
        found = []
        for strategy in STRATEGIES:
            model = model_of_matrices()
            # More groups than parameters on a rank: some have no parameter there.
            optimizer = Counting([{"params": [parameter]} for parameter in model.parameters()])
            sherd.distribute(model, optimizer, strategy=strategy, comm=c)
            plain(c, model, (optimizer,))
            assert optimizer.calls == 3
            assert [group["count"] for group in optimizer.param_groups] == [3] * len(optimizer.param_groups)
            found.append((weights(model), kept_by((optimizer,))))
            same(found[-1][0], found[0][0], strategy)
            same_state(found[-1][1], found[0][1], strategy)


def test_groups_of_which_a_rank_owns_nothing_are_counted_all_the_same(ranks):
    ranks(3).run(counting)


def shared_in_groups():
    """Stage 3 on four ranks that gather in groups of two, and stages without shared memory."""
    with connected() as c:
        for make in MAKERS:
            expected = run(c, make, "ddp", saved_and_loaded, {})
            for stage, over in ((1, "world"), (2, 2), (3, "world"), (3, 2), (3, 1)):
                strategy = sherd.ZeRO(stage=stage, shard_over=over, share_host_memory=False)
                found = run(c, make, strategy, saved_and_loaded, {})
                same(found[0], expected[0], (make.__name__, stage, over))
                same_state(found[1], expected[1], (make.__name__, stage, over))


def test_copies_of_their_own_and_groups_of_ranks(ranks):
    ranks(4).run(shared_in_groups)


def experts(strategy, c):
    """Each rank has an expert of its own, besides what all have."""
    torch.manual_seed(0)
    every = [nn.Linear(12, 12, bias=False) for _ in range(2)]
    model = nn.ModuleDict({"in": nn.Linear(12, 12, bias=False), f"expert{c.rank}": every[c.rank]})
    optimizer = optim.Muon(model.parameters(), lr=0.02)
    groups = {f"expert{rank}.*": [rank] for rank in range(2)}
    sherd.distribute(model, optimizer, strategy=strategy, comm=c, groups=groups)
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + c.rank)
        x = torch.randn(4, 12, generator=generator)
        model[f"expert{c.rank}"](model["in"](x)).square().mean().backward()
        step(optimizer)
    optimizer.state_dict()
    return weights(model)


def ranks_with_experts():
    with connected() as c:
        expected = experts("ddp", c)
        for strategy in ("zero1", "zero2", "zero3"):
            same(experts(strategy, c), expected, strategy)


def test_ranks_that_hold_different_parameters(ranks):
    ranks(2).run(ranks_with_experts)


def apart():
    """Teams that train apart, with zero2 inside each."""
    with connected() as c:
        for averaging in (sherd.DiLoCo, sherd.LocalSGD):
            found = [
                run(c, muon_and_adamw, averaging(every=2, over=2, inner=inner), plain, {})[0]
                for inner in ("ddp", "zero2")
            ]
            same(found[1], found[0], averaging.__name__)


def test_teams_that_train_apart(ranks):
    ranks(4).run(apart)
