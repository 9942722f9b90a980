"""The user's own parameters where a rank keeps only a part of them: their memory, and that of their views, exists only
while it is used.

Their classes are changed in place, and every torch call on one is handed to `dispatch`. The transforms of torch.func
wrap tensors in C++, where reads cannot be intercepted: what they wrap is pinned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch import Tensor, nn

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.nn:Parameter.__new__": "cls data requires_grad",
    "torch:Tensor.grad": None,
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
_replacements = Replacements()

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_dispatch: Dispatch


class _Gathered:
    """The methods of both kinds. A copy is plain."""

    _plain: Callable[[], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = self._plain()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class GatheredView(_Gathered, Tensor):
    """A tensor in the memory of a store."""

    def _plain(self) -> Any:
        return self.detach().clone()


class GatheredParameter(_Gathered, nn.Parameter):
    """A parameter in the memory of a store."""

    def _plain(self) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad)


def install(dispatch: Dispatch, pin: Callable[[Any], None]) -> None:
    """Hand calls to `dispatch`, and what a transform wraps to `pin`."""
    global _dispatch
    _dispatch = dispatch
    for module, name in _TRANSFORMS:
        _replacements.replace(module, name, functools.partial(_watched, pin))


uninstall = _replacements.restore


def gather_on_use(parameter: nn.Parameter, store: Any) -> None:
    """Have a parameter whose data is in `store` gathered on use."""
    _replacements.replace(nn.Parameter, "__new__", _constructing)
    parameter.__class__ = GatheredParameter
    parameter.__dict__[_STORE] = store  # keeps the store alive as long as the parameter


def mark_view(tensor: Tensor, store: Any) -> None:
    """Make a tensor in the memory of `store` a `GatheredView`."""
    tensor.__class__ = GatheredView
    tensor.__dict__[_STORE] = store


def store_of(tensor: Tensor) -> Any:
    """The store that holds such a tensor."""
    return tensor.__dict__[_STORE]


def _constructing(original: Callable[..., Any]) -> Any:
    """`nn.Parameter(data)`, for which torch requires `data.detach()` to have the class of `data`."""

    @functools.wraps(original)
    def construct(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, GatheredParameter):
            data = data.detach()
        if isinstance(data, GatheredView):
            data = data.clone()  # its memory exists only while it is used
        return original(cls, data, requires_grad)

    return staticmethod(construct)


def _watched(pin: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(tensor: Any, *details: Any) -> Any:
        pin(tensor)
        return original(tensor, *details)

    return wrap
