"""The transforms of torch.func wrap tensors in C++, where nobody can tell what is read: what they wrap is pinned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._functorch.eager_transforms
import torch._functorch.vmap

from sherd.engine.parameters.gathered.on_use import pin

_WRAPPERS: tuple[tuple[Any, str], ...] = (
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
    (torch._functorch.vmap, "_add_batch_dim"),
)


def watch_transforms() -> None:
    """Be told what is wrapped, from the first time on."""
    for module, name in _WRAPPERS:
        original = getattr(module, name)
        if not hasattr(original, "__sherd__"):
            setattr(module, name, _watched(original))


def _watched(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrap(tensor: Any, *details: Any) -> Any:
        pin(tensor)
        return original(tensor, *details)

    wrap.__sherd__ = True  # type: ignore[attr-defined]
    return wrap
