"""The forward of `precision="bf16"`, `"fp16"` and `"bf16-autocast"`: what is cast where.

With `Casting` the parameters are of 16 bits, but for modules that are kept in fp32 (`kept_modules`). Buffers keep their
dtypes. *Floats* are tensors of fp16, bf16, fp32 and fp64: in tuples, named tuples, lists, mappings and dataclasses, by
position or by name. Nothing else is cast: no integers, bools, complex numbers, 8-bit floats or other objects.

| a call of                          | its inputs                 | what it returns                                    |
|------------------------------------|----------------------------|----------------------------------------------------|
| a module of 16 bits, from outside  | floats become 16 bits      | 16-bit floats become fp32                          |
| the same, from inside the model    | floats become 16 bits      | as computed                                        |
| a kept module, from outside        | floats become fp32         | 16-bit floats become fp32                          |
| the same, from inside              | floats become fp32         | floats become what its first float input was; if   |
|                                    |                            | it had none, what the module around it computes in |
| a loss of torch, kept, from inside | 16-bit floats become fp32  | as computed                                        |
| a module without parameters        | as they are                | as computed                                        |
| a module again, in a backward      | as in the forward          | as in the forward                                  |

With `Autocasting` the parameters stay in fp32, and torch casts at each operation:

| a call of                          | its inputs                 | what it returns                                    |
|------------------------------------|----------------------------|----------------------------------------------------|
| any module, from outside           | as they are                | 16-bit floats become fp32                          |
| any module, from inside            | as they are                | as computed                                        |

A call is *from outside* if no call of another module with such hooks is under way in the thread: `model(x)`,
`model.encoder(x)`, and each `self(...)` of a `model.generate(...)`. A loss outside the model is therefore computed in
fp32, as in plain training. fp64 that a model returns was computed on purpose, and stays. Casting is differentiable:
gradients of inputs have the inputs' dtypes. Containers are copied where something in them is cast.

A module is of the dtype that its first parameter has at the time of the call; a container, of that of the first
parameter below it. So `copy.deepcopy(model).float()` computes in fp32: the hooks travel with copies and pickles.
Modules that are added to a model after `install()` have no hooks.

What a module's own code computes is not cast: a loss that it computes with a function, or with a module that it makes
in its forward, is one of 16 bits. `Autocasting` breaks the graph of torch.compile at the outermost module, and not
within; `Casting` does not. A call whose inputs fit costs about 5 us more than one without hooks, of which torch's own
handling of hooks is 2; one of a kept module 17, with two casts of a small tensor. Of modules without parameters only
those that are kept have hooks of `Casting`.

Read in this order: `kept`, `containers`, `calls`, `casting`, `autocasting`, `blame`.
"""

from __future__ import annotations

from sherd.engine.modules.casting.autocasting import Autocasting
from sherd.engine.modules.casting.casting import Casting
from sherd.engine.modules.casting.kept import Keep, Kept, kept_modules

__all__ = ["Autocasting", "Casting", "Keep", "Kept", "kept_modules"]
