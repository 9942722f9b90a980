"""Torch's autocast around the forward, whichever module is entered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sherd.engine.modules.casting.calls import Calls, ModuleCall, in_backward
from sherd.engine.modules.casting.containers import HALVES, cast
from sherd.engine.modules.casting.kept import named_modules

_calls: Calls[str] = Calls()
"""Their devices."""


class Autocasting:
    """Runs calls of these models, and of parts of them, in autocast. Modules that are added later are only so as parts
    of them."""

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [AutocastCall(name, module, dtype) for name, module in named_modules(models)]

    def install(self) -> None:
        """Run calls in autocast from now on."""
        for each in self._modules:
            each.install()

    def remove(self) -> None:
        """Do so no more. Copies of the models go on."""
        for each in self._modules:
            each.remove()


class AutocastCall(ModuleCall):
    """Enters autocast when its module is called from outside, and returns fp32 then."""

    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(name, module)
        self.dtype = dtype
        self.switched_off = False
        """whether it was ever called inside a model where the model's own code has switched autocast off"""

    def run(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        stack = _calls.stack
        device = stack[-1] if stack else _device(self.module)
        outermost = not stack and not self._is_again_inside(device)
        if stack and not self.switched_off and not torch.is_autocast_enabled(device):
            self.switched_off = True
        stack.append(device)
        try:
            if not outermost:
                return self.forward(args, options)
            with torch.autocast(device, self.dtype):
                output = self.forward(args, options)
        finally:
            stack.pop()
        return cast(output, torch.float32, HALVES, {})

    def _is_again_inside(self, device: str) -> bool:
        """Whether this is a recomputation of a call that came from inside: autocast is on already.

        Or it was off in the forward too. That is told from a checkpoint outside the model by `switched_off`.
        """
        if not in_backward():
            return False
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device) is self.dtype
        return self.switched_off


def _device(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
