"""States and models that are saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from tests.helpers.training import SHARDED, adamw, double, loss_of, network, sgd, train, weights
from tests.what_works.cases import case, refused, together

SAVE = "call it on every rank, and save it on one"


def _trained(run, model=None, steps=3, optimizer=sgd):
    model = double() if model is None else model
    model, optimizer = run.distribute(model, optimizer(model))
    train(model, optimizer, run.batches(steps))
    return model, optimizer


def _saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def _read(data, **options):
    return torch.load(io.BytesIO(data), **options)


def _tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 15), nn.Linear(15, 5)).double()
    model[1].weight = model[0].weight
    return model


@case(
    "Saving and loading",
    "`torch.save(model.state_dict())`",
    "a file of plain tensors, each with memory of its own size; it loads with `weights_only=True`",
)
def saved_state(run):
    model, _ = _trained(run)
    state = _read(_saved(model.state_dict()), weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    if not run.plain:
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    return dict(state)


@case("Saving and loading", "The state of a submodule", "the file is as small as the submodule")
def saved_part(run):
    model, _ = _trained(run, nn.Sequential(double(), nn.Linear(5, 5).double(), nn.Linear(5, 5).double()))
    data = _saved(model[1].state_dict())
    assert len(data) < 3000, f"{len(data)} bytes for 30 numbers"
    return dict(_read(data, weights_only=True))


@case("Saving and loading", "The state of tied weights", "they are tied in the file too, and stored once")
def saved_tied(run):
    model, _ = _trained(run, _tied())
    state = _read(_saved(model.state_dict()), weights_only=True)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    return dict(state)


@case(
    "Saving and loading",
    "A `state_dict()` kept while training goes on",
    "changes along with the model, as torch's own does: `copy.deepcopy` it to keep it as it was",
)
def state_is_kept(run):
    model, optimizer = _trained(run)
    kept = model.state_dict()
    copied = copy.deepcopy(dict(kept))
    train(model, optimizer, run.batches(1, start=3))
    return together(kept=dict(kept), now=weights(model), copied=copied)


@case("Saving and loading", "`model.state_dict()` on rank 0 only", "it is not collective: the others go on")
def state_on_one_rank(run):
    model, optimizer = _trained(run)
    if run.rank == 0:
        assert _read(_saved(model.state_dict())).keys() == double().state_dict().keys()
    train(model, optimizer, run.batches(2, start=3))
    return weights(model)


@case("Saving and loading", "The state of the optimizer", "torch's own format, whole; it goes on in plain torch")
def optimizer_state(run):
    model, optimizer = _trained(run, optimizer=adamw)
    saved, state = _read(_saved(model.state_dict())), _read(_saved(optimizer.state_dict()))
    plain = double()
    plain.load_state_dict(saved)
    its_optimizer = adamw(plain)
    its_optimizer.load_state_dict(state)
    train(plain, its_optimizer, type(run)().batches(2, start=3))  # alone: every rank has all rows
    return weights(plain)


@case("Saving and loading", "A run that is resumed", "states of model and optimizer load after `distribute`")
def resumed(run):
    model, optimizer = _trained(run, optimizer=adamw)
    states = _read(_saved((model.state_dict(), optimizer.state_dict())))
    second = network(7, torch.float64)
    second, its_optimizer = run.distribute(second, adamw(second))
    second.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    for each in ((model, optimizer), (second, its_optimizer)):
        train(*each, run.batches(2, start=3))
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(second).items())
    return weights(second)


@refused(
    "Saving and loading",
    "`optimizer.state_dict()` on one rank only",
    "under ZeRO each rank has a part of it: call it on every rank, and save it on one",
    match=rf"^Under zero\d optimizer\.state_dict\(\) is collective: {SAVE}\. Here ranks .*rank 0 .*rank 1",
    strategies=SHARDED,
)
def optimizer_state_on_one_rank(run):
    model, optimizer = _trained(run, optimizer=adamw)
    if run.rank == 0:
        optimizer.state_dict()
    train(model, optimizer, run.batches(2, start=3))


@refused(
    "Saving and loading",
    "`optimizer.state_dict()` on one rank only, at the end",
    "the same: that rank is told, as the others have left",
    match=rf"^Under zero\d optimizer\.state_dict\(\) is collective: {SAVE}\. rank 1 .* left",
    strategies=SHARDED,
    on=(0,),
)
def optimizer_state_at_the_end(run):
    _, optimizer = _trained(run, optimizer=adamw)
    if run.rank == 0:
        optimizer.state_dict()


@refused(
    "Saving and loading",
    "A copy or a pickle of the optimizer on one rank only",
    "under ZeRO each rank has a part of its state: make it on every rank",
    match=rf"^Under zero\d a copy or a pickle of the optimizer is collective: {SAVE}",
    strategies=SHARDED,
)
def copied_on_one_rank(run):
    model, optimizer = _trained(run, optimizer=adamw)
    if run.rank == 1:
        copy.deepcopy(optimizer)
    train(model, optimizer, run.batches(2, start=3))


# -------------------------------------------------------------------- loaded


def _other(run):
    """Values that are the same on every rank and not the model's."""
    return {name: value + 1 for name, value in double().state_dict().items()}


@case("Saving and loading", "`model.load_state_dict(state)`", "between steps; rank 0's values are taken")
def loaded(run):
    model, optimizer = _trained(run)
    state = {name: value + run.rank for name, value in _other(run).items()}
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    train(model, optimizer, run.batches(2, start=3))
    return weights(model)


@case("Saving and loading", "`load_state_dict` of a part, or `strict=False`", "the rest stays as it is")
def loaded_part(run):
    model, optimizer = _trained(run)
    state = _other(run)
    model[0].load_state_dict({name[2:]: value for name, value in state.items() if name.startswith("0.")})
    missing = model.load_state_dict({"2.bias": state["2.bias"], "more": state["2.bias"]}, strict=False)
    train(model, optimizer, run.batches(2, start=3))
    return {"missing": missing.missing_keys, "unexpected": missing.unexpected_keys, **weights(model)}


@case("Saving and loading", "`load_state_dict` of a module that contains the model", "as in frameworks that wrap it")
def loaded_inside(run):
    model, optimizer = _trained(run)
    wrapper = nn.ModuleDict({"inner": model, "other": nn.Linear(2, 2)})
    state = {f"inner.{name}": value for name, value in _other(run).items()}
    wrapper.load_state_dict({**wrapper.state_dict(), **state})
    train(model, optimizer, run.batches(2, start=3))
    return weights(model)


@case("Saving and loading", "Best weights kept and put back", "`state_dict()` early, `load_state_dict()` at the end")
def put_back(run):
    model, optimizer = _trained(run, steps=2)
    best = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, run.batches(2, start=2))
    model.load_state_dict(best)
    return weights(model)


@refused(
    "Saving and loading",
    "`load_state_dict(state, assign=True)`",
    "it would put other tensors in the place of those that are trained: write `load_state_dict(state)`",
    match=r"load_state_dict\(assign=True\) would replace .* write load_state_dict\(state\)",
)
def assigned(run):
    model, _ = _trained(run)
    model.load_state_dict(_other(run), assign=True)


# -------------------------------------------------------------------- the model itself


_WITHOUT_SHERD = """
import sys
sys.modules["sherd"] = None  # as if it were not installed
import pickle, torch
for path in sys.argv[1:]:
    if path.endswith(".pickle"):
        with open(path, "rb") as file:
            model = pickle.load(file)
    else:
        model = torch.load(path, weights_only=False)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters()), [type(p) for p in model.parameters()]
    model(torch.ones(2, 15, dtype=torch.float64)).sum().backward()
    model.load_state_dict(model.state_dict())
"""


@case(
    "Saving and loading",
    "`torch.save(model)`, `pickle.dumps(model)`",
    "a plain model, that loads where sherd is not installed",
)
def saved_model(run):
    model, optimizer = _trained(run)
    pickled, saved = pickle.dumps(model), _saved(model)
    for data in (pickled, saved):
        assert b"sherd." not in data, "the file needs sherd to be loaded"
    if run.rank == 0 and run.strategy in ("ddp", "zero3"):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("model.pickle", "model.pt")]
            for path, data in zip(paths, (pickled, saved), strict=True):
                path.write_bytes(data)
            subprocess.run([sys.executable, "-c", _WITHOUT_SHERD, *map(str, paths)], check=True, timeout=60)
    copies = {"pickled": weights(pickle.loads(pickled)), "saved": weights(_read(saved, weights_only=False))}
    train(model, optimizer, run.batches(1, start=3))
    return together(model=weights(model), **copies)


@case(
    "Saving and loading",
    "`torch.save(model)` read with `weights_only=True`",
    "inside `torch.serialization.safe_globals` of the model's own classes: there are no others in the file",
)
def saved_model_is_safe(run):
    model, optimizer = _trained(run, optimizer=adamw)
    plain = double()
    for thing, its_plain in ((model, plain), (optimizer, _stepped(plain, adamw(plain)))):
        assert _unsafe(_saved(thing)) == _unsafe(_saved(its_plain))
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        copied = _read(_saved(model), weights_only=True)
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    train(copied, sgd(copied), type(run)().batches(2, start=3))  # alone: every rank has all rows
    again = _read(_saved(model), weights_only=False)
    again, optimizer = run.distribute(again, sgd(again))
    train(again, optimizer, run.batches(2, start=3))
    return together(copied=weights(copied), again=weights(again))


def _unsafe(data):
    """What in a file must be allowed for it to be read."""
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))


def _stepped(model, optimizer):
    loss_of(model, (torch.ones(2, 15).double(), torch.ones(2, 5).double())).backward()
    optimizer.step()
    return optimizer


@case("Saving and loading", "`pickle.dumps(optimizer)`", "a plain optimizer of its own class, with its state")
def saved_optimizer(run):
    model, optimizer = _trained(run)
    data = pickle.dumps((model, optimizer))
    assert b"sherd." not in data, "the file needs sherd to be loaded"
    copied_model, copied = pickle.loads(data)
    assert type(copied) is torch.optim.SGD
    loss_of(copied_model, next(type(run)().batches(1, start=3))).backward()
    copied.step()
    return weights(copied_model)
