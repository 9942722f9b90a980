"""What is done with a model after `distribute`, beside training it."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, Dataset

import sherd
from sherd import ConfigError
from tests.helpers.training import double, loss_of, sgd, train, weights
from tests.what_works.cases import case, together


def _distributed(run, **options):
    model = double()
    return run.distribute(model, sgd(model), **options)


@case("After distribute", "`type`, `isinstance`, `repr`, names and keys", "as in the bare model, which it still is")
def looks_the_same(run):
    model = double()
    before = model
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches())
    assert model is before
    assert type(model) is nn.Sequential
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in model.parameters())
    return {
        "repr": repr(model),
        "parameters": [name for name, _ in model.named_parameters()],
        "keys": list(model.state_dict()),
        "attributes": [name for name in dir(model) if not name.startswith("_")],
        "optimizer": (type(optimizer).__name__, isinstance(optimizer, torch.optim.SGD), repr(optimizer)),
        **weights(model),
    }


@case("After distribute", "`copy.deepcopy(model)`", "is a plain model of its own: training it leaves the first alone")
def deep_copied(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(2))
    copied = copy.deepcopy(model)
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    assert run.plain or not sherd_knows(copied)
    before = weights(model)
    whole = type(run)().batches(2)  # alone: every rank has all rows
    train(copied, sgd(copied), whole)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    train(model, optimizer, run.batches(2, start=2))
    return together(model=weights(model), copied=weights(copied))


def sherd_knows(model):
    """Whether sherd takes a module for a distributed one."""
    try:
        sherd.describe(model)
    except ConfigError:
        return False
    return True


@case("After distribute", "A deep copy distributed in its turn", "is trained by itself")
def copy_distributed(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(1))
    second = copy.deepcopy(model)
    second, its_optimizer = run.distribute(second, sgd(second))
    train(second, its_optimizer, run.batches(2))
    return together(model=weights(model), second=weights(second))


@case("After distribute", "Evaluation between steps", "under `no_grad` or `inference_mode`, with `eval()`")
def evaluation(run):
    model, optimizer = _distributed(run)
    seen = []
    for data in run.batches():
        model.train()
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                seen.append(run.mean(loss_of(model, data)))
    return {"seen": torch.stack(seen), **weights(model)}


@case("After distribute", "Evaluation on one rank only", "forward is not collective: the others need not wait")
def evaluation_on_one_rank(run):
    model, optimizer = _distributed(run)
    for data in run.batches():
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 0:
            with torch.no_grad():
                assert torch.isfinite(loss_of(model, data))
    return weights(model)


@case("After distribute", "Weights read as tensors, by `.numpy()` or `parameters_to_vector`", "whole, on every rank")
def read(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches())
    return {
        "numpy": torch.from_numpy(model[0].weight.detach().numpy().copy()),
        "vector": nn.utils.parameters_to_vector(model.parameters()).detach().clone(),
        "item": model[2].bias[0].item() > 0,
        "norm": sum(parameter.square().sum() for parameter in model.parameters()).detach(),
    }


@case(
    "After distribute",
    "An L2 penalty written out in the loss",
    "every rank adds the same; the mean has it once",
)
def penalty_on_weights(run):
    model, optimizer = _distributed(run)
    for data in run.batches():
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (loss_of(model, data) + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("After distribute", "Weights edited inside `sherd.full_parameters`", "by every rank alike")
def edited(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(2))
    if run.plain:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    else:
        with sherd.full_parameters(model), torch.no_grad():
            model[0].weight.mul_(0.5)
    train(model, optimizer, run.batches(2, start=2))
    return weights(model)


@case("After distribute", "Gradients of each row, by `torch.func.vmap` and `grad`", "of detached parameters")
def row_by_row(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(1))
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values, x, y):
        return (torch.func.functional_call(model, values, (x,)) - y).square().mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, *next(run.batches()))
    return {name: run.mean(gradient.mean(0)) for name, gradient in each.items()}


@case("After distribute", "`torch.jit.trace` and anomaly detection", "see a plain model")
def traced(run):
    model, optimizer = _distributed(run)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        train(model, optimizer, run.batches())
    x, _ = next(type(run)().batches())
    return {"out": torch.jit.trace(model, x)(x).detach(), **weights(model)}


# -------------------------------------------------------------------- averages


@case("After distribute", "EMA by hand, over `parameters()`", "a plain list of tensors on each rank")
def ema_of_parameters(run):
    model, optimizer = _distributed(run)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    for data in run.batches(4):
        train(model, optimizer, [data])
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.2)
    return {f"average {index}": average for index, average in enumerate(averages)}


@case("After distribute", "EMA by hand, over `state_dict()`", "a plain dict of tensors on each rank")
def ema_of_state(run):
    model, optimizer = _distributed(run)
    averages = {name: value.clone() for name, value in model.state_dict().items()}
    for data in run.batches(4):
        train(model, optimizer, [data])
        for name, value in model.state_dict().items():
            averages[name].mul_(0.8).add_(value, alpha=0.2)
    return averages


@case("After distribute", "EMA by a second model", "`copy.deepcopy(model)`, updated under `no_grad`")
def ema_of_a_copy(run):
    model, optimizer = _distributed(run)
    average = copy.deepcopy(model).requires_grad_(False)
    for data in run.batches(4):
        train(model, optimizer, [data])
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.2)
    return weights(average)


@case("After distribute", "`swa_utils.AveragedModel`", "made before `distribute` or after it; EMA too")
def averaged_model(run):
    found = {}
    for when in ("before", "after"):
        model = double()
        average = AveragedModel(model)
        model, optimizer = run.distribute(model, sgd(model))
        if when == "after":
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for data in run.batches(4):
            train(model, optimizer, [data])
            average.update_parameters(model)
        found[when] = weights(average)
    return together(**found)


@case("After distribute", "`swa_utils.update_bn`", "every rank runs all rows through the averaged model")
def averaged_statistics(run):
    model = nn.Sequential(double(), nn.BatchNorm1d(5).double().eval())
    model, optimizer = run.distribute(model, sgd(model))
    average = AveragedModel(model)
    for data in run.batches(4):
        train(model, optimizer, [data])
        average.update_parameters(model)
    update_bn([x for x, _ in type(run)().batches()], average)
    return dict(average.state_dict())


# -------------------------------------------------------------------- data loaders with workers


class Labelled(Dataset):
    """Rows whose targets are made by a model, inside the worker."""

    def __init__(self, rows, model):
        self.rows = rows
        self.model = model

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.rows[index], self.model(self.rows[index]).clone()


def _with_workers(run, method):
    model, optimizer = _distributed(run)
    for x, _ in run.batches(1):
        data = Labelled(x, model)
        loader = DataLoader(data, batch_size=3, num_workers=1, multiprocessing_context=method)
        for rows, labels in loader:  # one batch on a rank, two in the plain run
            ((model(rows) - labels - 1).square().mean() * len(rows) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("After distribute", "`DataLoader` workers, forked", "a dataset may hold the model; workers end without harm")
def forked_workers(run):
    return _with_workers(run, "fork")


@case(
    "After distribute",
    "`DataLoader` workers, spawned",
    "they get a plain copy of the model",
    strategies=("ddp", "zero3"),
    often=("zero3",),  # each worker imports torch, which takes seconds
)
def spawned_workers(run):
    return _with_workers(run, "spawn")
