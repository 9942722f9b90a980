"""What becomes of a parameter whose gradient is sharded: `p.grad` asks its engine.

The class of the user's own parameter objects is changed in place. Autograd does not notice: it keeps the gradient of a
leaf in C++ and never asks Python for it.
"""

from __future__ import annotations

import io
import sys
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_RAW: Any = torch.Tensor.grad
_MODULE_ZERO_GRAD = nn.Module.zero_grad.__code__
_PARAMETER_NEW: Any = nn.Parameter.__new__
_ANY = torch.empty(0)
_NOBODY: Any = (lambda: None, 0)


class GradientSource(Protocol):
    """Who knows the gradient of a parameter."""

    def has_grad(self, member: Any) -> bool: ...

    def read_grad(self, member: Any) -> Tensor | None: ...

    def write_grad(self, member: Any, gradient: Tensor | None) -> None: ...


def raw_grad(parameter: Tensor) -> Tensor | None:
    """The gradient that autograd left in a leaf."""
    gradient: Tensor | None = _RAW.__get__(parameter)
    return gradient


def set_raw_grad(parameter: Tensor, gradient: Tensor | None) -> None:
    """Replace the gradient that autograd left in a leaf."""
    _RAW.__set__(parameter, gradient)


class Copied(Tensor):
    """A tensor that cannot become the data of a parameter as it is: its memory comes and goes."""


class ShardedParameter(nn.Parameter):
    """A parameter whose gradient this rank keeps only a part of. Copies of it are plain parameters."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient over all ranks, gathered. Collective; `sherd.full_grad` is the same with a name."""
        source, member = self.__dict__.get("_sherd", _NOBODY)
        owner: GradientSource | None = source()
        if owner is None:
            return raw_grad(self)  # the model is gone, and this parameter lives on by itself
        caller = sys._getframe(1)
        if caller.f_code is _MODULE_ZERO_GRAD and caller.f_locals["set_to_none"]:
            return _ANY if owner.has_grad(member) else None  # it only asks whether there is one, then drops it
        return owner.read_grad(member)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        source, member = self.__dict__.get("_sherd", _NOBODY)
        owner = source()
        if owner is None:
            set_raw_grad(self, gradient)
        else:
            owner.write_grad(member, gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = nn.Parameter(self.detach().clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


def _construct(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """`nn.Parameter(data)`, for which torch wants the class of `data.detach()` to be that of `data`."""
    if isinstance(data, ShardedParameter):
        data = data.detach()
    if isinstance(data, Copied):
        data = data.clone()
    return _PARAMETER_NEW(cls, data, requires_grad)


def by_value(parameter: Tensor) -> Any:
    """How it is sent to another process: torch would send a handle to memory that is gone before it arrives."""
    buffer = io.BytesIO()
    torch.save(parameter.detach(), buffer)
    return _rebuild, (buffer.getvalue(), parameter.requires_grad)


def _rebuild(data: bytes, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.load(io.BytesIO(data)), requires_grad)


def adopt(parameter: nn.Parameter, source: GradientSource, member: Any) -> None:
    """Make `source` the one that knows the gradient of `parameter`."""
    if not isinstance(parameter, ShardedParameter):
        become(parameter, ShardedParameter)
    parameter.__dict__["_sherd"] = (weakref.ref(source), member)


def become(parameter: nn.Parameter, kind: type[ShardedParameter]) -> None:
    """Change the class of a parameter."""
    if nn.Parameter.__new__ is not _construct:
        nn.Parameter.__new__ = staticmethod(_construct)  # type: ignore[method-assign]
    ForkingPickler.register(kind, by_value)
    parameter.__class__ = kind
