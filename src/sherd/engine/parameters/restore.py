"""Restores a model's parameters and buffers: a `distribute` that is refused leaves no trace.

Their old memory is kept until then, so nothing has to be copied. Some stores write rank 0's values into it; that is the
last collective step, after everything that can be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from sherd.data.restore import as_it_is
from sherd.engine.parameters.isolation import bypass_torch_function


def tensors_as_they_are(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """A function that gives each tensor back its present class, attributes, memory, gradient and hooks."""
    restores = [_as_it_is(tensor) for tensor in tensors]

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _as_it_is(tensor: Any) -> Callable[[], None]:
    own, data = as_it_is(tensor), tensor.data
    gradient, hooks = (tensor.grad, tensor._post_accumulate_grad_hooks) if tensor.requires_grad else (None, None)
    inside = {} if hooks is None else dict(hooks)
    kind = tensor.grad_dtype if tensor.requires_grad else None

    def restore() -> None:
        own()
        with bypass_torch_function():
            if not tensor.is_set_to(data):
                tensor.data = data
            if not tensor.requires_grad:
                return
            tensor.grad_dtype = kind
            tensor.grad = gradient
            if (now := tensor._post_accumulate_grad_hooks) is not None:
                now.clear()  # torch may go on calling what is in it
            if hooks is not None:
                hooks.clear()
                hooks.update(inside)
            tensor._post_accumulate_grad_hooks = hooks

    return restore
