"""A model's parameters and buffers, put back as they were: a `distribute` that is refused leaves nothing behind.

Their old memory is kept until then, so that nothing has to be copied. What rank 0 has sent is written there in some
stores; it is the last thing that ranks do together, and everything that can be refused is refused before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from sherd.data.restore import as_it_is
from sherd.engine.parameters.isolation import bypass_torch_function


def tensors_as_they_are(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Gives each the class, attributes, memory, gradient and hooks that it has now."""
    restores = [_as_it_is(tensor) for tensor in tensors]

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _as_it_is(tensor: Any) -> Callable[[], None]:
    own, data = as_it_is(tensor), tensor.data
    gradient, hooks = (tensor.grad, tensor._post_accumulate_grad_hooks) if tensor.requires_grad else (None, None)
    inside = {} if hooks is None else dict(hooks)

    def restore() -> None:
        own()
        with bypass_torch_function():
            if not tensor.is_set_to(data):
                tensor.data = data
            if not tensor.requires_grad:
                return
            tensor.grad = gradient
            if hooks is not None:
                hooks.clear()
                hooks.update(inside)
            tensor._post_accumulate_grad_hooks = hooks

    return restore
