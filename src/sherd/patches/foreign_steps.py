"""A hook of torch's that is called before the step of every optimizer of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

RELIES_ON = {"torch.optim.optimizer:register_optimizer_step_pre_hook": "hook"}
_handles: list[RemovableHandle] = []


def install(look: Callable[[Optimizer], None]) -> None:
    """Have `look` called before each."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        look(optimizer)

    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(hook))


def uninstall() -> None:
    """Have it called no more."""
    while _handles:
        _handles.pop().remove()
