"""Ranks that hold different parameters, against one process that holds all of them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import sherd
from sherd import ConfigError, Diverged
from sherd.api.training import training_of
from sherd.engine.contents import Role, pieces
from sherd.engine.gradients.round import MAX_WAITING, Round
from tests.engine.experts import (
    ACROSS,
    CLIP,
    HALVES,
    ODD,
    OPTIMIZERS,
    WORLD,
    Experts,
    dense,
    distributed,
    expert_of,
    loss,
    state_by_name,
)
from tests.helpers.hosts import on_hosts
from tests.helpers.training import adamw, close, connected, same, sgd, weights

STEPS, K = 6, 2


def train(model, optimizer, rank, steps, used, **options):
    for step in range(steps):
        loss(model, rank, step, used(rank, step), **options).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(transport, cases, groups):
    """Weights, optimizer state and norm of this rank for each case."""
    found = []
    with connected(transport) as c:
        for strategy, kind, where, bucket_bytes in cases:
            options = {"clip_norm": CLIP, "accumulate": K, "accumulate_at": where, "bucket_bytes": bucket_bytes}
            model, optimizer, mine = distributed(c, strategy, OPTIMIZERS[kind], groups, **options)
            train(model, optimizer, c.rank, STEPS, lambda rank, step, mine=mine: mine)
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            state = {name: value.clone() for name, value in state_by_name(model, optimizer).items()}
            same(saved, weights(model))
            found.append((saved, state))
    return found


@pytest.mark.parametrize(
    ("transport", "groups", "strategies"),
    [
        ("host", HALVES, ("ddp", "zero1", "zero2", "zero3")),
        ("c10d", HALVES, ("ddp", "zero1", "zero2")),
        ("host", ODD, ("ddp", "zero2")),
        ("cluster", HALVES, ("ddp", "zero1", "zero2")),
        ("cluster", ACROSS, ("ddp", "zero2")),
    ],
)
def test_experts_train_as_in_one_process(ranks, transport, groups, strategies):
    local = 2 if transport == "cluster" else WORLD
    # Buckets of 1024 bytes: many of them, of both kinds.
    cases = [(s, *each) for s, each in itertools.product(strategies, (("AdamW", "rank", None), ("SGD", "owner", 1024)))]
    found = ranks(WORLD).run(on_hosts, local, trained, transport, cases, groups)
    for kind in OPTIMIZERS:
        model, optimizer = dense(
            OPTIMIZERS[kind], STEPS, lambda rank, _: expert_of(rank, groups), lambda *_: 1 / (WORLD * K), K, CLIP
        )
        values, state = weights(model), state_by_name(model, optimizer)
        firsts = {}
        for rank, by_case in enumerate(found):
            for case, (saved, kept) in zip(cases, by_case, strict=True):
                if case[1] != kind:
                    continue
                assert all(name in saved for name in values if f"experts.{1 - expert_of(rank, groups)}" not in name)
                close(saved, {name: values[name] for name in saved}, (case, rank))
                assert {name.split(":")[0] for name in kept} == set(saved)
                close(kept, {name: state[name] for name in kept}, (case, rank))
                # The same bits as the first strategy, wherever it adds up the same.
                first = firsts.setdefault((rank, case[2]), (saved, kept))
                same(saved, first[0], (case, rank))
                same(kept, first[1], (case, rank))


def variations():
    """Weights of losses, sums, unused experts, several optimizers, and what is wrong, on one connection."""
    found = {}
    with connected() as c:
        for strategy in ("ddp", "zero1", "zero2"):
            model, optimizer, mine = distributed(c, strategy, sgd, loss_reduction="sum", clip_norm=CLIP)
            train(model, optimizer, c.rank, 2, lambda *_, mine=mine: mine, reduction="sum")
            found[strategy, "sum"] = weights(model)

            model, optimizer, mine = distributed(c, strategy, sgd)
            for step in range(2):
                sherd.weigh(model, 1 + c.rank + step)
                train_once(model, optimizer, c.rank, step, mine)
            found[strategy, "weighed"] = weights(model)

            model, optimizer, _ = distributed(c, strategy, adamw)
            train(model, optimizer, c.rank, 4, used_at_times)
            found[strategy, "unused"] = weights(model)
            found[strategy, "unused state"] = state_by_name(model, optimizer)

            model = Experts([expert_of(c.rank)])
            one, other = adamw(torch.nn.ModuleList([model.before, model.after])), sgd(model.experts)
            model, one, other = sherd.distribute(model, one, other, strategy=strategy, comm=c, groups=HALVES)
            for step in range(3):
                loss(model, c.rank, step, used_at_times(c.rank, step)).backward()
                for optimizer in (one, other):
                    optimizer.step()
                    optimizer.zero_grad()
            found[strategy, "several"] = weights(model)
    return found


def train_once(model, optimizer, rank, step, expert):
    loss(model, rank, step, expert).backward()
    optimizer.step()
    optimizer.zero_grad()


def used_at_times(rank, step):
    """Step 1: nobody uses an expert. Step 2: only rank 1 and rank 2 use theirs."""
    if step == 1 or (step == 2 and rank in (0, 3)):
        return None
    return expert_of(rank)


def test_weights_sums_and_unused_experts(ranks):
    found = ranks(WORLD).run(variations)
    mine, mean = lambda rank, _: expert_of(rank), lambda *_: 1 / WORLD
    totals = [sum(1 + rank + step for rank in range(WORLD)) for step in range(2)]
    references = {
        "sum": dense(sgd, 2, mine, lambda *_: 1.0, clip=CLIP, reduction="sum"),
        "weighed": dense(sgd, 2, mine, lambda rank, step: (1 + rank + step) / totals[step]),
        "unused": dense(adamw, 4, used_at_times, mean),
    }
    expected = {name: weights(model) for name, (model, _) in references.items()}
    expected["unused state"] = state_by_name(*references["unused"])
    expected["several"] = several_dense()
    for rank, by_case in enumerate(found):
        for (strategy, name), values in by_case.items():
            close(values, {key: expected[name][key] for key in values}, (strategy, name, rank))
            same(values, by_case["ddp", name], (strategy, name, rank))
    assert int(expected["unused state"]["experts.0.0.bias: step"]) == 3  # torch skips what has no gradient


def several_dense():
    model = Experts()
    one, other = adamw(torch.nn.ModuleList([model.before, model.after])), sgd(model.experts)
    for step in range(3):
        for rank in range(WORLD):
            (loss(model, rank, step, used_at_times(rank, step)) / WORLD).backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def poisoned(strategy):
    """A NaN in the gradient of an expert, which two ranks hold."""
    with connected() as c:
        model, optimizer, mine = distributed(c, strategy, adamw, clip_norm=CLIP)
        before = weights(model)
        value = loss(model, c.rank, 0, mine)
        if c.rank == 3:
            value = value + model.experts["1"][0].bias.sum() * float("nan")
        value.backward()
        optimizer.step()
        same(weights(model), before, "skipped on every rank")
        optimizer.zero_grad()
        train_once(model, optimizer, c.rank, 1, mine)
        assert all(not torch.equal(before[name], value) for name, value in weights(model).items())
        return training_of(model).gradient(optimizer).skipped


def test_an_infinite_gradient_of_one_expert_skips_the_step_everywhere(ranks):
    for strategy in ("ddp", "zero2"):
        assert ranks(WORLD).run(poisoned, strategy) == [1] * WORLD


def edits(strategy):
    """Edits of parameters and gradients that only a group holds, alike and not."""
    with connected() as c:
        model, optimizer, mine = distributed(c, strategy, sgd)
        expert, shared = model.experts[str(mine)][0].weight, model.before.weight
        if mine == 0:  # what the other group does not see
            with torch.no_grad():
                expert.mul_(0.5)
        train_once(model, optimizer, c.rank, 0, mine)
        with sherd.full_parameters(model):
            expert.data.mul_(2.0)
            shared.data.mul_(2.0)
        if mine == 1:
            with sherd.full_parameters(model.experts["1"]):
                expert.data.add_(1.0)
        loss(model, c.rank, 1, mine).backward()
        if mine == 1:
            expert.grad.mul_(0.5)
        else:
            model.experts["0"][2].bias.grad = torch.ones(7, dtype=torch.float64)
        assert (sherd.full_grad(expert) is not None) == (expert.grad is not None)
        norm = sherd.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        values = weights(model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        moments = copy.deepcopy(optimizer.state_dict())
        train_once(model, optimizer, c.rank, 2, mine)
        model.load_state_dict(state)
        optimizer.load_state_dict(moments)
        same(weights(model), values, "loaded")
        train_once(model, optimizer, c.rank, 3, mine)
        return norm, values, weights(model)


def edits_dense():
    model = Experts()
    optimizer = sgd(model)
    one, other, shared = model.experts["0"][0].weight, model.experts["1"][0].weight, model.before.weight

    def backward(step):
        for rank in range(WORLD):
            (loss(model, rank, step, expert_of(rank)) / WORLD).backward()

    one.data.mul_(0.5)
    for step in (0, 1, 3):
        backward(step)
        if step == 1:
            other.grad.mul_(0.5)
            model.experts["0"][2].bias.grad = torch.ones(7, dtype=torch.float64)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            for edited in (one, other, shared):
                edited.data.mul_(2.0)
            other.data.add_(1.0)
        if step == 1:
            values = weights(model)
    return norm, values, weights(model)


def test_edits_of_what_a_group_holds(ranks):
    norm, values, later = edits_dense()
    by_strategy = {strategy: ranks(WORLD).run(edits, strategy) for strategy in ("ddp", "zero1", "zero2")}
    for strategy, found in by_strategy.items():
        for rank, (its, before, after) in enumerate(found):
            assert its == pytest.approx(norm.item(), rel=1e-9), (strategy, rank)
            assert its == by_strategy["ddp"][0][0], "the same bits on every rank"
            close(before, {name: values[name] for name in before}, (strategy, rank))
            close(after, {name: later[name] for name in after}, (strategy, rank))
            same(after, by_strategy["ddp"][rank][2], (strategy, rank))


def different_edits(what):
    with connected() as c:
        model, optimizer, mine = distributed(c, "zero2", sgd)
        weight = model.experts[str(mine)][0].weight
        if what == "values" and c.rank == 3:
            with torch.no_grad():
                weight.add_(1.0)
        loss(model, c.rank, 0, mine).backward()
        if what == "gradients" and mine == 1:
            weight.grad = torch.full_like(weight, float(c.rank))
        with pytest.raises(Diverged) as caught:
            optimizer.step()
        assert caught.value.ranks == (2, 3)
        return str(caught.value)


def test_different_edits_name_the_ranks_of_the_group(ranks):
    for text in ranks(WORLD).run(different_edits, "values"):
        assert "parameter 'experts.1.0.weight' was edited only on rank 3 of ranks 2, 3" in text
    for text in ranks(WORLD).run(different_edits, "gradients"):
        assert "p.grad of 'experts.1.0.weight' was set to different values on rank 2 and rank 3" in text


def contents(strategy):
    with connected() as c:
        model, optimizer, mine = distributed(c, strategy, adamw)
        train_once(model, optimizer, c.rank, 0, mine)
        found = pieces(training_of(model).engine)
        owned = [(each.name, each.key, each.role.value, each.region.start, each.tensor.clone()) for each in found]
        return owned, sherd.describe(model), weights(model), state_by_name(model, optimizer)


def test_every_element_has_one_owner_and_describe_counts_all(ranks):
    numel = sum(p.numel() for p in Experts().parameters())
    for strategy in ("ddp", "zero1", "zero2"):
        found = ranks(WORLD).run(contents, strategy)
        for wanted, key in ((Role.PARAMETER, ""), (Role.STATE, "exp_avg")):
            parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
            for owned, *_ in found:
                for name, its, role, start, tensor in owned:
                    if (role, its) == (wanted.value, key):
                        parts.setdefault(name, []).append((start, tensor))
            assert parts.keys() == dict(Experts().named_parameters()).keys()
            for name, its in parts.items():
                whole = torch.cat([tensor for _, tensor in sorted(its, key=lambda part: part[0])])
                rank = 0 if "experts.1" not in name else 3
                values = found[rank][2][name] if wanted is Role.PARAMETER else found[rank][3][f"{name}: {key}"]
                assert torch.equal(whole, values.reshape(-1)), (strategy, name, key)
        for _, text, *_ in found:
            assert f"{numel:,} trainable elements in 12 parameters" in text
            assert "ranks 0, 1 hold 172 elements in 4 parameters" in text
            assert f"{8 * numel:,}" in text.partition("of these")[2]  # the bytes that all ranks own


def buffers_and_unfreezing(strategy):
    with connected() as c:
        mine = expert_of(c.rank)
        model = Experts([mine], seed=c.rank, norm=True)  # rank 0's values, or those of the first that holds them
        for parameter in model.experts.parameters():
            parameter.requires_grad_(False)
        model, optimizer = sherd.distribute(model, adamw(model), strategy=strategy, comm=c, groups=HALVES)
        start = weights(model)
        train_once(model, optimizer, c.rank, 0, mine)
        frozen = weights(model)
        for parameter in model.experts.parameters():
            parameter.requires_grad_()
        train_once(model, optimizer, c.rank, 1, mine)
        statistics = {name: value.clone() for name, value in model.named_buffers()}
        return start, frozen, weights(model), statistics, sherd.describe(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_buffers_and_unfreezing(ranks, strategy):
    found = ranks(WORLD).run(buffers_and_unfreezing, strategy)
    for rank, (start, frozen, last, statistics, text) in enumerate(found):
        first = {**weights(Experts(seed=0)), **weights_of_expert(rank)}
        same(start, {name: first[name] for name in start})
        for name in start:
            assert torch.equal(frozen[name], start[name]) == name.startswith("experts"), name
            assert not torch.equal(last[name], frozen[name]), name
        same(statistics, found[rank // 2 * 2][3], "the same in a group")
        shared = {name: value for name, value in last.items() if not name.startswith("experts")}
        same({name: found[0][2][name] for name in shared}, shared)
        assert "0 frozen" in text
    assert not torch.equal(*(found[rank][3][f"experts.{rank // 2}.3.running_mean"] for rank in (0, 2)))


def weights_of_expert(rank):
    mine = rank // 2
    return {name: value for name, value in weights(Experts(seed=2 * mine)).items() if f"experts.{mine}." in name}


class Chain(nn.Module):
    """Many buckets, and an expert at the end of them or before."""

    def __init__(self, held=(0, 1)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(MAX_WAITING))
        made = [nn.Linear(11, 11) for _ in range(2)]
        self.experts = nn.ModuleDict({str(index): made[index] for index in held})
        self.double()

    def forward(self, x, expert, first):
        x = self.experts[str(expert)](x) if first else x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if first else self.experts[str(expert)](x)


def chained(model, rank, step):
    """In step 1 the gradients of expert 0 come last, on the ranks that hold it."""
    x = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, expert_of(rank), step == 1 and rank < 2).square().mean()


def late(strategy):
    lates = []
    with connected() as c, pytest.MonkeyPatch.context() as patch:
        flush = Round.flush_late
        patch.setattr(Round, "flush_late", lambda self, its, op: (lates.append(len(its)), flush(self, its, op)))
        model = Chain([expert_of(c.rank)])
        model, optimizer = sherd.distribute(
            model, sgd(model), strategy=strategy, comm=c, groups=HALVES, bucket_bytes=1024
        )
        for step in range(3):
            chained(model, c.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return lates, weights(model)


def test_late_gradients_of_one_group_concern_all(ranks):
    model = Chain()
    optimizer = sgd(model)
    for step in range(3):
        for rank in range(WORLD):
            (chained(model, rank, step) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = weights(model)
    for strategy in ("ddp", "zero2"):
        for rank, (lates, values) in enumerate(ranks(WORLD).run(late, strategy)):
            assert len(lates) == 1 and (lates[0] > 0) == (rank < 2), (strategy, rank, lates)
            close(values, {name: expected[name] for name in values}, (strategy, rank))


def refused():
    """What is wrong with groups, and is said on every rank."""
    found = {}
    with connected() as c:
        mine = expert_of(c.rank)

        def attempt(name, model=None, strategy="zero2", **options):
            model = model or Experts([mine])
            with pytest.raises((ConfigError, Diverged)) as caught:
                sherd.distribute(model, sgd(model), strategy=strategy, comm=c, **options)
            found[name] = str(caught.value)

        attempt("undeclared")
        attempt("half declared", groups={"experts.0.*": [0, 1]})
        attempt("unknown rank", groups={"experts.0.*": [0, 1], "experts.1.*": [2, 7]})
        attempt("outside", groups={"experts.0.*": [0, 1], "experts.1.*": [2]})
        attempt("nothing", groups={**HALVES, "expert.0.*": [0, 1]})
        attempt("two groups", groups={**HALVES, "*.0.bias": [0, 1, 2, 3]})
        other = Experts([mine])
        if c.rank == 3:
            other.experts["1"][0] = torch.nn.Linear(7, 13).float()
        attempt("kind", other, groups=HALVES)
        other = Experts([mine])
        if c.rank == 1:
            other.experts["0"][0].bias = None
        attempt("held by one", other, groups=HALVES)
        with connected("c10d") as apart:
            model = Experts([mine])
            with pytest.raises(ConfigError) as caught:
                sherd.distribute(model, sgd(model), strategy="zero3", comm=apart, groups=HALVES)
            found["gathered"] = str(caught.value)
        model, optimizer, _ = distributed(c, "zero2")
        train_once(model, optimizer, c.rank, 0, mine)  # nothing is left of the others
    return found


def test_what_is_wrong_with_groups_is_said_on_every_rank(ranks):
    texts = {
        "undeclared": 'the ranks\' models differ: .*groups={"experts.0.*": [0, 1]}',
        "half declared": "'experts.1.0.weight' is on rank 2 and not on rank 0; .*add the ranks that hold it to groups=",
        "unknown rank": "'experts.1.*' is to be held by rank 7, but there are 4 ranks",
        "outside": "rank 3 holds 'experts.1.0.weight', which groups= gives to ranks [2] only",
        "nothing": "is in the group 'expert.0.*', which matches no parameter or buffer",
        "two groups": "0.bias' matches 'experts..* and '*.0.bias' with ranks [0, 1, 2, 3]; give it one group",
        "held by one": "'experts.0.0.bias' is on rank 0 and not on rank 1; groups= says that ranks [0, 1] hold it",
        "kind": "rank 2 has 'experts.1.0.weight' float64.* where rank 3 has .*float32",
        "gathered": "groups= does not work with parameters that are gathered on use",
    }
    for found in ranks(WORLD).run(refused):
        for name, text in texts.items():
            for part in text.split(".*"):
                assert part in found[name], (name, found[name])
