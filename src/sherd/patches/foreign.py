"""Torch's own model wrappers and the steps of all optimizers, which report what they are about to change.

FSDP takes seconds to import, so only the user's program imports it: if it does so after the last `install`, FSDP is not
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
"""Module, function and name of the check that each wrapper makes first. Scripts have already imported `fully_shard` by
name, so replacing that would be too late."""

Look = Callable[[Any, str], None]
"""look(module, wrapper): a wrapper of that name is about to be put around `module`."""
_replacements = Replacements()
_hooks: list[RemovableHandle] = []


def install(look: Look, look_at_step: Callable[[Optimizer], None]) -> None:
    """Have every existing wrapper call `look`, and every optimizer call `look_at_step` before its step."""
    for place, name, position, wrapper in _wrappers():
        if hasattr(place, name):
            _replacements.replace(place, name, functools.partial(_guarded, look, position, wrapper))
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: look_at_step(optimizer)))


def uninstall() -> None:
    """Restore torch's own."""
    _replacements.restore()
    while _hooks:
        _hooks.pop().remove()


def _wrappers() -> Iterator[tuple[Any, str, int, str]]:
    """The owner and name of each wrapper, the position of its argument `module`, and what users call it."""
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
