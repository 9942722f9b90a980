"""The losses that backwards begin at, for whoever records them.

While a GradScaler is in use, what it has not scaled is not taken for a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sherd.observe import monitor
from sherd.observe.monitor import RunMonitor
from sherd.patches.grad_scaler import scale_of


def notice_scaler() -> bool:
    """A scaler has scaled something; whether anybody records it."""
    if monitor.current is None:
        return False
    monitor.current.scaled = True
    return True


@contextmanager
def recorded(roots: Any) -> Iterator[None]:
    """An outermost backward from these roots runs inside."""
    run = monitor.current
    if run is None:
        yield
        return
    run.begin_backward(_unscaled(_losses(roots), run))
    try:
        yield
    finally:
        run.end_backward()


def _losses(roots: Any) -> list[Tensor]:
    """What a backward begins at, as far as it is numbers at hand."""
    if not isinstance(roots, (list, tuple)):
        roots = (roots,)
    # On an accelerator a value would have to be waited for; and there are other kinds of roots than tensors.
    here = (root for root in roots if type(root) is Tensor and root.device.type == "cpu" and root.numel() == 1)
    return [root for root in here if not root.is_complex()]


def _unscaled(losses: list[Tensor], run: RunMonitor) -> list[float]:
    """Their values as they were before a scaler had them, as far as that is known."""
    if not run.scaled:
        return [float(loss.detach()) for loss in losses]
    scales = [scale_of(loss) for loss in losses]
    return [float(loss.detach()) / scale for loss, scale in zip(losses, scales, strict=True) if scale]
