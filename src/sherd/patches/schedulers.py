"""`step` of learning-rate schedulers: they count steps, not calls of `step()`.

Inside an accumulation window `optimizer.step()` does nothing, and so must `scheduler.step()`, or the schedule would run
K times too fast. The same holds for steps that are skipped until a loss scale fits. A scheduler is not passed to
`distribute`, so the check is in torch's classes: those that exist, and those that are defined later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from sherd.patches.replacing import Replacements, with_subclasses

RELIES_ON = {
    "torch.optim.lr_scheduler:LRScheduler.step": "self epoch",
    "torch.optim.lr_scheduler:LRScheduler._initial_step": "self",  # sets `_is_initial`
}
_replacements = Replacements()
_waits: Callable[[LRScheduler], bool]


def install(waits: Callable[[LRScheduler], bool]) -> None:
    """Make every scheduler ask whether it `waits` before each step; the first, when it is built, it takes anyway."""
    global _waits
    _waits = waits
    for kind in with_subclasses(LRScheduler):
        _guard(kind)
    _replacements.replace(LRScheduler, "__init_subclass__", _guarding)


uninstall = _replacements.restore


def _guard(kind: Any) -> None:
    if "step" in vars(kind):
        _replacements.replace(kind, "step", _guarded)


def _guarding(original: Callable[..., None]) -> Any:
    def __init_subclass__(cls: type[LRScheduler], **options: Any) -> None:  # noqa: N807
        super(LRScheduler, cls).__init_subclass__(**options)
        _guard(cls)

    return classmethod(__init_subclass__)  # type: ignore[arg-type]


def _guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded(self: LRScheduler, *args: Any, **options: Any) -> Any:
        waits = _waits(self)
        if waits and not getattr(self, "_is_initial", False):
            return None
        return step(self, *args, **options)

    return guarded
