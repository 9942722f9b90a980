"""The user's own parameters where a rank keeps only a part of their gradients, or of themselves: then their memory is
there only while it is used, and so is that of views of them.

Their classes are changed in place, and every call of torch that gets one is handed to `dispatch`. The transforms of
torch.func wrap tensors in C++, where nobody can tell what is read: what they wrap is pinned.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch import Tensor, nn

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.nn:Parameter.__new__": "cls data requires_grad",
    "torch:Tensor.grad": None,
    "torch.nn:Module.zero_grad": "self set_to_none",
    "torch:Tensor.__torch_function__": "func types args kwargs",
    "torch._functorch.eager_transforms:_wrap_for_grad": None,
    "torch._functorch.vmap:_add_batch_dim": None,
    "torch._C:DisableTorchFunctionSubclass": None,
    "torch._C:_autograd._push_saved_tensors_default_hooks": None,
    "torch._C:_autograd._pop_saved_tensors_default_hooks": None,
    "torch._C:_autograd._top_saved_tensors_default_hooks": None,
    "torch._C:_autograd._saved_tensors_hooks_is_enabled": None,
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack": "",
    "torch._C:_functorch.peek_interpreter_stack": None,
    "torch._C:_get_tracing_state": None,
    "torch._C:_set_tracing_state": None,
}
_TRANSFORMS: tuple[tuple[Any, str], ...] = (
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
    (torch._functorch.vmap, "_add_batch_dim"),
)
_STORE = "_sherd_store"
_RAW: Any = torch.Tensor.grad
_MODULE_ZERO_GRAD = nn.Module.zero_grad.__code__
_ANY = torch.empty(0)
_NOBODY: Any = (lambda: None, 0)
_replacements = Replacements()

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_dispatch: Dispatch


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


class GatheredView(Tensor):
    """A tensor in the memory of a store."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = self.detach().clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.detach().clone()
        return plain.__reduce_ex__(protocol)


class GatheredParameter(ShardedParameter):
    """A parameter in the memory of a store."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def install(dispatch: Dispatch, pin: Callable[[Any], None]) -> None:
    """Hand calls to `dispatch`, and what a transform wraps to `pin`."""
    global _dispatch
    _dispatch = dispatch
    for module, name in _TRANSFORMS:
        _replacements.replace(module, name, functools.partial(_watched, pin))


def uninstall() -> None:
    """Give torch its own back."""
    _replacements.restore()


def shard_grad(parameter: nn.Parameter, source: GradientSource, member: Any) -> None:
    """Make `source` the one that knows the gradient of `parameter`: `p.grad` asks it.

    Autograd does not notice: it keeps the gradient of a leaf in C++ and never asks Python for it.
    """
    if not isinstance(parameter, ShardedParameter):
        _swap_class(parameter, ShardedParameter)
    parameter.__dict__["_sherd"] = (weakref.ref(source), member)


def gather_on_use(parameter: nn.Parameter, store: Any) -> None:
    """Make a parameter whose data lies in `store` one that is gathered on use."""
    _swap_class(parameter, GatheredParameter)
    parameter.__dict__[_STORE] = store  # which lives as long as somebody can touch it


def mark_view(tensor: Tensor, store: Any) -> None:
    """Make a tensor that lies in `store` a view."""
    tensor.__class__ = GatheredView
    tensor.__dict__[_STORE] = store


def store_of(tensor: Tensor) -> Any:
    """The store in which such a tensor lies."""
    return tensor.__dict__[_STORE]


def _swap_class(parameter: nn.Parameter, kind: type[ShardedParameter]) -> None:
    _replacements.replace(nn.Parameter, "__new__", _constructing)
    parameter.__class__ = kind


def _constructing(original: Callable[..., Any]) -> Any:
    """`nn.Parameter(data)`, for which torch wants the class of `data.detach()` to be that of `data`."""

    @functools.wraps(original)
    def construct(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, ShardedParameter):
            data = data.detach()
        if isinstance(data, GatheredView):
            data = data.clone()  # its memory comes and goes
        return original(cls, data, requires_grad)

    return staticmethod(construct)


def _watched(pin: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(tensor: Any, *details: Any) -> Any:
        pin(tensor)
        return original(tensor, *details)

    return wrap
