"""Learning-rate schedulers that count steps, not calls of `step()`.

Inside an accumulation window `optimizer.step()` does nothing, and so must `scheduler.step()`, or the schedule would run
K times too fast. Nobody hands a scheduler to `distribute`, so torch's classes are taught to ask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from sherd.api.training import find_training


def guard_schedulers() -> None:
    """Make every scheduler class that exists skip calls inside a window of its optimizer."""
    for kind in (LRScheduler, *_subclasses(LRScheduler)):
        step = vars(kind).get("step")
        if step is not None and not hasattr(step, "__sherd__"):
            kind.step = _guarded(step)


def _guarded(step: Any) -> Any:
    @functools.wraps(step)
    def guarded(self: LRScheduler, *args: Any, **options: Any) -> Any:
        # A scheduler takes its first step when it is built, which is none of ours.
        training = None if getattr(self, "_is_initial", False) else find_training(self.optimizer)
        if training is not None and training.engine.window.open:
            return None
        return step(self, *args, **options)

    guarded.__sherd__ = True  # type: ignore[attr-defined]
    return guarded


def _subclasses(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
