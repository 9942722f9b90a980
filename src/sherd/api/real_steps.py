"""Which calls of `step()` are real: what torch's schedulers and GradScalers have to know of a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sherd.api.training import find_training

_seen: MutableMapping[LRScheduler, tuple[int, int]] = WeakKeyDictionary()  # steps and overflows at its last step


def is_inside_a_window(optimizer: Optimizer) -> bool:
    """Whether the next `step()` of an optimizer is not the last one of an accumulation window."""
    training = find_training(optimizer)
    return training is not None and not training.gradient(optimizer).window.last


@contextmanager
def counted(optimizer: Optimizer) -> Iterator[None]:
    """A program takes a step inside, or leaves it out."""
    training = find_training(optimizer)
    calls = None if training is None else training.gradient(optimizer).calls
    yield
    if training is not None and training.gradient(optimizer).calls == calls:
        training.engine.leave_out(training.gradient(optimizer))


def waits(scheduler: LRScheduler) -> bool:
    """Whether a scheduler is called inside a window, or after nothing but overflows since its last step.

    One that is called once in an epoch does not wait because the last step of the epoch was skipped.
    """
    training = find_training(scheduler.optimizer)
    if training is None:
        return False
    gradient = training.gradient(scheduler.optimizer)
    now, before = (gradient.steps, gradient.overflowed), _seen.get(scheduler, (0, 0))
    if gradient.window.open or (now[0] == before[0] and now[1] > before[1]):
        return True
    _seen[scheduler] = now
    return False
