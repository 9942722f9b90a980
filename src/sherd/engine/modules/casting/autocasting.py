"""Torch's autocast around the forward, whichever module is entered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sherd.engine.modules.casting.calls import Call, Calls, ModuleHooks, call_frame, failing
from sherd.engine.modules.casting.containers import HALVES, cast
from sherd.engine.modules.casting.kept import as_one

_calls = Calls()
_REASON = "autocast is entered before the graph of the outermost module begins, and left after it"


class Autocasting:
    """Hooks that run calls of these models, and of parts of them, in autocast. Modules that are added later have none
    of their own."""

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._hooks = [(module, AutocastHooks(name, dtype)) for name, module in as_one(models).named_modules()]

    def install(self) -> None:
        """Run calls in autocast from now on."""
        for module, hooks in self._hooks:
            hooks.install(module)

    def remove(self) -> None:
        """Do so no more. Copies of the models go on."""
        for _, hooks in self._hooks:
            hooks.remove()


class AutocastHooks(ModuleHooks):
    """Enters autocast when its module is called from outside, and returns fp32 then."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype

    def before(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        frame = call_frame()
        outermost = self.is_outermost(_calls.around(frame))
        context = None
        if outermost:
            context = _enter(module, self.dtype)
        _calls.stack.append(Call(frame, outermost, autocast=context))
        return None

    def after(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        frame = call_frame()
        call = _calls.leave(frame)
        if call is None or not call.outermost:
            return None
        _leave(call.autocast)
        return None if failing(frame) else cast(output, torch.float32, HALVES, {})


@torch.compiler.disable(reason=_REASON)  # type: ignore[no-untyped-call, untyped-decorator]
def _enter(module: nn.Module, dtype: torch.dtype) -> Any:
    """Enter autocast on the device of `module`; return the context."""
    parameter = next(module.parameters(), None)
    context: Any = torch.autocast("cpu" if parameter is None else parameter.device.type, dtype)
    context.__enter__()
    return context


@torch.compiler.disable(reason=_REASON)  # type: ignore[no-untyped-call, untyped-decorator]
def _leave(context: Any) -> None:
    context.__exit__(None, None, None)
