"""`torch.amp.GradScaler.scale`, which marks its result with the scale.

The root of such a backward is not the user's loss. A loss computed from a marked one, as in
`(scaler.scale(loss) / 2).backward()`, has no mark.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.amp:GradScaler.scale": "self outputs",
    "torch.amp:GradScaler.get_scale": "self",
    "torch.amp:GradScaler.is_enabled": "self",
}
_MARK = "_sherd_scale"
_replacements = Replacements()
_notice: Callable[[], bool]


def install(notice: Callable[[], bool]) -> None:
    """Have every GradScaler call `notice` and, if it returns True, mark what it scales."""
    global _notice
    _notice = notice
    _replacements.replace(torch.amp.GradScaler, "scale", _marking)


uninstall = _replacements.restore


def scale_of(loss: Tensor) -> float | None:
    """The factor by which a scaler multiplied `loss`, if known."""
    scale: float | None = vars(loss).get(_MARK)
    return scale


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled() and isinstance(scaled, Tensor) and _notice():
            # On an accelerator reading the scale would synchronise, and the loss is not read there anyway.
            vars(scaled)[_MARK] = self.get_scale() if scaled.device.type == "cpu" else None
        return scaled

    return scale
