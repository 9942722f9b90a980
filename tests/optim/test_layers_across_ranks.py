"""LARS and LAMB whose layers are cut across ranks: the same bits under every strategy, and close to one process."""

from __future__ import annotations

import itertools

import pytest
import torch

import sherd
from sherd.api.training import training_of
from sherd.engine.optimizer.layers import LayerTable
from sherd.layout.placement import BLOCK
from sherd.optim.layerwise import totals
from tests.engine import experts
from tests.helpers.averaging import Worlds, by_case, close_to
from tests.helpers.averaging import trained as averaged
from tests.helpers.training import STRATEGIES, close, connected, differ, same
from tests.optim.layerwise import CASES, STEPS, Net, build, dense, loss_of, weights

CLIP, K = 0.02, 2  # clips every step
SMALL = 4096  # bytes of a bucket: a layer that is larger has one of its own, cut for all ranks


def run(c, case, strategy, dtype, state=None, steps=STEPS, **options):
    model = Net(dtype)
    model, optimizer = sherd.distribute(model, build(case, model), strategy=strategy, comm=c, **options)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in range(steps * options.get("accumulate", 1)):
        loss_of(model, c.rank, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def owners_of(model, name):
    """How many ranks have a part of a parameter."""
    members = training_of(model).engine.buckets.parameters
    return len(list(next(member for member in members if member.name == name).segments()))


def trained(transport, cases):
    """By case: weights, and how many ranks have a part of the largest layer."""
    found = []
    with connected(transport) as c:
        for case, strategy, dtype, options in cases:
            model, _ = run(c, case, strategy, dtype, **options)
            found.append((weights(model), owners_of(model, "middle.weight")))
    return found


def check(by_rank, cases, world):
    """All strategies have the same bits on all ranks, close to one process."""
    firsts = {}
    for number, (case, strategy, dtype, options) in enumerate(cases):
        for found in by_rank:
            values, owners = found[number]
            same(values, firsts.setdefault((case, dtype), values), (case, strategy, options))
            assert owners == world or options["bucket_bytes"] != SMALL, "it is not cut"
    for (case, dtype), values in firsts.items():
        expected = weights(dense(case, world, STEPS, K, CLIP))
        values = {name: value.double() for name, value in values.items()}
        close(values, expected, case, rtol=1e-9 if dtype is torch.float64 else 2e-2)
        assert differ(values, weights(Net(torch.float64)))


def cases_of(strategies=STRATEGIES, dtypes=(torch.float32, torch.float64)):
    """Also with all parameters in one bucket, whose cuts are elsewhere."""
    options = {"bucket_bytes": SMALL, "clip_norm": CLIP, "accumulate": K, "accumulate_at": "owner"}
    cases = [(case, s, dtype, options) for case, s, dtype in itertools.product(CASES, strategies, dtypes)]
    return [*cases, *((case, "zero2", torch.float32, {**options, "bucket_bytes": None}) for case in CASES)]


@pytest.mark.parametrize("world", [2, 3])
def test_layers_that_are_cut(ranks, world):
    cases = cases_of(dtypes=(torch.float32, torch.float64) if world == 3 else (torch.float32,))
    by_rank = ranks(world).run(trained, "host", cases)
    if world == 3:
        more = cases_of(("zero2", "zero3"), (torch.float32,))
        over_c10d = ranks(world).run(trained, "c10d", more)
        by_rank, cases = [one + other for one, other in zip(by_rank, over_c10d, strict=True)], cases + more
    check(by_rank, cases, world)


def test_layers_that_are_cut_across_hosts(hosts):
    cases = cases_of(("ddp", "zero2", "zero3"), (torch.float32,))
    check(hosts(2, 2).run(trained, "cluster", cases), cases, 4)


def without_exchange():
    with connected() as c, pytest.MonkeyPatch.context() as patch:
        whole = weights(run(c, "lamb", "ddp", torch.float32)[0])
        patch.setattr(LayerTable, "norms", lambda self, blocks: totals(blocks))
        return whole, weights(run(c, "lamb", "zero2", torch.float32)[0])


def test_parts_alone_would_give_other_norms(ranks):
    for whole, parts in ranks(3).run(without_exchange):
        assert differ(parts, whole)


# ---------------------------------------------------------------- what changes during training


def changing(strategies):
    """bf16; a layer that is unfrozen, one that joins a group later, and another optimizer for the rest."""
    found = []
    with connected() as c:
        for case, strategy in itertools.product(CASES, strategies):
            model = Net(torch.bfloat16)
            model.extra.requires_grad_(False)
            named = dict(model.named_parameters())
            layers = [p for name, p in named.items() if name.startswith(("before", "middle", "extra"))]
            rest = [p for name, p in named.items() if name.startswith(("conv", "norm", "scale", "zero"))]
            kind, options = CASES[case]
            first, second = kind(layers, **options), torch.optim.SGD(rest, lr=0.1)
            model, first, second = sherd.distribute(model, first, second, strategy=strategy, comm=c)
            before = weights(model)
            for step in range(6):
                if step == 2:
                    model.extra.requires_grad_(True)
                if step == 3:
                    first.add_param_group({"params": list(model.after.parameters()), "lr": 0.1})
                loss_of(model, c.rank, 0, torch.bfloat16).backward()
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
            after = weights(model)
            assert all(not torch.equal(before[name], after[name]) for name in before)
            found.append((case, after))
    return found


def test_layers_that_join_later(ranks):
    firsts = {}
    for found in ranks(3).run(changing, ("ddp", "zero2", "zero3")):
        for case, after in found:
            same(after, firsts.setdefault(case, after), case)


# ---------------------------------------------------------------- the exchange


def exchanges():
    """Calls of `all_gather`, bytes of tensors and of control in a step of LAMB beyond those of AdamW; under zero2 and
    ddp. And the bytes of one exchange of two numbers for every block of a rank's slices."""
    with connected("c10d") as c:
        found = []
        for strategy in ("zero2", "ddp"):
            counts = []
            for kind in (torch.optim.AdamW, sherd.optim.LAMB):
                model = Net()
                # In the last step a layer is unused, and no rank owns parts of all of them.
                model, optimizer = sherd.distribute(model, kind(model.parameters()), strategy=strategy, comm=c)
                for step in (0, 2):
                    loss_of(model, c.rank, step, torch.float32).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                counts.append(c.counters.last_step)
            gathers = [count["all_gather"].calls if "all_gather" in count else 0 for count in counts]
            payload = [sum(each.payload for each in count.values()) for count in counts]
            control = [sum(each.control for each in count.values()) for count in counts]
            found.append((gathers[1] - gathers[0], payload[1] - payload[0], control[1] - control[0]))
        blocks = sum(bucket.described.slice_numel for bucket in training_of(model).engine.buckets.buckets) // BLOCK
        before = c.counters.total()
        c.all_gather(torch.zeros(2, blocks, dtype=torch.float64)).wait()
        after = c.counters.total()
        return found, after.payload + after.control - before.payload - before.control


def test_one_exchange_for_all_layers(ranks):
    for (sharded, whole), sent in ranks(3).run(exchanges):
        assert sharded == (1, 0, sent)  # no payload: they are what ranks agree on
        assert whole == (0, 0, 0)


# ---------------------------------------------------------------- state


def saved(strategy, state=None):
    """Weights and state by case, after more steps from the given ones."""
    with connected() as c:
        found = []
        for number, case in enumerate(CASES):
            model, optimizer = run(c, case, strategy, torch.float64, state and state[number], steps=3)
            found.append((model.state_dict(), optimizer.state_dict()))
        return found


def test_state_goes_to_another_world(ranks):
    before = ranks(3).run(saved, "zero2")[0]
    after = {strategy: ranks(2).run(saved, strategy, before)[0] for strategy in ("ddp", "zero3")}
    for number, case in enumerate(CASES):
        same(after["zero3"][number][0], after["ddp"][number][0])
        state, expected = (after[strategy][number][1] for strategy in ("zero3", "ddp"))
        assert state["param_groups"] == expected["param_groups"]
        for index, kept in expected["state"].items():
            same(state["state"][index], kept, (case, index))
        # The same steps by a process that was never distributed.
        model = Net(torch.float64)
        optimizer = build(case, model)
        model.load_state_dict(before[number][0])
        optimizer.load_state_dict(before[number][1])
        for step in range(3):
            (sum(loss_of(model, rank, step, torch.float64) for rank in range(2)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: value for name, value in after["ddp"][number][0].items() if value.numel()}
        close(found, weights(model), case)


# ---------------------------------------------------------------- ranks that hold different parameters, and teams


def lamb(model):
    return sherd.optim.LAMB(model.parameters(), lr=0.02, adapt=True)


def with_experts(strategies):
    with connected() as c:
        found = []
        for strategy in strategies:
            model, optimizer, mine = experts.distributed(c, strategy, lamb)
            for step in range(STEPS):
                experts.loss(model, c.rank, step, mine).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(weights(model))
        return found


def test_groups_of_ranks(ranks):
    expected, _ = experts.dense(lamb, STEPS, lambda rank, _: experts.expert_of(rank), lambda *_: 1 / experts.WORLD)
    for mine in ranks(experts.WORLD).run(with_experts, STRATEGIES):
        for found in mine:
            same(found, mine[0])
        held = weights(expected)
        close(mine[0], {name: held[name] for name in mine[0]})


def test_teams(ranks):
    """Every team measures its own layers; what it keeps can be averaged too."""
    shared = {"every": 2, "over": 2, "inner": "zero2"}
    both = sherd.LocalSGD(every=2, average="parameters and optimizer state")
    cases = [(each, {"optimizer": lamb}) for each in (sherd.LocalSGD(**shared), sherd.LocalSGD(every=2), both)]
    found = by_case(ranks(4).run(averaged, cases))
    for by_rank, size in zip(found[:2], (2, 1), strict=True):
        worlds = Worlds(4 // size, size, optimizer=lamb)
        expected = worlds.run(lambda step, worlds=worlds: worlds.average() if step % 2 else None)
        close_to(by_rank, expected, size, rtol=1e-9)
    for seen in found[2]:
        same(seen[-2], found[2][0][-2])  # after an exchange
    assert differ(found[2][0][-1], found[1][0][-1])


# ---------------------------------------------------------------- what is not a step of layers


class Centred(sherd.optim.LAMB):
    """A step of its own, which looks at whole layers."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad - p.grad.mean()
        return super().step(closure)


def owned_whole():
    with connected() as c:
        model = Net()
        model, _ = sherd.distribute(model, Centred(model.parameters()), strategy="zero2", comm=c)
        return [bucket.holder for bucket in training_of(model).engine.buckets.buckets]


def test_what_has_a_step_of_its_own_is_owned_whole(ranks):
    for holders in ranks(2).run(owned_whole):
        assert holders and None not in holders
