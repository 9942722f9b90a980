"""What was passed to `distribute`, sorted by kind; for anything else, an error that says what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from sherd.api.members import is_distributed
from sherd.api.training import find_training
from sherd.errors import ConfigError
from sherd.strategies import Strategy

_FSDP = ("FSDPModule", "FullyShardedDataParallel")
_MODEL = "pass the model itself: sherd.distribute(model, optimizer)"
_OUTSIDE = "is not passed: use it in the loop as before"
_DATA = "other sources of data are not passed: give each rank its own, or wrap them in a DataLoader"
_PARAMETERS = (nn.Module.parameters.__code__, nn.Module.named_parameters.__code__)


def sort_out(things: Sequence[Any]) -> tuple[list[nn.Module], list[Optimizer], list[DataLoader[Any]]]:
    """The models, the optimizers and the loaders. Refuses anything else, and whatever is already distributed."""
    models = [thing for thing in things if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
    loaders = [thing for thing in things if isinstance(thing, DataLoader)]
    for thing in things:
        if not isinstance(thing, nn.Module | Optimizer | DataLoader):
            found, fix = _other_kind(thing)
            raise ConfigError(f"distribute takes models, optimizers and DataLoaders, found {found}; {fix}")
    if len(set(map(id, things))) < len(things):
        raise ConfigError("distribute was given the same object twice; pass each once")
    if not models:
        raise ConfigError("distribute takes a torch.nn.Module first; found none: sherd.distribute(model, optimizer)")
    for model in models:
        _check_not_a_loss(model)
        _check_model(model)
    if any(find_training(optimizer) is not None for optimizer in optimizers):
        raise ConfigError("this optimizer is already distributed; pass all the models that it trains in one call")
    return models, optimizers, loaders


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        kind = type(model).__name__
        raise ConfigError(
            f"this model is wrapped in torch's {kind}; pass the model inside: sherd.distribute(model.module)"
        )
    for base in (base for module in model.modules() for base in type(module).__mro__):
        if base.__name__ in _FSDP and base.__module__.startswith("torch."):  # by name: FSDP takes seconds to import
            raise ConfigError(
                f"this model is already sharded by torch's FSDP ({base.__name__}); pass the model without it: "
                f'sherd.distribute(model, optimizer, strategy="zero3") shards it'
            )
    if any(is_distributed(module) for module in model.modules()):
        raise ConfigError("this model is already distributed; call sherd.distribute once per model")
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            raise ConfigError(
                f"parameter {name!r} also belongs to another distributed model; distribute models that share "
                f"parameters in one call: sherd.distribute(one, other, optimizer)"
            )


# ---------------------------------------------------------------- passed by mistake


def _other_kind(thing: Any) -> tuple[str, str]:
    """What `thing`, which is no model, optimizer or loader, is; and what to write instead."""
    name = type(thing).__name__
    if thing is None:
        return "None", "leave it out: only the model is required"
    if isinstance(thing, type):
        return f"the class {thing.__name__}", f"pass an object of it: {thing.__name__}(...)"
    for kind, words, fix in _KINDS:
        if isinstance(thing, kind):
            return f"{words} ({name})", fix
    if isinstance(thing, str):
        return f"the string {thing!r}", f"pass options by keyword: strategy={thing!r}"
    if isinstance(thing, Tensor):
        what = "a parameter" if isinstance(thing, nn.Parameter) else "a tensor"
        return what, f"{_MODEL}; to load tensors, write DataLoader(TensorDataset(x, y), batch_size=...)"
    if inspect.isgenerator(thing):
        if thing.gi_code in _PARAMETERS:
            return "the parameters of a model", _MODEL
        return "a generator", _DATA
    if isinstance(thing, Sequence | Mapping | set | frozenset):
        return _collection(thing)
    if callable(thing) and not hasattr(thing, "__iter__"):
        called = getattr(thing, "__name__", name)
        return f"a function ({called})", f"a loss, a metric or a collate function {_OUTSIDE}"
    return f"an object of type {name}", _DATA


def _check_not_a_loss(model: nn.Module) -> None:
    """Refuse a loss without parameters: it is a module, but there is nothing to train in it."""
    if isinstance(model, _Loss) and not any(True for _ in model.parameters()):
        raise ConfigError(
            f"distribute takes models, optimizers and DataLoaders, found a loss ({type(model).__name__}); it has no "
            f"parameters and {_OUTSIDE}"
        )


_KINDS: list[tuple[type[Any], str, str]] = [
    (
        LRScheduler,
        "a scheduler",
        "it is not passed: it keeps its optimizer, which is the same object after distribute",
    ),
    (torch.amp.GradScaler, "a gradient scaler", f"it {_OUTSIDE}"),
    (Dataset, "a dataset", "pass a loader for it: DataLoader(dataset, batch_size=...)"),
    (Sampler, "a sampler", "pass the loader that uses it: DataLoader(dataset, batch_size=..., sampler=sampler)"),
    (Strategy, "a strategy", "pass it by keyword: strategy=..."),
]


def _collection(things: Any) -> tuple[str, str]:
    """The same for a list, a dict or the like."""
    kind = type(things).__name__
    inside = list(things.values()) if isinstance(things, Mapping) else list(things)
    inside = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in inside]

    def all_of(test: Callable[[Any], bool]) -> bool:
        return bool(inside) and all(map(test, inside))

    if all_of(lambda item: isinstance(item, nn.Parameter) or _is_group(item)):
        return f"parameters ({kind})", _MODEL
    if isinstance(things, Mapping) and all_of(lambda item: isinstance(item, Tensor)):
        return f"tensors ({kind})", f"load a state with model.load_state_dict(state); {_MODEL}"
    if all_of(lambda item: isinstance(item, nn.Module | Optimizer | DataLoader)):
        return f"several objects in one ({kind})", "pass them one by one: sherd.distribute(*things)"
    return f"an object of type {kind}", _DATA


def _is_group(item: Any) -> bool:
    """Whether it is a parameter group, as an optimizer takes it."""
    return isinstance(item, dict) and "params" in item
