"""Parameters that are frozen when the model is distributed and unfrozen later, or the other way round."""

from __future__ import annotations

import re
from copy import deepcopy

import pytest
import torch

import sherd
from sherd import Diverged, SherdError
from sherd.api.training import training_of
from tests.helpers.training import (
    STRATEGIES,
    WORLD,
    adamw,
    all_same,
    batch,
    close,
    connected,
    differ,
    distributed,
    double,
    loss_of,
    same,
    sgd,
    weights,
    whole_batch,
)

WINDOW = 2


def frozen():
    """Only the last bias is trained."""
    model = double().requires_grad_(False)
    model[2].bias.requires_grad_(True)
    return model


def trainable(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def unfreeze(model, optimizer, number, by_group):
    """Before step 1 a weight, before step 3 the rest."""
    layers = {1: [model[2].weight], 3: list(model[0].parameters())}.get(number, [])
    for parameter in layers:
        parameter.requires_grad_(True)
    if layers and by_group:
        optimizer.add_param_group({"params": layers, "lr": 0.02})


def loop(model, optimizer, data, by_group, micro=1):
    """Five steps; with `micro` above 1 layers are unfrozen in the middle of a window."""
    for number in range(5):
        for part in range(micro):
            if part == micro - 1:
                unfreeze(model, optimizer, number, by_group)
            (loss_of(model, data(micro * number + part)) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def distributed_loop(model, optimizer, data, by_group, micro):
    """The same with `accumulate=micro`, which divides and skips by itself."""
    for number in range(5 * micro):
        if number % micro == micro - 1:
            unfreeze(model, optimizer, number // micro, by_group)
        loss_of(model, data(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def unfrozen_in_steps(transport, by_group, micro):
    make = trainable if by_group else adamw
    found = {}
    with connected(transport) as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, frozen, make, accumulate=micro, accumulate_at="owner")
            data = lambda number: batch(c.rank, number, dtype=torch.float64)  # noqa: E731
            found[strategy] = distributed_loop(model, optimizer, data, by_group, micro)
            assert "0 frozen" in sherd.describe(model)
    all_same(found)
    return found["ddp"]


@pytest.mark.parametrize("transport", ["host", "c10d"])
@pytest.mark.parametrize("by_group", [False, True], ids=["held from the start", "by add_param_group"])
@pytest.mark.parametrize("micro", [1, WINDOW], ids=["between steps", "in a window"])
def test_parameters_unfrozen_later_are_trained_as_in_one_process(ranks, transport, by_group, micro):
    results = ranks(WORLD).run(unfrozen_in_steps, transport, by_group, micro)
    model = frozen()
    optimizer = (trainable if by_group else adamw)(model)
    expected = loop(model, optimizer, lambda n: whole_batch(n, dtype=torch.float64), by_group, micro)
    same(results[0], results[1])
    close(results[0], expected)
    assert differ(results[0], weights(frozen()))


def frozen_again():
    found = {}
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            found[strategy] = toggled(model, optimizer, lambda n: batch(c.rank, n, dtype=torch.float64))
    all_same(found)
    return found["ddp"]


def toggled(model, optimizer, data):
    for number in range(4):
        model[0].requires_grad_(number != 2)
        loss_of(model, data(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_a_parameter_that_is_frozen_for_a_while_keeps_its_state(ranks):
    results = ranks(WORLD).run(frozen_again)
    model = double()
    close(results[0], toggled(model, sgd(model), lambda n: whole_batch(n, dtype=torch.float64)))


def state_loaded_while_frozen(state):
    found = {}
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, frozen, adamw)
            optimizer.load_state_dict(deepcopy(state))  # torch keeps its tensors
            model.requires_grad_(True)
            loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
            optimizer.step()
            assert optimizer.state_dict()["state"][0]["step"] == 3
            found[strategy] = weights(model)
    all_same(found)
    return found["ddp"]


def test_optimizer_state_that_was_loaded_while_frozen_is_used(ranks):
    model = double()
    optimizer = adamw(model)
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, whole_batch(number, dtype=torch.float64)).backward()
        optimizer.step()
    state = optimizer.state_dict()
    results = ranks(WORLD).run(state_loaded_while_frozen, state)
    model = double()
    optimizer = adamw(model)
    optimizer.load_state_dict(state)
    loss_of(model, whole_batch(dtype=torch.float64)).backward()
    optimizer.step()
    close(results[0], weights(model))


def memory_and_bytes():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, frozen)
            engine = training_of(model).engine
            small = sum(engine.gradient_bytes().values()), engine.layout.padded_numel
            model.requires_grad_(True)
            loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
            optimizer.step()
            assert sum(engine.gradient_bytes().values()) > small[0], strategy
            assert engine.layout.padded_numel > small[1], strategy
            assert engine.buckets.frozen == ()


def test_what_is_frozen_takes_no_room_for_gradients(ranks):
    ranks(WORLD).run(memory_and_bytes)


def one_rank_goes_its_own_way(make, trained):
    """What a rank is told under each strategy where rank 1 alone freezes a weight, or unfreezes it."""
    found = {}
    for strategy in STRATEGIES:
        with connected(timeout=20.0) as c:
            model, optimizer = distributed(c, strategy, make)
            with pytest.raises(SherdError) as error:
                for number in range(3):
                    if number == 1 and c.rank == 1:
                        model[0].weight.requires_grad_(trained)
                    loss_of(model, batch(c.rank, number, dtype=torch.float64)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found[strategy] = f"{type(error.value).__name__}: {error.value}"
    return found


def test_a_rank_that_unfreezes_alone_is_named_with_the_step(ranks):
    for found in ranks(WORLD).run(one_rank_goes_its_own_way, frozen, True):
        for text in found.values():
            assert "rank 1" in text and "unfreezing 0.weight before step 1" in text, text
            assert "TimedOut" not in text, text


def test_a_rank_that_freezes_alone_is_named_with_the_step(ranks):
    for found in ranks(WORLD).run(one_rank_goes_its_own_way, double, False):
        for text in found.values():
            assert re.search(r"step 1: parameter '0\.weight' requires a gradient on rank 0 .*not on rank 1", text), text


def ranks_unfreeze_different_ones():
    with connected() as c:
        model, _ = distributed(c, "zero2", frozen)
        model[0 if c.rank else 2].weight.requires_grad_(True)
        with pytest.raises(Diverged, match=r"before step 0 rank 0 and rank 1 unfroze different .*0\.weight.*2\.weight"):
            loss_of(model, batch(c.rank, dtype=torch.float64)).backward()


def test_ranks_that_unfreeze_different_parameters_are_named(ranks):
    ranks(WORLD).run(ranks_unfreeze_different_ones)
