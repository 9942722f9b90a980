"""`sherd.log`: a user's own figures."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor

from sherd import observe
from sherd.data import batch_weight
from sherd.errors import ConfigError
from sherd.observe import monitor


def log(*, n: float | None = None, **figures: Any) -> None:
    """Add your own figures to this rank's events: numbers, or tensors with one element.

        sherd.log(loss=loss, accuracy=right / len(y))

    Not collective: any rank may call it, at any time, and `if sherd.is_main(): sherd.log(...)` is fine. Readers of the
    events average a figure over the ranks and calls of a step, weighted by `n`: the number of samples that it is a mean
    over. The default is the number of samples in the current batch of any distributed loader, without those repeated
    to give every rank a batch; 1 if there is no current batch.

    `loss=` is the loss of the step, and `tokens=` is summed to the tokens of the step. While events are off, it only
    checks its arguments. `SHERD_EVENTS=directory` or `sherd run --events` turns them on.
    """
    if not figures:
        raise ConfigError("sherd.log got no figures; write sherd.log(loss=loss.item())")
    found = {name: _number(name, value) for name, value in figures.items()}
    weight = None if n is None else _number("n", n)
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"sherd.log got n={n!r}; write the number of samples that the figures are a mean over")
    observe.open_early()
    run = monitor.current
    if run is not None:
        if weight is None:
            samples = batch_weight.samples()
            weight = 1 if samples is None else samples
        observe.emit("log", run.step_of_log(), figures=found, n=weight)


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.detach().item()
    elif getattr(value, "size", None) == 1 and hasattr(value, "item"):  # numpy's
        value = value.item()
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, str):
        fix = f'write sherd.observe.emit("sample", text={name}) for text'
    else:
        fix = f"write for instance {name}={name}.mean().item()"
    raise ConfigError(f"sherd.log got {name}={_short(value)}, expected a number or a tensor with one element; {fix}")


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
