"""Sends parameters to other processes by value: torch sends a handle to their memory, which may be freed before it
arrives, or belong to a mapping that ranks already share."""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from sherd.patches.gathered import GatheredParameter, GatheredView

RELIES_ON = {
    "multiprocessing.reduction:ForkingPickler.register": "type reduce",
    "multiprocessing.reduction:ForkingPickler._extra_reducers": None,
    "torch.multiprocessing.reductions:reduce_tensor": "tensor",
}
_KINDS = (nn.Parameter, GatheredParameter, GatheredView)
_reducers: dict[type[Any], Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
_before: dict[type[Any], Any] = {}
_is_ours: Callable[[Any], bool]


def install(is_ours: Callable[[nn.Parameter], bool]) -> None:
    """Send parameters by value where `is_ours` says so."""
    global _is_ours
    _is_ours = is_ours
    for kind in _KINDS:
        if _reducers.get(kind) is not _reduce:
            _before[kind] = _reducers.get(kind)
            ForkingPickler.register(kind, _reduce)


def uninstall() -> None:
    """Send everything as torch does."""
    while _before:
        kind, reducer = _before.popitem()
        if reducer is None:
            _reducers.pop(kind, None)
        else:
            _reducers[kind] = reducer


def _reduce(tensor: Tensor) -> Any:
    if type(tensor) is nn.Parameter and not _is_ours(tensor):
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    torch.save(tensor.detach().clone(), buffer)  # without the clone, torch would save the whole storage of a view
    return _rebuild, (buffer.getvalue(), tensor.requires_grad)


def _rebuild(data: bytes, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.load(io.BytesIO(data)), requires_grad)
