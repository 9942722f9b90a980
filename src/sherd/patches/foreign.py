"""Torch's own wrappers of a model and the steps of all optimizers, which say what they are about to touch.

FSDP takes seconds to import, so that is left to who wants it: one that is imported after the last `install` is not
wrapped.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.optim.optimizer:register_optimizer_step_pre_hook": "hook",
    "torch.nn.parallel:DataParallel.__init__": "self module device_ids output_device dim",
    "torch.nn.parallel:DistributedDataParallel.__init__": "self module ...",
    "torch.distributed.fsdp:FullyShardedDataParallel.__init__": "self module ...",
    "torch.distributed.fsdp._fully_shard._fully_shard:_validate_module": "module func_name",
    "torch.distributed._composable.replicate_with_fsdp:_validate_module": "module",
}
_FSDP = "torch.distributed.fsdp"
_FULLY_SHARD: tuple[tuple[str, str, str], ...] = (
    (f"{_FSDP}._fully_shard._fully_shard", "_validate_module", "fully_shard"),
    ("torch.distributed._composable.replicate_with_fsdp", "_validate_module", "replicate"),
)
"""Module, function and name of what looks at a module before anything is done to it. Scripts hold `fully_shard` itself
by its name, so that it is too late to replace that."""

Look = Callable[[Any, str], None]
"""look(module, wrapper): a wrapper of that name is about to be put around `module`."""
_replacements = Replacements()
_hooks: list[RemovableHandle] = []


def install(look: Look, look_at_step: Callable[[Optimizer], None]) -> None:
    """Have `look` called by every wrapper that exists, and `look_at_step` before the step of any optimizer."""
    for place, name, position, wrapper in _wrappers():
        if hasattr(place, name):
            _replacements.replace(place, name, functools.partial(_guarded, look, position, wrapper))
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: look_at_step(optimizer)))


def uninstall() -> None:
    """Give torch its own back."""
    _replacements.restore()
    while _hooks:
        _hooks.pop().remove()


def _wrappers() -> Iterator[tuple[Any, str, int, str]]:
    """Where each is, and at which position its argument `module`."""
    fsdp = getattr(sys.modules.get(_FSDP), "FullyShardedDataParallel", None)
    for kind in (DataParallel, DistributedDataParallel, fsdp):
        if kind is not None:
            yield kind, "__init__", 1, kind.__name__
    for module, function, name in _FULLY_SHARD:
        yield sys.modules.get(module), function, 0, name


def _guarded(look: Look, position: int, wrapper: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **options: Any) -> Any:
        look(args[position] if len(args) > position else options.get("module"), wrapper)
        return original(*args, **options)

    return guarded
