"""What works, each as a training script that is written once and run plainly and distributed.

Read `cases` first; `running` compares, `page` writes docs/what-works.md. Every other module here holds cases.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.what_works.cases import REGISTRY, Case


def every_case() -> dict[str, Case]:
    """All cases of this package by name, such as `loops.several_backwards`."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(REGISTRY.items(), key=lambda item: item[1].script.__module__))  # as written within a module
