"""What becomes of a parameter whose gradient is sharded: `p.grad` asks its engine.

The class of the user's own parameter objects is changed in place. Autograd does not notice: it keeps the gradient of a
leaf in C++ and never asks Python for it.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sherd.patches import parameter_new

RELIES_ON = {
    "torch:Tensor.grad": None,
    "torch.nn:Module.zero_grad": "self set_to_none",
}
_RAW: Any = torch.Tensor.grad
_MODULE_ZERO_GRAD = nn.Module.zero_grad.__code__
_ANY = torch.empty(0)
_NOBODY: Any = (lambda: None, 0)


class GradientSource(Protocol):
    """Who knows the gradient of a parameter."""

    def has_grad(self, entry: int) -> bool: ...

    def read_grad(self, entry: int) -> Tensor | None: ...

    def write_grad(self, entry: int, gradient: Tensor | None) -> None: ...


def raw_grad(parameter: Tensor) -> Tensor | None:
    """The gradient that autograd left in a leaf."""
    gradient: Tensor | None = _RAW.__get__(parameter)
    return gradient


def set_raw_grad(parameter: Tensor, gradient: Tensor | None) -> None:
    """Replace the gradient that autograd left in a leaf."""
    _RAW.__set__(parameter, gradient)


def install(parameter: nn.Parameter, source: GradientSource, entry: int) -> None:
    """Make `source` the one that knows the gradient of `parameter`."""
    if not isinstance(parameter, ShardedParameter):
        parameter_new.install()
        parameter.__class__ = ShardedParameter
    parameter.__dict__["_sherd"] = (weakref.ref(source), entry)


def uninstall() -> None:
    """Nothing of torch's was replaced: parameters keep their class."""


class ShardedParameter(nn.Parameter):
    """A parameter whose gradient this rank keeps only a part of. Copies of it are plain parameters."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient over all ranks, gathered. Collective; `sherd.full_grad` is the same with a name."""
        source, entry = self.__dict__.get("_sherd", _NOBODY)
        owner: GradientSource | None = source()
        if owner is None:
            return raw_grad(self)  # the model is gone, and this parameter lives on by itself
        caller = sys._getframe(1)
        if caller.f_code is _MODULE_ZERO_GRAD and caller.f_locals["set_to_none"]:
            return _ANY if owner.has_grad(entry) else None  # it only asks whether there is one, then drops it
        return owner.read_grad(entry)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        source, entry = self.__dict__.get("_sherd", _NOBODY)
        owner = source()
        if owner is None:
            set_raw_grad(self, gradient)
        else:
            owner.write_grad(entry, gradient)

    def plain_data(self) -> Tensor:
        """What a parameter that is made of this one takes."""
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = nn.Parameter(self.detach().clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)
