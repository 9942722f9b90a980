"""The forward of `precision="bf16"`, `"fp16"` and `"bf16-autocast"`.

What is cast where is in docs/precision.md, "What is cast". With `Casting` the parameters are of 16 bits, but for
modules that are kept in fp32 (`kept_modules`). With `Autocasting` they stay in fp32, and torch casts at each operation.

Both take the place of the `forward` of each module, as an attribute of the module, which travels with copies and
pickles. So hooks of users see what the caller passes and gets. A shallow copy (`copy.copy(model)`) calls the model that
it is a copy of. Hooks would not do: torch calls none after a KeyboardInterrupt.

A module is of the dtype that its first parameter has at the time of the call; a container, of that of the first
parameter below it. So `copy.deepcopy(model).float()` computes in fp32.

Read in this order: `kept`, `containers`, `calls`, `casting`, `autocasting`, `blame`.
"""

from __future__ import annotations

from sherd.engine.modules.casting.autocasting import Autocasting
from sherd.engine.modules.casting.casting import Casting
from sherd.engine.modules.casting.kept import Keep, Kept, kept_modules

__all__ = ["Autocasting", "Casting", "Keep", "Kept", "kept_modules"]
