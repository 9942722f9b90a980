"""Checking a call before anything is sent.

A call that cannot be right is refused by the rank that makes it, while the other ranks are unharmed and the
communicator can still be used.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sherd.comm.calls import Call, describe
from sherd.comm.codec import Codec
from sherd.comm.summation import check_reduction
from sherd.errors import ConfigError, Unsupported

Detail = str | int | tuple[int, int] | tuple[int, str]
"""The reduction, the root (with the reduction, or what is sent), the other rank (with a tag), or what is gathered."""


class CheckedCall(NamedTuple):
    """A call whose arguments are right, and the shape and dtype of its result."""

    call: Call
    shape: torch.Size
    dtype: torch.dtype


class Caller(Protocol):
    """A communicator, as seen from here."""

    rank: int
    world: int
    dry: bool


def check_call(
    caller: Caller,
    operation: str,
    input: Tensor,
    output: Tensor | None,
    dtype: torch.dtype | None,
    codec: Codec | None,
    detail: Detail,
) -> CheckedCall:
    """Check the arguments of an operation and describe it."""
    rank = caller.rank
    for tensor in (input,) if output is None else (input, output):
        check_tensor(rank, operation, tensor, dry=caller.dry)
    out_dtype = _out_dtype(input, output, dtype)
    words = [f"codec {codec.name}" if codec else ""]
    compared = ""
    if operation in ("reduce_scatter", "all_reduce"):
        check_reduction(rank, operation, str(detail), input.dtype, out_dtype)
        words.insert(0, str(detail))
    elif operation == "all_gather":
        words.insert(0, str(detail))
    elif operation in ("broadcast", "reduce"):
        root, word = detail if isinstance(detail, tuple) else (detail, "")
        check_rank(caller, root, operation, "root")
        if operation == "reduce":
            check_reduction(rank, operation, str(word), input.dtype, out_dtype)
        words = [f"root {root}", str(word), *words]
    elif operation in ("send", "recv"):
        peer, tag = detail if isinstance(detail, tuple) else (detail, 0)
        check_rank(caller, peer, operation, "to" if operation == "send" else "source", peer=True)
        words.append(f"tag {tag}" if tag else "")
        compared = describe("message", input.dtype, input.shape, words[-1])
    if not torch.can_cast(input.dtype, out_dtype) or (operation == "all_to_all" and out_dtype != input.dtype):
        raise ConfigError(f"rank {rank}: {operation} of {input.dtype} cannot have an output of {out_dtype}")
    if out_dtype != input.dtype:
        words.append(f"out {str(out_dtype).removeprefix('torch.')}")
    text = describe(operation, input.dtype, input.shape, *words)
    shape = _out_shape(caller, operation, input, detail)
    if output is not None and (output.shape != shape or output.device != input.device):
        raise ConfigError(
            f"rank {rank}: {text} needs an output of shape {tuple(shape)} on {input.device}, "
            f"got {tuple(output.shape)} on {output.device}"
        )
    return CheckedCall(Call(operation, text, compared), shape, out_dtype)


def check_rank(caller: Caller, rank: object, operation: str, name: str, peer: bool = False) -> None:
    """Refuse what is not a rank of the communicator, and with `peer` the calling rank itself."""
    if not isinstance(rank, int) or not 0 <= rank < caller.world:
        raise ConfigError(
            f"rank {caller.rank}: {operation} got {name}={rank}; write a rank from 0 to {caller.world - 1}"
        )
    if peer and rank == caller.rank:
        raise ConfigError(f"rank {caller.rank}: {operation} got {name}={rank}, which is this rank itself")


def _out_shape(caller: Caller, operation: str, input: Tensor, detail: Detail) -> torch.Size:
    world = caller.world
    if operation == "reduce" and isinstance(detail, tuple) and caller.rank != detail[0]:
        return torch.Size((0,))
    if operation in ("all_gather", "publish"):
        return torch.Size((world * (input.shape[0] if input.dim() else 1), *input.shape[1:]))
    if operation not in ("reduce_scatter", "all_to_all"):
        return input.shape
    if input.dim() == 0 or input.shape[0] % world:
        raise ConfigError(
            f"rank {caller.rank}: {operation} cuts the first dimension into {world} equal parts, "
            f"which shape {tuple(input.shape)} does not allow; pad it to a multiple of {world}"
        )
    return input.shape if operation == "all_to_all" else torch.Size((input.shape[0] // world, *input.shape[1:]))


def _out_dtype(input: Tensor, output: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    if output is None:
        return dtype or input.dtype
    if dtype is not None and dtype != output.dtype:
        raise ConfigError(f"output has dtype {output.dtype} but dtype={dtype} was asked for; give one of the two")
    return output.dtype


def check_kinds(rank: int, operation: str, input: object, output: object) -> None:
    """Refuse what is not a tensor; the output may be missing."""
    for thing in (input, *(() if output is None else (output,))):
        if not isinstance(thing, Tensor):
            raise ConfigError(f"rank {rank}: {operation} takes tensors, got {thing!r}")


def check_tensor(rank: int, operation: str, tensor: Tensor, dry: bool) -> None:
    """Refuse a tensor whose elements cannot be moved. In a `dry` run none are."""
    if tensor.layout is not torch.strided:
        what, fix = f"a sparse tensor ({tensor.layout})", "write x.to_dense()"
    elif tensor.is_meta and not dry:
        what, fix = "a tensor on the meta device, which has no values", "put it on a device that has memory"
    elif tensor.is_quantized:
        what, fix = f"a quantised tensor ({tensor.dtype})", "send x.int_repr(), and its scale separately"
    elif not _can_copy(tensor.dtype):
        what, fix = f"a tensor of {tensor.dtype}, which torch itself cannot copy", "write x.view(torch.uint8)"
    else:
        return
    raise Unsupported(f"rank {rank}: {operation} got {what}; {fix}")


def refuse_expanded(call: str, output: Tensor) -> None:
    """Refuse an output that torch could not copy the result into."""
    if is_expanded(output):
        raise ConfigError(
            f"the result of {call} cannot be written into an expanded tensor, whose elements share memory; write "
            f"x.contiguous()"
        )


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor share memory."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@cache
def _can_copy(dtype: torch.dtype) -> bool:
    """Some dtypes are little more than a name."""
    try:
        zeros = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        torch.empty_like(zeros).copy_(zeros)
    except (RuntimeError, TypeError):
        return False
    return True
