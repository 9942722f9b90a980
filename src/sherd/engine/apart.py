"""The engine's own calls of torch, apart from whatever the program that caused them is in the middle of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_C: Any = torch._C


def bypass_torch_function() -> AbstractContextManager[Any]:
    """What is asked of tensors inside is not known to their classes: being asked costs one that is gathered on use 20
    microseconds, and there are hundreds of questions in a step. Not for their elements, which may not be there."""
    context: AbstractContextManager[Any] = _C.DisableTorchFunctionSubclass()
    return context


@contextmanager
def apart() -> Iterator[None]:
    """What is done inside is not recorded by autograd or a trace, not transformed, and makes no inference tensors."""
    trace = _C._get_tracing_state()
    with ExitStack() as stack:
        if _C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if trace is not None:
            _C._set_tracing_state(None)
            stack.callback(_C._set_tracing_state, trace)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield
