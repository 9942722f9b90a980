"""What programs do besides a plain loop, with 16-bit parameters: the same bits under every strategy."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sherd
from sherd.api import apply
from sherd.errors import ConfigError, SherdError
from tests.helpers.half import expected, loss_of, masters_of, network, recorded
from tests.helpers.log_lines import log_lines
from tests.helpers.training import STRATEGIES, connected, same

ACCUMULATED = ("rank", "owner")


def start(c, strategy, optimizers=None, make=network, **options):
    model = make()
    made = optimizers(model) if optimizers else (torch.optim.AdamW(model.parameters(), lr=1e-2),)
    return sherd.distribute(model, *made, strategy=strategy, comm=c, precision="bf16", **options)


def plain(model, optimizers, c, number):
    loss_of(model, c.rank, number).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_torch(c, strategy, at):
    model, optimizer = start(c, strategy, accumulate_at=at)
    norms = []
    for number in range(3):
        for micro in range(2):
            loss_of(model, c.rank, 2 * number + micro).backward()
        kinds = {p.grad.dtype for p in model.parameters()}
        assert kinds == {torch.float32}, kinds
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
    return masters_of(model) | {"norms": torch.stack(norms)}


def clipped_by_sherd(c, strategy, at):
    model, optimizer = start(c, strategy, accumulate=2, accumulate_at=at, clip_norm=0.01)
    for number in range(6):
        plain(model, [optimizer], c, number)
    return masters_of(model)


def edited_gradients(c, strategy, at):
    model, optimizer = start(c, strategy, accumulate_at=at)
    for number in range(3):
        loss_of(model, c.rank, number).backward()
        model.second.weight.grad.mul_(3.0)
        model.first.weight.grad = torch.full((7, 15), 0.1, dtype=(torch.bfloat16, torch.float32)[number % 2])
        model.last.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return masters_of(model)


def held_back(c, strategy, at):
    model, optimizer = start(c, strategy, accumulate_at=at)
    for number in range(3):
        with sherd.no_sync(model):
            sherd.weigh(model, 1 + c.rank)
            loss_of(model, c.rank, 2 * number).backward()
        sherd.weigh(model, 2)
        loss_of(model, c.rank, 2 * number + 1).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 1)
    return masters_of(model)


def two(model):
    later = [*model.second.parameters(), *model.last.parameters()]
    first = [*model.first.parameters(), *model.norm.parameters()]
    return torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(later, lr=0.01, fused=True)


def two_optimizers(c, strategy, at):
    model, *optimizers = start(c, strategy, two, accumulate_at=at)
    for number in range(4):
        plain(model, optimizers if number != 2 else optimizers[:1], c, number)
        if number == 2:
            optimizers[1].zero_grad()
    return masters_of(model)


def frozen():
    model = network()
    model.second.requires_grad_(False)
    return model


def unfrozen(c, strategy, at):
    model, optimizer = start(c, strategy, make=frozen, accumulate_at=at)
    plain(model, [optimizer], c, 0)
    assert model.second.weight.dtype == torch.bfloat16
    model.second.requires_grad_(True)
    for number in range(1, 4):
        plain(model, [optimizer], c, number)
    found = masters_of(model)
    assert found["second.weight"].dtype == torch.float32
    assert not torch.equal(found["second.weight"], found["second.weight"].bfloat16().float())
    return found


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = network(), nn.Linear(15, 3)

    def forward(self, x):
        return self.first(x)


def unused(c, strategy, at):
    torch.manual_seed(1)
    model, optimizer = start(c, strategy, make=Unused, accumulate_at=at)
    before = masters_of(model)
    for number in range(3):
        plain(model, [optimizer], c, number)
    found = masters_of(model)
    assert torch.equal(found["second.weight"], before["second.weight"])  # no decay either
    return found


HABITS = (clipped_by_torch, clipped_by_sherd, edited_gradients, held_back, two_optimizers, unfrozen, unused)


def run(transport):
    with connected(transport) as c:
        return {
            (habit.__name__, at, strategy): habit(c, strategy, at)
            for habit in HABITS
            for at in ACCUMULATED
            for strategy in STRATEGIES
        }


@pytest.mark.parametrize(("world", "transport"), [(1, "auto"), (2, "host"), (3, "c10d")])
def test_habits_have_the_same_bits_under_every_strategy(ranks, world, transport):
    for found in ranks(world).run(run, transport):
        for (habit, at, strategy), masters in found.items():
            same(masters, found[habit, at, "ddp"], (habit, at, strategy))


def adafactor(parameters, lr):
    return torch.optim.Adafactor(parameters, lr=lr)


BF16_SUMS = {"grad_dtype": "bf16", "keep_fp32": []}
SUMS = {torch.float32: {}, torch.bfloat16: BF16_SUMS}


def whole(transport):
    with connected(transport) as c:
        cases = itertools.product(STRATEGIES, SUMS)
        return {case: recorded(c, case[0], make=adafactor, precision="bf16", **SUMS[case[1]]) for case in cases}


@pytest.mark.parametrize(("world", "transport"), [(2, "host"), (3, "c10d")])
def test_an_optimizer_of_whole_tensors_steps_masters(ranks, world, transport):
    wire = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}
    by_rank = ranks(world).run(whole, transport)
    for strategy, kept in by_rank[0]:
        mine = [found[strategy, kept] for found in by_rank]
        after = expected(mine, wire, kept, at="rank" if strategy in ("ddp", "zero1") else "owner", make=adafactor)
        for step, wanted in enumerate(after):
            same(mine[-1][1][step + 1], wanted, (strategy, kept, step))


def copies(strategy):
    with connected() as c:
        model, optimizer = start(c, strategy)
        plain(model, [optimizer], c, 0)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1.0)
        before = masters_of(model)
        plain(model, [optimizer], c, 1)
        after = masters_of(model)
        state = optimizer.state_dict()["state"]
        assert {value["exp_avg"].dtype for value in state.values()} == {torch.float32}
        return [p.dtype for p in other.parameters()], before, after, loss_of(other, 0, 0).item()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_are_plain_and_their_own(ranks, strategy):
    for dtypes, before, after, loss in ranks(2).run(copies, strategy):
        assert dtypes[0] == torch.bfloat16 and torch.float32 in dtypes
        assert not torch.equal(before["first.weight"], after["first.weight"])
        assert math.isfinite(loss)  # it can be called


# ---------------------------------------------------------------- bad input


def refused(match, error=ConfigError, make=network, optimizer=torch.optim.AdamW, **options):
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    things = [model] if optimizer is None else [model, optimizer(model.parameters())]
    with pytest.raises(error, match=match):
        sherd.distribute(*things, **options)
    same({name: p.detach() for name, p in model.named_parameters()}, before)


@pytest.mark.fake
def test_what_cannot_be_right_is_refused_in_one_message():
    refused(r"unknown precision='bf61'; did you mean 'bf16'", precision="bf61")
    refused(r"unknown precision='half'; did you mean 'fp16'\?", precision="half")
    refused(r"unknown precision='bfloat16'; did you mean 'bf16'\?", precision="bfloat16")
    refused(r"unknown wire_dtype='float16'; did you mean 'fp16'\?", wire_dtype="float16")
    refused(r"grad_dtype='bf16' must be used with 16-bit parameters, not precision='fp32'", grad_dtype="bf16")
    refused(r"unknown grad_dtype='fp16'; .*bf16", precision="bf16", grad_dtype="fp16")
    refused(r"grad_dtype='bf16' must be \"fp32\" with fp16 parameters", precision="fp16", grad_dtype="bf16")
    refused(r"keep_fp32='norm' must be a list; write keep_fp32=\['norm'\]", precision="bf16", keep_fp32="norm")
    refused(
        r"takes a model in fp32, whose values become the masters, but parameter 'first.weight' is of torch.float16; "
        r"pass the model before .half",
        make=lambda: network().half(),
        precision="fp16",
    )
    refused(
        r"precision='bf16-autocast' takes a model in fp32, whose parameters stay so, but parameter 'first.weight'",
        make=lambda: network().half(),
        precision="bf16-autocast",
    )
    refused(r"precision='bf16' needs the optimizer", optimizer=None, precision="bf16")
    refused(r"precision='bf16' does not work with strategy='local'", strategy="local", precision="bf16")
    refused(r"LBFGS evaluates the loss several times", optimizer=torch.optim.LBFGS, strategy="ddp", precision="bf16")


@pytest.mark.fake
def test_a_failed_distribute_leaves_no_trace():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((ConfigError, SherdError)):
        sherd.distribute(model, optimizer, [1], precision="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.fake
def test_a_cpu_that_emulates_16_bits_is_warned_of_once(monkeypatch):
    asked = []
    monkeypatch.setattr(apply, "native_half", lambda dtype: asked.append(dtype) is not None)
    apply._warn_of_emulation.cache_clear()
    try:
        with log_lines() as lines:
            for precision in ("bf16", "bf16-autocast", "bf16", "fp16"):
                model = network()
                sherd.distribute(model, torch.optim.AdamW(model.parameters()), precision=precision)
    finally:
        apply._warn_of_emulation.cache_clear()
    assert asked == [torch.bfloat16, torch.float16]
    assert len([line for line in lines if "precision= will be slow here" in line]) == 2


@pytest.mark.fake
def test_describe_says_what_is_in_which_dtype():
    model = network()
    model, _ = sherd.distribute(model, torch.optim.AdamW(model.parameters()), precision="bf16", wire_dtype="fp16")
    text = sherd.describe(model)
    assert (
        "1,182 elements in bfloat16 with float32 masters; gradients travel in float16 and are summed in float32" in text
    )
    assert "14 elements in float32; gradients travel in float16 and are summed in float32" in text
    assert "\n  masters " in text


@pytest.mark.fake
def test_describe_says_that_the_forward_is_autocast():
    for precision, lines in {"fp32": 0, "bf16-autocast": 1}.items():
        model = network()
        model, _ = sherd.distribute(model, torch.optim.AdamW(model.parameters()), precision=precision)
        found = [line for line in sherd.describe(model).splitlines() if line.startswith("precision")]
        assert len(found) == lines and all("bf16-autocast: the forward runs under torch.autocast" in x for x in found)


@pytest.mark.fake
def test_moving_averages_of_masters_are_those_of_fp32():
    model = network()
    model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3), precision="bf16")
    plain = network()
    with sherd.full_parameters(model, masters=True):
        plain.load_state_dict(model.state_dict())
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    reference = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for step in range(4):
        loss_of(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        with sherd.full_parameters(model, masters=True):
            average.update_parameters(model)
            plain.load_state_dict(model.state_dict())
        reference.update_parameters(plain)
    same(dict(average.module.named_parameters()), dict(reference.module.named_parameters()))
    assert {p.dtype for p in average.parameters()} == {torch.float32}
