"""`load_state_dict` of a distributed model, or of a part of it: rank 0's values are taken, wherever they live.

Hooks find their engine by the module, so that a copy of the model, which has the hooks too, is a plain model.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from sherd.engine.engine import Engine
from sherd.errors import ConfigError

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def follow_loading(model: nn.Module, engine: Engine) -> None:
    """Make loading into `model` and its modules go through `engine`."""
    for module in model.modules():
        _engines[module] = weakref.ref(engine)
        if module._parameters:
            module.register_load_state_dict_pre_hook(_before)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(_after)  # type: ignore[no-untyped-call]


def engine_of(module: nn.Module) -> Engine:
    """The engine of a distributed model, or of the model that `module` is a part of."""
    engine = _find(module)
    if engine is None:
        raise ConfigError(
            f"this {type(module).__name__} is not part of a distributed model; call sherd.distribute first"
        )
    return engine


def is_distributed(module: nn.Module) -> bool:
    """Whether it is a distributed model or a part of one."""
    return _find(module) is not None


def _find(module: nn.Module) -> Engine | None:
    reference = _engines.get(module)
    return None if reference is None else reference()


def _before(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    engine = _find(module)
    if engine is None:
        return
    if metadata.get("assign_to_params_buffers"):
        raise ConfigError(
            "load_state_dict(assign=True) would put other tensors in the place of those that the ranks train; "
            "write load_state_dict(state)"
        )
    engine.editing.lend(module._parameters.values())


def _after(module: nn.Module, incompatible: Any) -> None:
    engine = _find(module)
    if engine is not None:
        engine.editing.write_back(module._parameters.values())
