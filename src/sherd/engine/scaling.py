"""Losses that a GradScaler has scaled: what a backward begins at is then not the user's loss.

`torch.amp.GradScaler.scale` is wrapped once per process, by the first run that is recorded, and marks what it returns
with the scale. A loss that is made of such a one, as in `(scaler.scale(loss) / 2).backward()`, has no mark: while a
scaler is in use, what has none is not taken for a loss.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sherd.observe import monitor
from sherd.observe.monitor import RunMonitor

_MARK = "_sherd_scale"


def notice_scalers() -> None:
    """Have every GradScaler mark what it scales, from now on."""
    original = torch.amp.GradScaler.scale
    if hasattr(original, "__sherd__"):
        return

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if monitor.current is not None and self.is_enabled() and isinstance(scaled, Tensor):
            monitor.current.scaled = True
            # On an accelerator the scale would have to be waited for, and the loss is not read there anyway.
            vars(scaled)[_MARK] = self.get_scale() if scaled.device.type == "cpu" else None
        return scaled

    scale.__sherd__ = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def unscaled(losses: list[Tensor], run: RunMonitor) -> list[float]:
    """Their values as they were before a scaler had them, as far as that is known."""
    if not run.scaled:
        return [float(loss.detach()) for loss in losses]
    scales = [vars(loss).get(_MARK) for loss in losses]
    return [float(loss.detach()) / scale for loss, scale in zip(losses, scales, strict=True) if scale]
