"""Makes `torch.distributed.init_process_group("sherd")` work after `import sherd`, in whichever order the two are
imported, and without importing torch for those who do not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TORCHS = "torch.distributed.distributed_c10d"


def register() -> None:
    """Tell torch of the backend: now, or as soon as it is imported."""
    module = sys.modules.get(_TORCHS)
    if module is None or not hasattr(module, "Backend"):
        sys.meta_path.insert(0, _Watch())
    elif "SHERD" not in module.Backend._plugins:
        _tell(module)


def _tell(module: ModuleType) -> None:
    module.Backend.register_backend("sherd", _create, extended_api=True, devices=["cpu"])


def _create(place: Any, options: Any) -> Any:
    return importlib.import_module("sherd.comm.backend").create(place, options)


class _Watch(MetaPathFinder):
    """Sees the module of torch's backends being imported, once, and leaves it to the other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TORCHS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                _tell(module)

            loader.exec_module = execute_and_tell
        return spec
