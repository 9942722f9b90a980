"""What was passed to `distribute`, told apart by what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sherd.api.membership import is_distributed
from sherd.api.mistaken import check_not_a_loss, other_kind
from sherd.api.training import find_training
from sherd.errors import ConfigError

_FSDP = ("FSDPModule", "FullyShardedDataParallel")


def sort_out(things: Sequence[Any]) -> tuple[list[nn.Module], Optimizer | None, list[DataLoader[Any]]]:
    """The models, the optimizer and the loaders; refuses what is none of these, or distributed already."""
    models = [thing for thing in things if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
    loaders = [thing for thing in things if isinstance(thing, DataLoader)]
    for thing in things:
        if not isinstance(thing, nn.Module | Optimizer | DataLoader):
            found, fix = other_kind(thing)
            raise ConfigError(f"distribute takes models, an optimizer and DataLoaders, found {found}; {fix}")
    if len(set(map(id, things))) < len(things):
        raise ConfigError("distribute was given the same object twice; pass each once")
    if not models:
        raise ConfigError("distribute takes a torch.nn.Module first; found none: sherd.distribute(model, optimizer)")
    if len(optimizers) > 1:
        raise ConfigError(
            f"distribute takes one optimizer, found {len(optimizers)}; models with optimizers of their own are "
            f"distributed one after the other, and one model has one optimizer, with a group for each kind of parameter"
        )
    for model in models:
        check_not_a_loss(model)
        _check_model(model)
    if optimizers and find_training(optimizers[0]) is not None:
        raise ConfigError("this optimizer is distributed already; pass all models that it trains in one call")
    return models, optimizers[0] if optimizers else None, loaders


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        kind = type(model).__name__
        raise ConfigError(
            f"this model is wrapped in torch's {kind}; pass what is inside: sherd.distribute(model.module)"
        )
    for base in (base for module in model.modules() for base in type(module).__mro__):
        if base.__name__ in _FSDP and base.__module__.startswith("torch."):  # by name: FSDP takes seconds to import
            raise ConfigError(
                f"this model is sharded by torch's FSDP already ({base.__name__}); pass it before that: "
                f'sherd.distribute(model, optimizer, strategy="zero3") shards it'
            )
    if any(is_distributed(module) for module in model.modules()):
        raise ConfigError("this model is distributed already; call sherd.distribute once per model")
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            raise ConfigError(
                f"parameter {name!r} belongs to another distributed model too; distribute models that share parameters "
                f"together: sherd.distribute(one, other, optimizer)"
            )
