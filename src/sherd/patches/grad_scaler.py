"""`torch.amp.GradScaler.scale`: marks what it returns with the scale.

What a backward begins at is then not the user's loss. A loss that is made of such a one, as in
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
    """Have every GradScaler call `notice` and, if that says so, mark what it scales."""
    global _notice
    _notice = notice
    _replacements.replace(torch.amp.GradScaler, "scale", _marking)


def uninstall() -> None:
    """Have them mark nothing."""
    _replacements.restore()


def scale_of(loss: Tensor) -> float | None:
    """What a scaler multiplied it with, as far as that is known."""
    scale: float | None = vars(loss).get(_MARK)
    return scale


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled() and isinstance(scaled, Tensor) and _notice():
            # On an accelerator the scale would have to be waited for, and the loss is not read there anyway.
            vars(scaled)[_MARK] = self.get_scale() if scaled.device.type == "cpu" else None
        return scaled

    return scale
