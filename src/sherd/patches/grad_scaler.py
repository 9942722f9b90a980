"""`torch.amp.GradScaler`: `scale` marks its result, and `step` and `update` know of windows and of other ranks.

The root of a backward from a scaled loss is not the user's loss. A loss computed from a marked one, as in
`(scaler.scale(loss) / 2).backward()`, has no mark: where losses must not be scaled twice, `unscale_` and `step` refuse
the optimizer as well. Inside an accumulation window there is no gradient to look at, which
`step` and `update` would refuse, and the scale must not change. A step that a scaler leaves out ends its window, and
other ranks may be waiting at it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.amp:GradScaler.scale": "self outputs",
    "torch.amp:GradScaler.get_scale": "self",
    "torch.amp:GradScaler.is_enabled": "self",
    "torch.amp:GradScaler.unscale_": "self optimizer",
    "torch.amp:GradScaler.step": "self optimizer args kwargs",
    "torch.amp:GradScaler.update": "self new_scale",
}
_MARK = "_sherd_scale"
_replacements = Replacements()
_notice: Callable[[], object] | None = None
_refuse: Callable[[Optimizer], object] | None = None
_is_inside: Callable[[Optimizer], bool] | None = None
_counted: Callable[[Optimizer], AbstractContextManager[object]] = nullcontext
_waiting: weakref.WeakSet[Any] = weakref.WeakSet()


def install(notice: Callable[[], object] | None = None) -> None:
    """Have every GradScaler mark what it scales, and call `notice`, if there is one, whenever it does."""
    global _notice
    _notice = notice or _notice
    _replacements.replace(torch.amp.GradScaler, "scale", _marking)


def install_refusal(refuse: Callable[[Optimizer], object]) -> None:
    """Have every GradScaler call `refuse`, which may raise, with an optimizer that it is to unscale or step for."""
    global _refuse
    _refuse = refuse
    _replacements.replace(torch.amp.GradScaler, "unscale_", _unscaling)
    _replacements.replace(torch.amp.GradScaler, "step", _stepping)


def install_steps(
    is_inside: Callable[[Optimizer], bool], counted: Callable[[Optimizer], AbstractContextManager[object]]
) -> None:
    """Have every GradScaler wait where the next `step()` of an optimizer `is_inside` a window, not its end.

    Where it is not, `counted(optimizer)` is the context in which the scaler takes a step, or leaves it out.
    """
    global _is_inside, _counted
    _is_inside, _counted = is_inside, counted
    _replacements.replace(torch.amp.GradScaler, "step", _stepping)
    _replacements.replace(torch.amp.GradScaler, "update", _updating)


uninstall = _replacements.restore


def is_scaled(loss: Tensor) -> bool:
    """Whether a scaler has multiplied `loss`."""
    return _MARK in vars(loss)


def scale_of(loss: Tensor) -> float | None:
    """The factor by which a scaler multiplied `loss`, if known."""
    scale: float | None = vars(loss).get(_MARK)
    return scale


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled() and isinstance(scaled, Tensor):
            if _notice is not None:
                _notice()
            # On an accelerator reading the scale would synchronise, and the loss is not read there anyway.
            vars(scaled)[_MARK] = self.get_scale() if scaled.device.type == "cpu" else None
        return scaled

    return scale


def _unscaling(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def unscale_(self: Any, optimizer: Optimizer) -> None:
        if _refuse is not None and self.is_enabled():
            _refuse(optimizer)
        original(self, optimizer)

    return unscale_


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        if not self.is_enabled():
            return original(self, optimizer, *args, **options)
        if _refuse is not None:
            _refuse(optimizer)
        if _is_inside is None or not _is_inside(optimizer):
            with _counted(optimizer):
                return original(self, optimizer, *args, **options)
        _waiting.add(self)
        return optimizer.step(*args, **options)

    return step


def _updating(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update(self: Any, new_scale: Any = None) -> None:
        if self in _waiting:
            _waiting.discard(self)
            states = self._per_optimizer_states
            if new_scale is None and not any(each["found_inf_per_device"] for each in states.values()):
                states.clear()  # so that `unscale_` may be called again
                return
        original(self, new_scale)

    return update
