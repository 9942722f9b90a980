"""Which dtypes parameters and their gradients have, as `precision=` and `wire_dtype=` say.

A 16-bit parameter has a *master*: the value that the optimizer steps, in the dtype that the model had before. The
parameter is the master, rounded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from sherd.config import HALF_PRECISIONS, StepOptions
from sherd.errors import ConfigError
from sherd.layout.entry import HALF_DTYPES, Dtypes, dtype_name

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What users write for a dtype, and what entries call it."""
_MASTERED = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Precision:
    """The dtypes by role of a model's parameters."""

    name: str = "fp32"
    grad: str | None = None
    wire: str | None = None
    kept: Collection[str] = ()
    """names of the parameters that are not converted"""

    @classmethod
    def of(cls, options: StepOptions, kept: Collection[str] = ()) -> Precision:
        """What the options say."""
        return cls(options.precision, options.grad_dtype, options.wire_dtype, frozenset(kept))

    @property
    def half(self) -> torch.dtype | None:
        """The dtype of 16-bit parameters, if they are to be such."""
        return getattr(torch, NAMES[self.name]) if self.name in HALF_PRECISIONS else None

    def check(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse a parameter that is in 16 bits already, where a precision was asked for."""
        if self.name != "fp32" and parameter.dtype in HALF_DTYPES:
            why = "whose values become the masters" if self.half is not None else "whose parameters stay so"
            raise ConfigError(
                f"precision={self.name!r} takes a model in fp32, {why}, but parameter {name!r} is of "
                f"{parameter.dtype}; pass the model before .half(), .bfloat16() or .to(dtype), or leave "
                f"precision= out to train it in the dtypes that it has"
            )

    def dtypes(self, name: str, parameter: nn.Parameter) -> Dtypes:
        """The dtypes by role of one parameter, which has its old dtype still."""
        own = dtype_name(parameter)
        if not parameter.is_floating_point():
            return Dtypes.all(own)
        becomes = own
        if self.half is not None and parameter.dtype in _MASTERED and name not in self.kept:
            becomes = dtype_name(torch.empty(0, dtype=self.half))
        wire = becomes if self.wire is None else NAMES[self.wire]
        kept = own if becomes == own or self.grad in (None, "fp32") else NAMES[self.grad]
        return Dtypes(becomes, wire, kept, own)
