"""Casts around the modules of a model whose parameters are of 16 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from sherd.engine.modules.casting.blame import blame
from sherd.engine.modules.casting.calls import Call, Calls, ModuleHooks, call_frame, failing
from sherd.engine.modules.casting.containers import ATOMS, COMPUTED, FLOATS, HALVES, cast, first_float
from sherd.engine.modules.casting.kept import Kept, as_one, is_loss

_calls = Calls()


class Casting:
    """Hooks that cast what modules of these models take and return. Modules that are added later have none."""

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype, kept: Kept) -> None:
        self._hooks = list(_hooks(as_one(models), dtype, kept))

    def install(self) -> None:
        """Cast from now on, to the dtypes that the parameters have at each call."""
        for module, hooks in self._hooks:
            hooks.install(module)

    def remove(self) -> None:
        """Cast no more. Copies of the models go on."""
        for _, hooks in self._hooks:
            hooks.remove()


def _hooks(model: nn.Module, dtype: torch.dtype, kept: Kept) -> Iterator[tuple[nn.Module, CastingHooks]]:
    """Modules with their hooks. What has no parameters works in any dtype, and needs none unless it is kept."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    derived = {below for each in lists for below in each.modules()}
    for name, module in model.named_modules():
        keep = module in kept.modules
        witness = _witness(module, () if keep else kept.parameters)
        if (keep or witness is not None) and module not in lists:
            yield module, CastingHooks(name, dtype, witness, keep, keep and is_loss(module), module in derived)


def _witness(module: nn.Module, without: Collection[nn.Parameter]) -> tuple[str, ...] | None:
    """The path to the first floating-point parameter of a module that has the dtype in which it computes."""
    for path, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter not in without:
            return tuple(path.split("."))
    return None


class CastingHooks(ModuleHooks):
    """Casts the inputs of one module to the dtype in which it computes, and what it returns where that is needed."""

    def __init__(
        self, name: str, dtype: torch.dtype, witness: tuple[str, ...] | None, kept: bool, loss: bool, derived: bool
    ) -> None:
        super().__init__(name)
        self.precision = dtype
        *self.path, self.key = witness or ("",)
        self.kept = kept
        self.loss = loss
        """whether it returns what it has computed"""
        self.derived = derived
        """whether it computes a parameter of another module, which is used inside as it is read from outside"""
        self.surroundings = dtype
        """what they computed in at its last call in a forward"""

    def before(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        frame = call_frame()
        around = _calls.around(frame)
        outermost = self.is_outermost(around) and not self.derived
        dtype, among = self._computes_in(module), FLOATS if self.key else HALVES
        gives = self._gives(around, args, options) if self.kept else None
        _calls.stack.append(Call(frame, outermost, dtype, gives))
        if _fit(args, dtype, among) and (not options or _fit(options.values(), dtype, among)):
            return None
        done: dict[Tensor, Tensor] = {}
        return cast(args, dtype, among, done), cast(options, dtype, among, done)

    def after(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        frame = call_frame()
        call = _calls.leave(frame)
        if failing(frame):
            blame(module, self.name, self.precision, self.kept)
            return None
        if call is None:
            return None
        if call.outermost:
            return cast(output, torch.float32, HALVES, {})
        return None if call.gives is None else cast(output, call.gives, COMPUTED, {})

    def _computes_in(self, module: nn.Module) -> torch.dtype:
        """The dtype of the parameters now: it is another one after `model.float()`, and in a `functional_call`."""
        found: nn.Module | None = module
        for part in self.path:
            found = None if found is None else found._modules.get(part)
        parameter = None if found is None else found._parameters.get(self.key)
        if parameter is None or parameter.dtype not in FLOATS:
            return torch.float32 if self.kept else self.precision
        return parameter.dtype

    def _gives(self, around: Call | None, args: tuple[Any, ...], options: dict[str, Any]) -> torch.dtype | None:
        """What a kept module returns, inside a model: the dtype that it takes, or that of its surroundings."""
        if self.loss:
            return None
        if around is not None and around.dtype is not None and around.dtype is not self.surroundings:
            self.surroundings = around.dtype
        return first_float(args, options) or self.surroundings


def _fit(values: Any, dtype: torch.dtype, among: frozenset[torch.dtype]) -> bool:
    """Whether there is nothing to cast among these, nor to look into."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is not dtype and value.dtype in among:
                return False
        elif type(value) not in ATOMS:
            return False
    return True
