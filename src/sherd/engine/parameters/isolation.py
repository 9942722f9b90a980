"""Isolates the engine's own torch calls from the autograd, trace or transform that the program is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_C: Any = torch._C


bypass_torch_function: Callable[[], AbstractContextManager[Any]] = _C.DisableTorchFunctionSubclass
"""Calls inside skip `__torch_function__` of tensor subclasses, which costs a parameter that is gathered on use 20
microseconds, hundreds of times per step. Not for reading elements: they may not be gathered."""


@contextmanager
def isolated() -> Iterator[None]:
    """Calls inside are not recorded by autograd or a trace, not transformed, and make no inference tensors."""
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
