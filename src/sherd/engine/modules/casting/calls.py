"""Calls of modules: what replaces their `forward`, and which call came from outside.

A call is entered and left in one function, so whatever it raises, a KeyboardInterrupt too, it leaves nothing behind.

A checkpointed module is computed again in a backward, where no other call is around it, whatever there was in the
forward. Both kinds of torch's checkpoint give the recomputation the autocast state of the forward, and nothing else of
its surroundings. So that is where each kind of casting finds out whether it is inside: `is_again_inside`. It is exact
for any number of graphs, and for modules that are called from inside and from outside in turn.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")
_graph_task: Any = torch._C._current_graph_task_id


class Calls(threading.local, Generic[T]):
    """Something of each call that is under way in this thread, the outermost first."""

    def __init__(self) -> None:
        self.stack: list[T] = []


class ModuleCall:
    """Takes the place of a module's `forward`: plain and picklable, so that copies of the module have it, and work.

    It knows its module weakly: a model that nobody uses any more is freed at once, not by the garbage collector.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)
        self._replaced: Callable[..., Any] | None = None
        """what the module itself had, if that is not the method of its class"""
        self._on = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])

    @property
    def module(self) -> nn.Module:
        """Its module."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward is gone; keep the model, and call that")
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`."""
        return self._replaced or type(self.module).forward.__get__(self.module)

    def install(self) -> None:
        """Take calls, in place of what a model of which this one is a copy had."""
        before = self.module.__dict__.get("forward")
        self._replaced = before._replaced if isinstance(before, ModuleCall) else before
        self.module.__dict__["forward"] = self
        self._on = True

    def remove(self) -> None:
        """Take no more. Where somebody has wrapped the forward since, calls pass through unchanged."""
        self._on = False
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        del module.__dict__["forward"]
        if self._replaced is not None:
            module.__dict__["forward"] = self._replaced

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.run(args, options) if self._on else self.forward(args, options)

    def forward(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What the module itself does."""
        if self._replaced is not None:
            return self._replaced(*args, **options)
        module = self.module
        return type(module).forward(module, *args, **options)

    def run(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What happens in a call."""
        raise NotImplementedError


def call_of(module: nn.Module) -> ModuleCall | None:
    """What takes the calls of a module, if it was not wrapped since."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, ModuleCall) else None


def in_backward() -> bool:
    """Whether this thread runs a backward; not where torch.compile traces, which recomputes without Python."""
    return not torch.compiler.is_compiling() and _graph_task() != -1
