"""Says in an error about dtypes which module it happened in, and what to write."""

from __future__ import annotations

import re
from types import TracebackType

import torch
from torch import nn

from sherd.engine.modules.casting.calls import call_of

PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar ?type|data ?type|input type|weight type|bias type|float16|float32|\bhalf\b|HalfTensor|FloatTensor",
    re.IGNORECASE,
)


def blame(error: Exception, module: nn.Module, name: str, dtype: torch.dtype, kept: bool) -> None:
    """Add to an error which module it happened in, if it is about dtypes and nobody has yet."""
    if getattr(error, "_sherd_blamed", False):
        return
    if not error.args or not isinstance(error.args[0], str) or not _ABOUT_DTYPES.search(error.args[0]):
        return
    names = {below: ".".join(filter(None, (name, path))) for path, below in module.named_modules()}
    innermost = _innermost(error.__traceback__, names) or module
    where = f"module {names[innermost]!r} ({type(innermost).__name__}), with precision={PRECISION[dtype]!r}"
    wrong = f"an operation in its code has no {PRECISION[dtype]} kernel, or its operands are of different dtypes"
    if innermost is not module and call_of(innermost) is None and next(innermost.parameters(), None) is not None:
        fix = "it was added to the model after sherd.distribute, so nothing is cast for it; add it before"
    elif kept:
        fix = "it is kept in fp32, and something that it uses is not; cast that in its code, or keep it in fp32 too"
    elif not names[innermost]:
        fix = f"{wrong}; cast them there, or move that code into a module and keep it in fp32"
    else:
        fix = f"{wrong}; cast them there, or keep the module in fp32: keep_fp32=[..., {names[innermost]!r}]"
    error.args = (f"{error.args[0]}\nThis happened in {where}: {fix}.", *error.args[1:])
    error._sherd_blamed = True  # type: ignore[attr-defined]


def _innermost(traceback: TracebackType | None, among: dict[nn.Module, str]) -> nn.Module | None:
    """The module in whose code it happened, which need not have hooks."""
    found = None
    while traceback is not None:
        this = traceback.tb_frame.f_locals.get("self")
        if isinstance(this, nn.Module) and this in among:
            found = this
        traceback = traceback.tb_next
    return found
