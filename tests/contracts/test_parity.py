"""Contract 1: every strategy trains the same bits over every transport, and what one process would train."""

from __future__ import annotations

import functools
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sherd
from sherd import CommOptions, comm
from sherd.api.training import training_of
from tests.helpers.parity_models import MODELS, OPTIMIZERS, adamw, batch, build, groups, loss_of, whole_batch

# Small buckets: many of them, parameters larger than one, and slices that are cut inside parameters.
BUCKET_BYTES = 4096
STEPS = 20
FEW = 8  # steps, where bits are compared: what differs once goes on to differ
STRATEGIES = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "zero2, private": sherd.ZeRO(stage=2, share_host_memory=False),
    "zero3, gathered": sherd.ZeRO(stage=3, share_host_memory=False),
}
NAMES = ("ddp", "zero1", "zero2", "zero3")
# Over c10d every copy is private already.
EVERYWHERE = (*itertools.product(("host",), STRATEGIES), *itertools.product(("c10d",), NAMES))


def loop(model, optimizer, batches, each=None):
    """The plain loop; its losses. `each(model)` is called before every step."""
    losses = []
    for inputs, targets in batches:
        loss = loss_of(model, inputs, targets)
        loss.backward()
        if each is not None:
            each(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def exact(model):
    """All weights, as bytes."""
    return {name: p.detach().view(-1).view(torch.uint8).numpy().tobytes() for name, p in model.named_parameters()}


def train(c, name, strategy, *, steps=STEPS, shift=0, optimizer="adamw", dtype=torch.float32, each=None, **options):
    """Train one model on this rank, from weights that are rank 0's; its losses and the model."""
    model = build(name, dtype, seed=c.rank)
    model, stepper = sherd.distribute(
        model,
        OPTIMIZERS[optimizer](model),
        strategy=STRATEGIES[strategy],
        comm=c,
        **{"bucket_bytes": BUCKET_BYTES, **options},
    )
    batches = (batch(model, number, c.rank + shift) for number in range(steps))
    return loop(model, stepper, batches, each), model


def clipping(norms, max_norm):
    """Clip by hand, and keep the norms of whole windows."""

    def clip(model):
        norm = sherd.clip_grad_norm_(model, max_norm).item()
        if not math.isnan(norm):  # inside a window there is no gradient and so no norm
            norms.append(norm)

    return clip


def compared(name, where, options, group=None):
    """Losses and weights of every strategy over every transport, the norms that were clipped, and the limit.

    The limit is a norm between those of an unclipped run, so that some steps are clipped and others are not.
    """
    results, norms, free, options = {}, [], [], {"steps": FEW, **options}
    with comm.connect(CommOptions(transport="host", group=group)) as c:
        losses, model = train(c, name, "ddp", each=clipping(free, 1e9), **options)
        results["not clipped"] = losses, exact(model)
        limit = statistics.median(free)
        losses, model = train(c, name, "zero2", each=clipping(norms, limit), **options)
        results["clipped by hand"] = losses, exact(model)
    for transport in ("host", "c10d"):
        with comm.connect(CommOptions(transport=transport, group=group)) as c:
            for strategy in (strategy for carrier, strategy in where if carrier == transport):
                losses, model = train(c, name, strategy, clip_norm=limit, **options)
                results[transport, strategy] = losses, exact(model)
    return results, norms, limit


def check_same(by_rank, where):
    """One set of weights everywhere, one list of losses per rank, and clipping that counts."""
    for rank, (results, norms, limit) in enumerate(by_rank):
        first, *others = where
        losses, weights = results[first]
        for other in (*others, "clipped by hand"):
            found_losses, found_weights = results[other]
            wrong = [name for name in weights if found_weights[name] != weights[name]]
            assert not wrong, f"rank {rank}: {other} differs from {first} in {wrong}"
            assert found_losses == losses, f"rank {rank}: {other} has other losses than {first}"
        assert weights == by_rank[0][0][first][1], f"rank {rank} has other weights than rank 0"
        assert min(norms) < limit < max(norms)
        assert results["not clipped"][1] != weights
    assert by_rank[0][0][first][0] != by_rank[1][0][first][0]  # ranks see different data


def often(chosen, *values):
    """The product of the values: those that are `chosen` in every run of the tests, the others under `make fuzz`."""
    return [
        pytest.param(*each, marks=() if each in chosen else pytest.mark.fuzz) for each in itertools.product(*values)
    ]


CHOSEN = {("transformer", 2), ("transformer", 3), ("convolutional", 2), ("convolutional", 4), ("recurrent", 3)}


@pytest.mark.parametrize(("name", "world"), often(CHOSEN, MODELS, (2, 3, 4)))
def test_strategies_train_the_same_bits(ranks, name, world):
    check_same(ranks(world).run(compared, name, EVERYWHERE, {}), EVERYWHERE)


ACCUMULATED = {
    ("transformer", 3, "rank"),
    ("transformer", 2, "owner"),
    ("convolutional", 4, "owner"),
    ("recurrent", 2, "rank"),
}
FEWER = (*itertools.product(("host",), STRATEGIES), ("c10d", "ddp"), ("c10d", "zero1"), ("c10d", "zero2"))


@pytest.mark.parametrize(("name", "world", "at"), often(ACCUMULATED, MODELS, (2, 3, 4), ("rank", "owner")))
def test_strategies_train_the_same_bits_with_accumulation(ranks, name, world, at):
    options = {"accumulate": 3, "accumulate_at": at, "steps": 12}
    check_same(ranks(world).run(compared, name, FEWER, options), FEWER)


def test_the_summation_tree_counts_and_not_the_transport(ranks):
    found = {group: ranks(4).run(compared, "convolutional", FEWER, {"steps": 6}, group) for group in (2, 4)}
    for by_rank in found.values():
        check_same(by_rank, FEWER)
    assert found[2][0][0][FEWER[0]][1] != found[4][0][0][FEWER[0]][1]


def shifted(shift):
    """Train where the last rank may see other data than it should."""
    with comm.connect(CommOptions(transport="host")) as c:
        return exact(train(c, "transformer", "zero2", steps=2, shift=shift if c.rank == c.world - 1 else 0)[1])


def test_other_data_on_one_rank_gives_other_weights(ranks):
    right, wrong = ranks(2).run(shifted, 0), ranks(2).run(shifted, 1)
    assert right[0] == right[1]
    assert wrong[0] == wrong[1]
    assert all(right[0][name] != wrong[0][name] for name in right[0])


# Against one process.


def alone(name, world, optimizer="adamw", dtype=torch.float32, steps=STEPS, clip_norm=None, accumulate=1):
    """Plain torch on everybody's data: losses and the model."""
    model = build(name, dtype)
    stepper = OPTIMIZERS[optimizer](model)
    losses = []
    for step in range(steps):
        for number in range(step * accumulate, (step + 1) * accumulate):
            loss = loss_of(model, *whole_batch(model, number, world))
            (loss / accumulate).backward()
            losses.append(loss.item())
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepper.step()
        stepper.zero_grad()
    return losses, model


def far(found, expected):
    """The largest difference of two tensors, relative to the largest element."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def check_close(found, model, limit):
    for name, parameter in model.named_parameters():
        assert far(found[name], parameter.detach()) <= limit, name


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def in_double(name, optimizers, options):
    with comm.connect(CommOptions(transport="host")) as c:
        found = {}
        for optimizer, strategy in itertools.product(optimizers, ("ddp", "zero2")):
            _, model = train(c, name, strategy, optimizer=optimizer, dtype=torch.float64, **options)
            found[optimizer, strategy] = state(model)
        return found


CLIP = {"transformer": 4.0, "convolutional": 1.2, "recurrent": 0.22}


@pytest.mark.parametrize(("name", "world"), [("transformer", 2), ("convolutional", 3), ("recurrent", 4)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_in_double_precision_weights_are_those_of_one_process(ranks, name, world, accumulate):
    options = {"steps": STEPS // accumulate * accumulate, "clip_norm": CLIP[name], "accumulate": accumulate}
    by_rank = ranks(world).run(in_double, name, tuple(OPTIMIZERS), options)
    for optimizer in OPTIMIZERS:
        options["steps"] = STEPS // accumulate
        _, model = alone(name, world, optimizer, torch.float64, **options)
        for found in by_rank:
            check_close(found[optimizer, "ddp"], model, 1e-9)
            check_close(found[optimizer, "zero2"], model, 1e-9)


def in_single(name):
    """Losses, and the gradients of the first step read in both ways."""
    with comm.connect(CommOptions(transport="host")) as c:
        found = {}
        for strategy in NAMES:
            first = {}

            def read(model, into=first):
                if not into:
                    into.update({name: sherd.full_grad(p).clone() for name, p in model.named_parameters()})
                    assert all(torch.equal(p.grad, into[name]) for name, p in model.named_parameters())

            losses, _ = train(c, name, strategy, each=read)
            found[strategy] = losses, first
        return found


@pytest.mark.parametrize(("name", "world"), [("transformer", 2), ("convolutional", 3), ("recurrent", 4)])
def test_in_single_precision_losses_and_first_gradients_are_those_of_one_process(ranks, name, world):
    by_rank = ranks(world).run(in_single, name)
    losses, _ = alone(name, world)
    model = build(name)
    loss_of(model, *whole_batch(model, 0, world)).backward()
    for strategy in NAMES:
        mean = [statistics.fmean(each) for each in zip(*(found[strategy][0] for found in by_rank), strict=True)]
        assert mean == pytest.approx(losses, rel=1e-6), strategy
        for found in by_rank:
            for key, parameter in model.named_parameters():
                assert far(found[strategy][1][key], parameter.grad) <= 1e-5, (strategy, key)


@pytest.mark.fake
@pytest.mark.parametrize("strategy", NAMES)
def test_a_world_of_one_is_plain_torch(strategy):
    for name in MODELS:
        with comm.connect(CommOptions()) as c:
            losses, model = train(c, name, strategy)
        expected_losses, expected = alone(name, 1)
        assert losses == expected_losses
        assert exact(model) == exact(expected)


@pytest.mark.fake
def test_a_world_of_one_clips_and_accumulates_as_plain_torch():
    options = {"optimizer": "adamw", "dtype": torch.float64, "clip_norm": 1.0, "accumulate": 3}
    _, expected = alone("convolutional", 1, steps=5, **options)
    for strategy, at in itertools.product(NAMES, ("rank", "owner")):
        with comm.connect(CommOptions()) as c:
            _, model = train(c, "convolutional", strategy, steps=15, accumulate_at=at, **options)
        check_close(state(model), expected, 1e-9)


# What is not sent.


def sent(strategy, at):
    """Payload bytes of each backward of two windows."""
    with comm.connect(CommOptions(transport="host")) as c:
        model = build("convolutional")
        model, optimizer = sherd.distribute(
            model, adamw(model), strategy=strategy, accumulate=3, accumulate_at=at, comm=c, bucket_bytes=BUCKET_BYTES
        )
        counters = training_of(model).engine.comm.counters
        payload = []
        for number in range(6):
            before = counters.total().payload
            loss_of(model, *batch(model, number, c.rank)).backward()
            payload.append(counters.total().payload - before)
            assert (next(model.parameters()).grad is None) == (
                number % 3 < 2
            )  # a gradient is there once it is complete
            optimizer.step()
            optimizer.zero_grad()
        return payload


@pytest.mark.parametrize("strategy", NAMES)
def test_inside_a_window_of_the_rank_nothing_is_exchanged(ranks, strategy):
    for payload in ranks(2).run(sent, strategy, "rank"):
        assert [number > 0 for number in payload] == [False, False, True] * 2
    for payload in ranks(2).run(sent, strategy, "owner"):
        assert all(payload)


# Random models.

SHAPES = st.sampled_from(
    [(), (1,), (7, 15), (255,), (256,), (257,), (3, 100), (513,), (40, 33), (2, 3, 5), (1, 1025), (61, 67)]
)
CASES = st.fixed_dictionaries(
    {
        "shapes": st.lists(SHAPES, min_size=1, max_size=7),
        "dtypes": st.lists(st.sampled_from(["float32", "float32", "float64", "bfloat16"]), min_size=7, max_size=7),
        "unused": st.sampled_from([0.0, 0.3]),
        "seed": st.integers(0, 1 << 20),
        "clip_norm": st.sampled_from([None, 0.3]),
        "bucket_bytes": st.sampled_from([1024, 2048, 4096, 1 << 16, None]),
        "accumulate": st.sampled_from([1, 1, 2, 3]),
        "accumulate_at": st.sampled_from([None, "rank", "owner"]),
    }
)


class Loose(nn.Module):
    """Parameters of any shapes, and one more that is always used."""

    def __init__(self, shapes, dtypes, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            torch.randn(shape, generator=generator).to(getattr(torch, d))
            for shape, d in zip(shapes, dtypes, strict=False)
        ]
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in (*tensors, torch.ones(3)))

    def loss(self, number, rank, unused):
        """Each parameter against numbers of its own; some are left out, here or on all ranks."""
        everywhere = torch.Generator().manual_seed(number)
        here = torch.Generator().manual_seed(1000 * (number + 1) + rank)
        total = 0.0
        for position, weight in enumerate(self.weights):
            out = torch.rand((), generator=everywhere) < unused or torch.rand((), generator=here) < unused
            scale = torch.randn(weight.shape, generator=here).to(weight.dtype)
            if position == len(self.weights) - 1 or not out:
                total = total + torch.sin(weight * scale).mean().double()
        return total


def random_case(case, strategies, transport):
    case = dict(case)
    shapes, dtypes, unused, seed = (case.pop(key) for key in ("shapes", "dtypes", "unused", "seed"))
    case["accumulate_at"] = case["accumulate_at"] or "owner"
    found = {}
    with comm.connect(CommOptions(transport=transport)) as c:
        for strategy in strategies:
            model = Loose(shapes, dtypes, seed + c.rank)
            optimizer = torch.optim.AdamW(groups(model), lr=0.02)
            model, optimizer = sherd.distribute(model, optimizer, strategy=STRATEGIES[strategy], comm=c, **case)
            losses = []
            for number in range(3 * case["accumulate"]):
                loss = model.loss(seed + number, c.rank, unused)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found[strategy] = losses, exact(model)
    return found


def check_random(ranks, world, case, transport):
    strategies = ["ddp", "zero1", "zero2", "zero2, private"]
    if transport == "host":
        strategies.append("zero3")
    if not case["unused"]:  # ranks gather together, so they must use the same parameters
        strategies.append("zero3, gathered")
    by_rank = ranks(world).run(random_case, case, tuple(strategies), transport)
    for rank, found in enumerate(by_rank):
        for strategy, (losses, weights) in found.items():
            wrong = [name for name, data in found["ddp"][1].items() if weights[name] != data]
            assert not wrong, f"rank {rank}: {strategy} differs from ddp in {wrong}"
            assert losses == found["ddp"][0], (rank, strategy)
        assert found["ddp"][1] == by_rank[0]["ddp"][1], rank


WORLDS, TRANSPORTS = st.integers(2, 4), st.sampled_from(["host", "host", "c10d"])
examples = functools.partial(settings, deadline=None, print_blob=True)


@examples(max_examples=4)
@given(WORLDS, CASES, TRANSPORTS)
def test_random_models_train_the_same_bits(ranks, world, case, transport):
    check_random(ranks, world, case, transport)


@pytest.mark.fuzz
@examples(max_examples=400)
@given(WORLDS, CASES, TRANSPORTS)
def test_many_random_models_train_the_same_bits(ranks, world, case, transport):
    check_random(ranks, world, case, transport)
