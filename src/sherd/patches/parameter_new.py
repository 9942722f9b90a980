"""`nn.Parameter(tensor)`, for which torch wants the class of `tensor.detach()` to be that of `tensor`. Tensors of ours
have `plain_data`, which gives what the new parameter takes instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from sherd.patches.replacing import Replacements

RELIES_ON = {"torch.nn:Parameter.__new__": "cls data requires_grad"}
_replacements = Replacements()


def install() -> None:
    """Have it ask."""
    _replacements.replace(nn.Parameter, "__new__", _constructing)


def uninstall() -> None:
    """Give torch its own back."""
    _replacements.restore()


def _constructing(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def construct(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        plain_data = getattr(data, "plain_data", None)
        return original(cls, data if plain_data is None else plain_data(), requires_grad)

    return staticmethod(construct)
