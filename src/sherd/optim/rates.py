"""Learning rates of large batches: how they grow with the batch, and how training comes up to them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sherd.errors import ConfigError, nearest

_RULES = {"linear": 1.0, "sqrt": 0.5}
"""The power of the batch that the rate follows."""


def scaled_lr(lr: float, batch: int, reference_batch: int, rule: str = "linear") -> float:
    """The rate for batches of `batch` samples, where `lr` is good for batches of `reference_batch`.

    Both are global batches: the samples of all ranks and of all backwards of a step. `"linear"` multiplies the rate by
    as much as the batch has grown, which suits SGD and LARS; `"sqrt"` by its square root, which suits Adam and LAMB.
    """
    if rule not in _RULES:
        raise ConfigError(f"scaled_lr: rule={rule!r} is unknown; {nearest(rule, _RULES)}")
    for name, value in (("lr", lr), ("batch", batch), ("reference_batch", reference_batch)):
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"scaled_lr: {name}={value}; write a positive number")
    return float(lr * (batch / reference_batch) ** _RULES[rule])


class Warmup(LRScheduler):
    """The rate grows evenly from a part of its own to all of it, by the number of steps, and stays there."""

    def __init__(self, optimizer: Optimizer, steps: int, start: float, last_epoch: int = -1) -> None:
        self.steps = steps
        self.start = start
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the groups, from their own: no rounding adds up."""
        done = min(self.last_epoch / self.steps, 1.0)
        factor = self.start + (1.0 - self.start) * done if done < 1.0 else 1.0
        return [base * factor for base in self.base_lrs]


class WarmupThen(Warmup):
    """A warm-up, and a scheduler that begins after it, with the rates that it would have by itself.

    `SequentialLR` would ask that scheduler for its first rate at the end of the warm-up. Those that multiply the
    current rate would then multiply the warm-up's, and those that consist of others cannot answer. So the first rates
    are kept from when the scheduler was built, and it takes no step before them.
    """

    def __init__(self, optimizer: Optimizer, steps: int, start: float, after: LRScheduler) -> None:
        self.after = after
        self.first_lrs = _rates(optimizer)
        super().__init__(optimizer, steps, start)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the warm-up, and the first of what follows."""
        return super().get_lr() if self.last_epoch < self.steps else self.first_lrs

    def step(self) -> None:  # type: ignore[override]
        """Count a step."""
        if self.last_epoch < self.steps:
            super().step()
            return
        self.last_epoch += 1
        self.after.step()
        self._last_lr = _rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """As other schedulers', with that of what follows."""
        return {**super().state_dict(), "after": self.after.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from such a state."""
        others = dict(state_dict)
        self.after.load_state_dict(others.pop("after"))
        super().load_state_dict(others)


def _rates(optimizer: Optimizer) -> list[float | Tensor]:
    """The current rates of the groups; those that are tensors, as copies."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _steps_taken(scheduler: LRScheduler) -> int:
    """How many steps a scheduler has taken, or one of those that it consists of."""
    parts = getattr(scheduler, "_schedulers", ())
    return max([getattr(scheduler, "last_epoch", 0), *map(_steps_taken, parts)])


def warmup(
    optimizer: Optimizer, steps: int, after: LRScheduler | None = None, start: float | None = None
) -> LRScheduler:
    """A scheduler whose rate grows to the optimizer's own during the first `steps` steps; then `after` begins.

    It grows evenly from `start` times the rate: unless you say so, `1 / (steps + 1)`, as if it had begun at 0 one step
    earlier. To begin at the rate of the reference batch, as Goyal et al. (arXiv 1706.02677) do, write
    `start=reference_batch / batch`.

    `after` is a new scheduler for the same optimizer, built just before. It counts from the end of the warm-up and has
    the rates that it would have by itself. Call `step()` of what is returned, and not that of `after`. Like every
    scheduler it counts real steps: calls inside an accumulation window are skipped.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"warmup: steps={steps!r}; write a whole number of at least 1, or leave the warm-up out")
    if start is None:
        start = 1.0 / (steps + 1)
    if not 0.0 <= start <= 1.0:
        raise ConfigError(f"warmup: start={start}; write a part of the rate, from 0 to 1")
    if after is None:
        return Warmup(optimizer, steps, start)
    if isinstance(after, ReduceLROnPlateau):
        raise ConfigError(
            "warmup: after= is a ReduceLROnPlateau, whose step() needs a metric; leave it out of warmup(), and step it "
            "yourself after each epoch"
        )
    if not isinstance(after, LRScheduler):
        raise ConfigError(f"warmup: after={after!r} is no scheduler; pass one of torch.optim.lr_scheduler")
    if after.optimizer is not optimizer:
        raise ConfigError("warmup: after= was built for another optimizer; build both for the same one")
    if (taken := _steps_taken(after)) > 0:
        raise ConfigError(f"warmup: after= has taken {taken} steps already; pass a new one")
    return WarmupThen(optimizer, steps, start, after)
