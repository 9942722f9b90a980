"""Which call of a module came from outside: hooks that know whether another call is under way around theirs.

Torch calls forward hooks with `always_call` after an `Exception` too, but not after a KeyboardInterrupt, and also when
the pre-hook was never reached. So calls are not counted: each is recorded with the frame that makes it. A record is
stale if its frame is no longer among those that are running.

When a checkpointed module is computed again in a backward, no other call is around it, whatever there was in the
forward. It is then taken to come from where it came from in the last forward: what it returns has the same dtypes.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

_CALL = nn.Module._call_impl.__code__
_graph_task: Any = torch._C._current_graph_task_id


@dataclass(slots=True, eq=False)
class Call:
    """A call of a module that is under way."""

    frame: FrameType | None
    """that of torch's `_call_impl`; None in what torch.compile traced"""
    outermost: bool
    dtype: torch.dtype | None = None
    """what the module computes in"""
    gives: torch.dtype | None = None
    """what it has to return; None: what it has computed"""
    autocast: Any = None
    """torch's context, if this call has entered one"""


class Calls(threading.local):
    """The calls that are under way in this thread, the outermost first."""

    def __init__(self) -> None:
        self.stack: list[Call] = []

    def around(self, frame: FrameType | None) -> Call | None:
        """The call around that frame, if any. Drops stale ones."""
        stack = self.stack
        while stack:
            call = stack[-1]
            if frame is None or call.frame is None or _runs_in(frame, call.frame):
                return call
            _close(stack.pop())
        return None

    def leave(self, frame: FrameType | None) -> Call | None:
        """Remove the call that runs in that frame; None if it was not recorded."""
        stack = self.stack
        if not stack:
            return None
        if frame is None or stack[-1].frame is frame:
            return stack.pop()
        if all(call.frame is not frame for call in stack):  # its pre-hook was not reached, or was compiled
            return stack.pop() if stack[-1].frame is None else None
        while stack[-1].frame is not frame:
            _close(stack.pop())
        return stack.pop()


class ModuleHooks:
    """The hooks of one module: plain and picklable, so that copies of the module have them, and work.

    They hold their handles, since torch numbers hooks in each process: unpickling a handle reserves its number.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.from_outside = False
        """whether its last call in a forward was an outermost one"""
        self._handles: list[RemovableHandle] = []

    def install(self, module: nn.Module) -> None:
        """Hook `module`, in place of what a model of which it is a copy had."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in [*hooks.items()]:
                if isinstance(getattr(hook, "__self__", None), ModuleHooks):
                    del hooks[number]  # torch does not mind that flags of this number are left
        self._handles = [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Unhook it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        raise NotImplementedError

    def after(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        """The forward hook, which is called after an error too."""
        raise NotImplementedError

    def is_outermost(self, around: Call | None) -> bool:
        """Whether a call that has `around` around it came from outside; remembers it for a backward."""
        outermost = around is None
        if outermost is not self.from_outside and not is_compiling():
            if _graph_task() == -1:
                self.from_outside = outermost
            elif outermost:
                return False
        return outermost


def hooks_of(module: nn.Module) -> ModuleHooks | None:
    """The hooks of this kind that a module has."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, ModuleHooks)), None)


def call_frame() -> FrameType | None:
    """The frame in which torch makes the call whose hook calls this. None where torch.compile traces."""
    if is_compiling():
        return None
    found: FrameType | None = sys._getframe(2)
    while found is not None and found.f_code is not _CALL:
        found = found.f_back
    return found


def failing(frame: FrameType | None) -> bool:
    """Whether torch calls the hook that calls this because of an error; `frame` is that of the call."""
    return frame is not None and sys._getframe(2) is frame


def _runs_in(frame: FrameType | None, outer: FrameType) -> bool:
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False


def _close(call: Call) -> None:
    """End a call that nobody has ended."""
    if call.autocast is not None:
        call.autocast.__exit__(None, None, None)
