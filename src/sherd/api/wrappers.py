"""Torch's own wrappers around a model that is distributed already: refused when they are built.

They would exchange gradients a second time, or put other parameters in the place of those that are trained, and it
would show much later, as a hang or as an error about something else. They are told when they are about to begin, since
they are often not the user's own: Accelerate and the trainers that stand on it wrap every model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sherd.api.membership import find_engine
from sherd.errors import ConfigError

_FSDP = "torch.distributed.fsdp"
_FULLY_SHARD: tuple[tuple[str, str, str], ...] = (
    (f"{_FSDP}._fully_shard._fully_shard", "_validate_module", "fully_shard"),
    ("torch.distributed._composable.replicate_with_fsdp", "_validate_module", "replicate"),
)
"""Module, function and name of what looks at a module before anything is done to it. Scripts hold `fully_shard` itself
by its name, so that it is too late to replace that."""


def refuse_wrappers() -> None:
    """Make every wrapper of torch's that exists refuse modules of a distributed model.

    FSDP takes seconds to import, so that is left to who wants it: one that is imported after the last `distribute` is
    not told here. It is found in the next backward, since it puts other parameters into the model.
    """
    _guard(DataParallel, "__init__", 1, "DataParallel")
    _guard(DistributedDataParallel, "__init__", 1, "DistributedDataParallel")
    first = getattr(sys.modules.get(_FSDP), "FullyShardedDataParallel", None)
    if first is not None:
        _guard(first, "__init__", 1, "FullyShardedDataParallel")
    for module, function, name in _FULLY_SHARD:
        _guard(sys.modules.get(module), function, 0, name)


def _guard(place: Any, name: str, position: int, wrapper: str) -> None:
    """Have `place.name`, whose argument `module` is at `position`, look at it first."""
    original: Callable[..., Any] | None = getattr(place, name, None)
    if original is None or hasattr(original, "__sherd__"):
        return

    @functools.wraps(original)
    def guarded(*args: Any, **options: Any) -> Any:
        _refuse(args[position] if len(args) > position else options.get("module"), wrapper)
        return original(*args, **options)

    guarded.__sherd__ = True  # type: ignore[attr-defined]
    setattr(place, name, guarded)


def _refuse(modules: Any, wrapper: str) -> None:
    for module in (modules,) if isinstance(modules, nn.Module) else modules or ():
        engine = next(filter(None, map(find_engine, (*module.modules(), *module.parameters()))), None)
        if engine is not None:
            raise ConfigError(
                f"rank {engine.comm.rank}: torch's {wrapper} was put around a model that sherd.distribute has made "
                f"ready already, so gradients would be exchanged twice; drop the wrapper and use `model` as it is. "
                f"Accelerate and the Hugging Face Trainer put it there by themselves: leave the model and the "
                f"optimizer out of accelerator.prepare(), and write the training loop in place of the Trainer"
            )
