"""`nn.Module.load_state_dict` and `state_dict`, which check whether a module is distributed.

Loading into a module that is, contains or is a part of a distributed model takes rank 0's values, wherever the
parameters live; saving returns copies of parameters that no rank has whole. Torch's own hooks for both belong to the
module, so copies and pickles of it would have them too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.nn:Module.load_state_dict": "self state_dict strict assign",
    "torch.nn:Module.state_dict": "self args destination prefix keep_vars",
}
_replacements = Replacements()

Load = Callable[[nn.Module, Any, bool, Callable[[], Any]], Any]
"""load(module, state, assign, original): what `module.load_state_dict(state, assign=assign)` does and returns."""
Save = Callable[[nn.Module, Callable[[], Any]], Any]
"""save(module, original): what `module.state_dict()` does and returns."""


def install(load: Load, save: Save) -> None:
    """Call `load` and `save` around torch's own."""
    _replacements.replace(nn.Module, "load_state_dict", functools.partial(_loading, load))
    _replacements.replace(nn.Module, "state_dict", functools.partial(_saving, save))


uninstall = _replacements.restore


def _loading(load: Load, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return load(self, state_dict, assign, lambda: original(self, state_dict, strict, assign))

    return load_state_dict


def _saving(save: Save, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: nn.Module, *args: Any, **options: Any) -> Any:
        if args or "destination" in options:  # a part of another call
            return original(self, *args, **options)
        return save(self, lambda: original(self, **options))

    return state_dict
