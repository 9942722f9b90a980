"""Everything in torch and Python that is replaced or changed in a running process: one file for each.

Each has `install`, which may be called repeatedly, `uninstall`, which leaves torch and Python as they were (live
objects keep their classes), and `RELIES_ON`: the parts of torch that it depends on, as `module:attribute`, with the
names of their parameters ("..." for the rest), or None where these do not matter. docs/patches.md has the reasons.

A patch does not know its users: callbacks are passed to `install`, and it keeps no object of its users alive. Nothing
is imported here, since `import sherd` must not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

PATCHES = (
    *("process.backend_import", "process.heap"),
    *("module_state", "batch_norm"),  # modules
    *("gathered", "pickling"),  # parameters
    *("backward", "grad_scaler", "foreach"),  # gradients
    *("optimizer_object", "foreign", "own_collectives", "schedulers"),  # steps
    "loader_object",  # data
)
"""In the order in which docs/patches.md lists them."""

CHECKED_TORCH = ("2.13",)
"""Releases of torch that have everything in `RELIES_ON`. pyproject.toml does not allow the one after the last."""


def uninstall_all() -> None:
    """Uninstall every patch. The next `sherd.distribute` installs what it needs again."""
    for name in reversed(PATCHES):
        module: Any = sys.modules.get(f"{__name__}.{name}")
        if module is not None:
            module.uninstall()


def patch(name: str) -> Any:
    """The patch of that name."""
    return importlib.import_module(f"{__name__}.{name}")
