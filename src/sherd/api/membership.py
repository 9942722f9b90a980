"""Which modules are distributed, and what that changes about loading into them.

`load_state_dict` of a module that is, contains or is a part of a distributed model takes rank 0's values, wherever the
parameters live. Torch has no hook for that which copies and pickles of the module would not carry along, so the method
is wrapped once per process and asks which engine a module belongs to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from sherd.engine.engine import Engine
from sherd.errors import ConfigError

_engines: MutableMapping[nn.Module | nn.Parameter, weakref.ref[Engine]] = WeakIdKeyDictionary()


def enrol(model: nn.Module, engine: Engine) -> None:
    """Make `engine` the one of `model`, its modules and its parameters."""
    members: list[nn.Module | nn.Parameter] = [*model.modules(), *model.parameters()]
    for member in members:
        _engines[member] = weakref.ref(engine)
    if not hasattr(nn.Module.load_state_dict, "__sherd__"):
        _wrap_loading()


def engine_of(module: nn.Module) -> Engine:
    """The engine of a distributed model, or of the model that `module` is a part of."""
    engine = _find(module)
    if engine is None:
        raise ConfigError(
            f"this {type(module).__name__} is not part of a distributed model; call sherd.distribute first"
        )
    return engine


def is_distributed(member: nn.Module | nn.Parameter) -> bool:
    """Whether it is a distributed model or a part of one."""
    return _find(member) is not None


def _find(member: nn.Module | nn.Parameter) -> Engine | None:
    reference = _engines.get(member)
    return None if reference is None else reference()


def _wrap_loading() -> None:
    original = nn.Module.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        engines = {id(engine): engine for engine in map(_find, self.modules()) if engine is not None}
        if engines and assign:
            raise ConfigError(
                "load_state_dict(assign=True) would put other tensors in the place of those that the ranks train; "
                "write load_state_dict(state)"
            )
        with ExitStack() as edits:
            for engine in engines.values():
                edits.enter_context(engine.editing.editing(self, compare=False))
            return original(self, state_dict, strict, assign)

    load_state_dict.__sherd__ = True  # type: ignore[attr-defined]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
