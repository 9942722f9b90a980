"""Casts around the modules of a model whose parameters are of 16 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from sherd.engine.modules.casting.blame import blame
from sherd.engine.modules.casting.calls import Calls, ModuleCall, in_backward
from sherd.engine.modules.casting.containers import ATOMS, COMPUTED, FLOATS, HALVES, cast, first_float
from sherd.engine.modules.casting.kept import Kept, is_loss, named_modules

_calls: Calls[torch.dtype] = Calls()
"""What they compute in."""


class Casting:
    """Casts what modules of these models take and return, but not those that are added later."""

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype, kept: Kept) -> None:
        self._modules = list(_modules(models, dtype, kept))
        self._marks: list[RemovableHandle] = []

    def install(self) -> None:
        """Cast from now on, to the dtypes that the parameters have at each call."""
        for each in self._modules:
            each.install()
            if each.kept and _unfused not in each.module._forward_pre_hooks.values():
                self._marks.append(each.module.register_forward_pre_hook(_unfused))

    def remove(self) -> None:
        """Cast no more. Copies of the models go on."""
        for each in self._modules:
            each.remove()
        for mark in self._marks:
            mark.remove()


def _unfused(module: nn.Module, args: Any) -> None:
    """A hook that does nothing. In eval torch's transformer layers have a fused path, which calls no modules and so
    casts nothing; it is not taken where one of them has a hook."""


def _modules(models: Sequence[nn.Module], dtype: torch.dtype, kept: Kept) -> Iterator[CastingCall]:
    """What is to be cast for. What has no parameters works in any dtype, and needs nothing unless it is kept."""
    lists = [module for model in models for module in model.modules() if isinstance(module, ParametrizationList)]
    derived = {below for each in lists for below in each.modules()}
    inside_kept = {below for each in kept.modules for below in each.children()}
    for name, module in named_modules(models):
        keep = module in kept.modules
        witness = _witness(module, () if keep else kept.parameters)
        if (keep or witness is not None) and module not in lists:
            found = CastingCall(name, module, dtype, witness, keep)
            found.loss, found.derived = keep and is_loss(module), module in derived
            found.surroundings = torch.float32 if module in inside_kept else dtype
            yield found


def _witness(module: nn.Module, without: Collection[nn.Parameter]) -> tuple[str, ...] | None:
    """The path to the first floating-point parameter of a module that has the dtype in which it computes."""
    for path, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter not in without:
            return tuple(path.split("."))
    return None


class CastingCall(ModuleCall):
    """Casts the inputs of one module to the dtype in which it computes, and what it returns where that is needed."""

    def __init__(
        self, name: str, module: nn.Module, dtype: torch.dtype, witness: tuple[str, ...] | None, kept: bool
    ) -> None:
        super().__init__(name, module)
        self.precision = dtype
        *self.path, self.key = witness or ("",)
        self.kept = kept
        self.loss = False
        """whether it returns what it has computed"""
        self.derived = False
        """whether it computes a parameter of another module, which is used inside as it is read from outside"""
        self.surroundings = dtype
        """what they compute in, where no call is around this one"""

    def run(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        stack = _calls.stack
        outermost = not stack and not self.derived and not _is_again_inside()
        dtype, among = self._computes_in(), FLOATS if self.key else HALVES
        gives = self._gives(args, options) if self.kept else None
        if not _fit(args, dtype, among) or not _fit(options.values(), dtype, among):
            done: dict[Tensor, Tensor] = {}
            args, options = cast(args, dtype, among, done), cast(options, dtype, among, done)
        stack.append(dtype)
        try:
            output = self._marked(args, options) if outermost else self.forward(args, options)
        except (RuntimeError, TypeError) as error:
            blame(error, self.module, self.name, self.precision, self.kept)
            raise
        finally:
            stack.pop()
        if outermost:
            return cast(output, torch.float32, HALVES, {})
        return output if gives is None else cast(output, gives, COMPUTED, {})

    def _marked(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The forward, with the mark that recomputations of what is checkpointed in there will find.

        It is a flag of autocast's that means nothing here: whether weights that autocast has cast are cached. There is
        little to cast in a model of 16 bits, where the user has switched autocast on at all.
        """
        if torch.compiler.is_compiling():
            return self.forward(args, options)
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self.forward(args, options)
        finally:
            torch.set_autocast_cache_enabled(before)

    def _computes_in(self) -> torch.dtype:
        """The dtype of the parameters now: it is another one after `model.float()`, and in a `functional_call`."""
        found: nn.Module | None = self.module
        for part in self.path:
            found = None if found is None else found._modules.get(part)
        parameter = None if found is None else found._parameters.get(self.key)
        if parameter is None or parameter.dtype not in FLOATS:
            return torch.float32 if self.kept else self.precision
        return parameter.dtype

    def _gives(self, args: tuple[Any, ...], options: dict[str, Any]) -> torch.dtype | None:
        """What a kept module returns, inside a model: the dtype that it takes, or that of its surroundings."""
        if self.loss:
            return None
        found = first_float(args, options)
        if found is None:
            return _calls.stack[-1] if _calls.stack else self.surroundings
        return found


def _is_again_inside() -> bool:
    """Whether this is a recomputation of what was called from inside: the mark of the call around it is there."""
    return in_backward() and not torch.is_autocast_cache_enabled()


def _fit(values: Any, dtype: torch.dtype, among: frozenset[torch.dtype]) -> bool:
    """Whether there is nothing to cast among these, nor to look into."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is not dtype and value.dtype in among:
                return False
        elif type(value) not in ATOMS:
            return False
    return True
