"""Parameters that are frozen, unfrozen later, and frozen again."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.training import double, loss_of, sgd, train, weights
from tests.what_works.cases import case, together


def _half_frozen():
    model = double()
    model[0].requires_grad_(False)
    return model


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


@case("Freezing", "Frozen parameters", "stay as they are, whether the optimizer holds them or not")
def frozen(run):
    found = {}
    for held in (True, False):
        model = _half_frozen()
        optimizer = _optimizer(p for p in model.parameters() if held or p.requires_grad)
        model, optimizer = run.distribute(model, optimizer)
        train(model, optimizer, run.batches())
        found[f"held {held}"] = weights(model)
    return together(**found)


@case("Freezing", "Unfrozen after `distribute`, before the first step", "trains from the first step on")
def unfrozen_at_once(run):
    model = _half_frozen()
    model, optimizer = run.distribute(model, sgd(model))
    model.requires_grad_(True)
    train(model, optimizer, run.batches())
    return weights(model)


@case("Freezing", "Unfrozen after some steps, in the optimizer from the start", "trains from then on")
def unfrozen_later(run):
    model = _half_frozen()
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(2))
    model.requires_grad_(True)
    train(model, optimizer, run.batches(3, start=2))
    return weights(model)


@case("Freezing", "Unfrozen and given to the optimizer by `add_param_group`", "with a learning rate of its own")
def unfrozen_by_group(run):
    model = _half_frozen()
    model, optimizer = run.distribute(model, _optimizer(model[2].parameters()))
    train(model, optimizer, run.batches(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    train(model, optimizer, run.batches(3, start=2))
    return weights(model)


@case("Freezing", "Unfrozen, and frozen again", "stays as it is from then on: no momentum, no weight decay")
def frozen_again(run):
    model = _half_frozen()
    model, optimizer = run.distribute(model, sgd(model))
    for step in range(3):
        model[0].requires_grad_(step == 1)
        train(model, optimizer, run.batches(2, start=2 * step))
    return weights(model)


@case("Freezing", "Trainable at `distribute`, frozen later", "is left alone, as one without a gradient")
def frozen_later(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(2))
    model[0].weight.requires_grad_(False)
    train(model, optimizer, run.batches(2, start=2))
    model[0].weight.requires_grad_(True)
    train(model, optimizer, run.batches(2, start=4))
    return weights(model)


def _three_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(15, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)]
    return nn.Sequential(*layers).double()


@case("Freezing", "Gradual unfreezing, one layer after the other", "in the optimizer from the start or added in groups")
def gradual(run):
    found = {}
    for added in (False, True):
        model = _three_layers()
        model[:4].requires_grad_(False)
        model, optimizer = run.distribute(model, _optimizer((model[4] if added else model).parameters()))
        train(model, optimizer, run.batches(2))
        for stage, layer in enumerate((model[2], model[0]), 1):
            layer.requires_grad_(True)
            if added:
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
            train(model, optimizer, run.batches(2, start=2 * stage))
        found[f"added {added}"] = weights(model)
    return together(**found)


@case("Freezing", "Unfrozen between two `backward()` of one step", "counts from the second one")
def unfrozen_between_backwards(run):
    model = _half_frozen()
    model, optimizer = run.distribute(model, sgd(model))
    for step in range(3):
        for micro, data in enumerate(run.batches(2, start=2 * step)):
            model[0].requires_grad_(step > 1 or (step == 1 and micro == 1))
            loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Freezing", "Unfrozen inside an accumulation window", "`accumulate=2`: counts from the second backward of it")
def unfrozen_inside_a_window(run):
    found = {}
    for where in ("rank", "owner"):
        model = _half_frozen()
        model, optimizer = run.distribute(model, sgd(model), accumulate=2, accumulate_at=where)
        for micro, data in enumerate(run.batches(6)):
            model[0].requires_grad_(micro > 2)
            loss = loss_of(model, data)
            (loss / 2 if run.plain else loss).backward()
            if micro % 2 or not run.plain:
                optimizer.step()
                optimizer.zero_grad()
        found[where] = weights(model)
    return together(**found)


@case("Freezing", "`requires_grad_(False)` during a step, back before the next", "the graph decides, as in torch")
def toggled(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for step, data in enumerate(run.batches(4)):
        model[2].requires_grad_(step % 2 == 0)
        loss = loss_of(model, data)
        model[2].requires_grad_(True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Freezing", "LoRA-like adapters", "a frozen base with small trainable parts, distributed together")
def adapters(run):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = double().requires_grad_(False)
            self.down = nn.Linear(15, 2, bias=False, dtype=torch.float64)
            self.up = nn.Linear(2, 5, bias=False, dtype=torch.float64)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = Adapted()
    model, optimizer = run.distribute(model, _optimizer(p for p in model.parameters() if p.requires_grad))
    train(model, optimizer, run.batches())
    return weights(model)
