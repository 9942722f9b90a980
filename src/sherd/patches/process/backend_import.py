"""Adds a backend to torch's list: `torch.distributed.init_process_group("sherd")` works after `import sherd`, whichever
of the two is imported first, and without importing torch otherwise."""

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
RELIES_ON = {
    f"{_TORCHS}:Backend.register_backend": "name func extended_api devices",
    f"{_TORCHS}:Backend._plugins": None,
    f"{_TORCHS}:Backend.backend_list": None,
    f"{_TORCHS}:Backend.backend_type_map": None,
    f"{_TORCHS}:Backend.backend_capability": None,
}
_NAME = "sherd"
_creator = ""


def install(creator: str) -> None:
    """Register the backend, now or as soon as torch is imported. The module `creator`, whose function `create` makes a
    group, is imported for the first group."""
    global _creator
    _creator = creator
    module = sys.modules.get(_TORCHS)
    if module is None or not hasattr(module, "Backend"):
        if not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
            sys.meta_path.insert(0, _ImportHook())
    elif _NAME.upper() not in module.Backend._plugins:
        _register(module)


def uninstall() -> None:
    """Unregister the backend. Existing groups keep working."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImportHook)]
    backend = getattr(sys.modules.get(_TORCHS), "Backend", None)
    if backend is None or backend._plugins.pop(_NAME.upper(), None) is None:
        return
    delattr(backend, _NAME.upper())
    backend.backend_list.remove(_NAME)
    del backend.backend_type_map[_NAME], backend.backend_capability[_NAME]


def _register(module: ModuleType) -> None:
    module.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])


def _create(place: Any, options: Any) -> Any:
    return importlib.import_module(_creator).create(place, options)


class _ImportHook(MetaPathFinder):
    """Notices the first import of torch's module of backends, and leaves the import to the other finders."""

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

            def execute_and_register(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                _register(module)

            loader.exec_module = execute_and_register
        return spec
