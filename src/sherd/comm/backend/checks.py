"""Checks of what torch passes, before anything is sent: a wrong argument must not break the group.

The communicator checks its own calls. Here are the checks it cannot make: torch's names of reductions, lists of
tensors, and several calls that are made as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from sherd.comm.base import Communicator
from sherd.comm.checked_call import is_expanded
from sherd.comm.summation import BITWISE
from sherd.errors import ConfigError, Unsupported

_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
}


def reduction(comm: Communicator, opts: Any, tensors: Sequence[Tensor]) -> str:
    """The communicator's name for the reduction that torch asks for."""
    op = opts.reduceOp.op
    name = _REDUCTIONS.get(op)
    if name is None:
        fix = "multiply the tensor first and write ReduceOp.SUM" if op == ReduceOp.PREMUL_SUM else "use another one"
        raise Unsupported(f'rank {comm.rank}: the backend "sherd" has no {op}; {fix}')
    for tensor in tensors:
        if name in BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"rank {comm.rank}: {op} needs integers or bools, got {tensor.dtype}")
    return name


def dense(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not dense, or not in CPU memory."""
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.layout is torch.strided):
            what = tensor.device if not tensor.is_cpu else tensor.layout
            raise Unsupported(
                f'rank {comm.rank}: the backend "sherd" moves dense tensors in CPU memory, got {what}; '
                'for others write new_group(backend="gloo") or "nccl"'
            )


def room(comm: Communicator, output: Tensor) -> Tensor:
    """A flat view to write into."""
    dense(comm, [output])
    if not output.is_contiguous():
        raise ConfigError(f"rank {comm.rank}: the output must be contiguous; write output.contiguous()")
    return output if output.dim() == 1 else output.view(-1)


def only(comm: Communicator, operation: str, tensors: Sequence[Tensor]) -> Tensor:
    """The only tensor that this operation takes."""
    if len(tensors) != 1:
        raise ConfigError(f"rank {comm.rank}: {operation} takes one tensor, got {len(tensors)}")
    return tensors[0]


def calls(
    comm: Communicator, operation: str, pairs: Sequence[tuple[Tensor, Tensor | None]], detail: str | int = ""
) -> None:
    """Check calls that are made one after another before the first is made. A single one checks itself."""
    if not pairs:
        raise ConfigError(f"rank {comm.rank}: {operation} got no tensors")
    if len(pairs) > 1:
        for given, taken in pairs:
            comm.check(operation, given, taken, detail)


def paired(comm: Communicator, operation: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Refuse lists of different lengths."""
    if len(outputs) != len(inputs):
        raise ConfigError(
            f"rank {comm.rank}: {operation} needs an output for each input, got {len(outputs)} for {len(inputs)}"
        )


def parts(comm: Communicator, operation: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """A tensor for each rank, of the size and dtype of `like`."""
    dense(comm, tensors)
    sizes = [tensor.numel() for tensor in tensors]
    if sizes != [like.numel()] * comm.world:
        expected = f"{comm.world} tensors of {like.numel()} elements each"
        raise ConfigError(f"rank {comm.rank}: {operation} needs {expected}, got sizes {sizes}")
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise ConfigError(f"rank {comm.rank}: {operation} needs tensors of {like.dtype}, got one of {tensor.dtype}")


def writable(comm: Communicator, operation: str, tensors: Sequence[Tensor]) -> None:
    """Refuse outputs that could not be written once everything is complete."""
    for tensor in tensors:
        if is_expanded(tensor):
            raise ConfigError(
                f"rank {comm.rank}: {operation} cannot write into an expanded tensor; write output.contiguous()"
            )


def split(comm: Communicator, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The parts along the first dimension, of equal size if no sizes are given."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if sizes:
        if len(sizes) != comm.world or sum(sizes) != rows or min(sizes) < 0:
            raise ConfigError(
                f"rank {comm.rank}: all_to_all got split sizes {list(sizes)} for {rows} rows and {comm.world} ranks; "
                f"give one per rank that add up to the rows"
            )
        return torch.split(tensor, list(sizes))
    if rows % comm.world:
        raise ConfigError(
            f"rank {comm.rank}: all_to_all cuts {tuple(tensor.shape)} into {comm.world} equal parts; give the split "
            f"sizes"
        )
    return torch.chunk(tensor, comm.world) if rows else [tensor] * comm.world
