"""Which modules stay in fp32 when a model's parameters are of 16 bits: what `keep_fp32=` says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from sherd.errors import ConfigError, nearest

Keep = str | type[nn.Module] | EllipsisType
"""One item of `keep_fp32`: a name, a type of modules, or `...` for what is kept by default."""
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_NAMED_NORM = re.compile(r"Norm(\d+d)?$")


@dataclass(frozen=True)
class Kept:
    """What stays in fp32."""

    modules: frozenset[nn.Module]
    """they compute in fp32"""
    parameters: frozenset[nn.Parameter]
    """they stay in fp32: those of these modules, and those that were named themselves"""
    names: tuple[str, ...]
    """the names of these parameters in the model; in a list of the models, if there are several"""


def kept_modules(models: Sequence[nn.Module], keep_fp32: Sequence[Keep] | None) -> Kept:
    """What stays in fp32. None: norm layers and losses, by `is_kept_by_default`.

    A name or a pattern as in fnmatch that matches a module, and a type, keep that module and all below it. One that
    matches a parameter keeps the parameter alone, whose module then has to cope with two dtypes. A module all of whose
    parameters are kept is kept too, and so is one without submodules that shares a parameter with one that is.
    """
    model = as_one(models)
    chosen, parameters = _chosen(model, [...] if keep_fp32 is None else keep_fp32)
    modules = {below for module in chosen for below in module.modules()}
    while added := set(_following(model, modules)):
        modules |= added
    parameters |= {parameter for module in modules for parameter in _own(module)}
    names = tuple(name for name, parameter in model.named_parameters() if parameter in parameters)
    return Kept(frozenset(modules), frozenset(parameters), names)


def as_one(models: Sequence[nn.Module]) -> nn.Module:
    """All models as one module, by whose names their parts are called."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def named_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of all models, by these names."""
    one = as_one(models)
    return ((name, module) for name, module in one.named_modules() if module is not one or len(models) == 1)


def is_kept_by_default(module: nn.Module) -> bool:
    """Whether it stays in fp32 unless `keep_fp32` says otherwise.

    That are torch's norm layers and losses, and modules of a class whose name ends in "Norm" (or "Norm2d") that have
    parameters or buffers of their own.

    A sum of squares or of logarithms loses most in 16 bits. The weights of a loss are buffers, so in fp32.
    """
    if isinstance(module, _NORMS) or is_loss(module):
        return True
    own = any(value is not None for value in (*module._parameters.values(), *module._buffers.values()))
    return own and _NAMED_NORM.search(type(module).__name__) is not None


def is_loss(module: nn.Module) -> bool:
    """Whether it is one of torch's losses."""
    return isinstance(module, _Loss)


def _chosen(model: nn.Module, keep: Sequence[Keep]) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules and the parameters that `keep` itself matches. Refuses what matches nothing."""
    if isinstance(keep, str):
        raise ConfigError(f"keep_fp32 is a list of names and types of modules, found {keep!r}; write [{keep!r}]")
    modules = list(model.named_modules(remove_duplicate=False))
    named = list(model.named_parameters(remove_duplicate=False))
    chosen: set[nn.Module] = set()
    parameters: set[nn.Parameter] = set()
    for item in keep:
        if item is ...:
            chosen |= {module for _, module in modules if is_kept_by_default(module)}
            continue
        if isinstance(item, str):
            found = {module for name, module in modules if fnmatchcase(name, item)}
            alone = {parameter for name, parameter in named if fnmatchcase(name, item)}
            valid, what = [name for name, _ in (*modules, *named) if name], "module and no parameter"
        elif isinstance(item, type) and issubclass(item, nn.Module):
            found, alone = {module for _, module in modules if isinstance(module, item)}, set()
            valid, what = sorted({type(module).__name__ for _, module in modules}), "module"
        else:
            raise ConfigError(f"keep_fp32 takes names, types of modules and ..., found {item!r}")
        if not found and not alone:
            wanted: Any = item.__name__ if isinstance(item, type) else item
            raise ConfigError(f"keep_fp32: {wanted!r} matches no {what} of the model; {nearest(wanted, valid)}")
        chosen |= found
        parameters |= alone
    return chosen, parameters


def _following(model: nn.Module, kept: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that are kept because others are."""
    shared = {parameter for module in kept for parameter in _own(module)}
    for module in model.modules():
        own = set(module.parameters())
        tied = not module._modules and not own.isdisjoint(shared)
        if module not in kept and own and (tied or own <= shared):
            yield module


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)
