"""Adding contributions in the order of the summation tree. Every transport does, so all give the same bits.

Half-precision contributions are added in fp32 and rounded once at the end of a group: a group's partial sum is what
travels between hosts, and it travels in the dtype of the contributions (its *wire* dtype).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from sherd.comm.codec import Codec
from sherd.errors import ConfigError, Unsupported, nearest
from sherd.layout.entry import HALF_DTYPES
from sherd.layout.tree import SummationTree

# Partial sums of more than two contributions are kept in blocks that stay in a core's own cache: 32 Ki fp32 elements
# are 128 KiB. Whole-tensor passes re-read the running sum from memory once per rank.
SUM_BLOCK = 32 * 1024

# Up to this size every rank reads all contributions whole and adds them itself: one exchange instead of two. It is the
# same for all transports: a codec would otherwise round once on one and twice on another.
_ONE_PHASE_BYTES = 32 * 1024
_CUT_MULTIPLE = 64

BITWISE = ("and", "or", "xor")
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}

Combine = Callable[[Sequence[Tensor], Tensor], object]
"""combine(parts, target): reduce the parts, one per rank, into the target."""


def one_phase(nbytes: int, codec: Codec | None) -> bool:
    """Whether an all-reduce of `nbytes` is one exchange of whole contributions."""
    return codec is None and nbytes <= _ONE_PHASE_BYTES


def cut_for(numel: int, world: int, codec: Codec | None) -> int:
    """Elements per slice of an all-reduce in two phases; the last slices may be shorter, or empty."""
    multiple = math.lcm(_CUT_MULTIPLE, codec.block if codec else 1)
    return -(-numel // (world * multiple)) * multiple


def sum_dtype(wire: torch.dtype) -> torch.dtype:
    """The dtype in which contributions of dtype `wire` are added inside a group."""
    return torch.float32 if wire in HALF_DTYPES else wire


def check_reduction(rank: int, operation: str, name: str, dtype: torch.dtype, out: torch.dtype) -> None:
    """Refuse a reduction that torch cannot compute, before anything is sent."""
    if name not in REDUCTIONS:
        raise ConfigError(f"rank {rank}: unknown reduction {name!r}; {nearest(name, REDUCTIONS)}")
    if _can_combine(name, dtype, out):
        return
    numbers = dtype.is_floating_point or dtype.is_complex
    if name in BITWISE and numbers:
        raise ConfigError(f"rank {rank}: {operation} by {name!r} needs integers or bools, got {dtype}")
    if dtype.is_complex and name in ("max", "min"):
        raise ConfigError(
            f"rank {rank}: {operation} by {name!r} got {dtype}, and complex numbers have no order; reduce "
            f"torch.view_as_real(x), or x.abs()"
        )
    other = "complex64" if dtype.is_complex else "float32" if numbers or name == "mean" else "int64"
    raise Unsupported(
        f"rank {rank}: {operation} by {name!r} of {dtype} is not possible, as torch cannot compute with it; write "
        f"x.to(torch.{other}), and convert the result back"
    )


@cache
def _can_combine(name: str, dtype: torch.dtype, out: torch.dtype) -> bool:
    """Found by trying: versions of torch differ in the kernels they have."""
    zeros = [torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for _ in range(3)]
    room = torch.zeros(2 * out.itemsize, dtype=torch.uint8).view(out)
    try:
        combine(SummationTree(2, 2), zeros[:2], room, name)
        combine(SummationTree(3, 2), zeros, room, name)
    except (RuntimeError, TypeError):
        return False
    return True


def combine(
    tree: SummationTree, parts: Sequence[Tensor], out: Tensor, reduction: str = "sum", count: int | None = None
) -> None:
    """Reduce `parts` (one flat tensor per rank, in rank order) into the flat tensor `out`, by the tree.

    `out` may be one of the parts, and may have another dtype; it is rounded to that dtype once, at the end. A mean
    divides by `count`: more than the number of parts where those are sums themselves.
    """
    count = count or len(parts)
    if len(parts) == 1 and (count == 1 or reduction != "mean"):
        out.copy_(parts[0])
        return
    wire = parts[0].dtype
    if out.dtype == wire == sum_dtype(wire):
        if len(parts) == 2:
            # One group or two: the same single addition, straight into the output.
            REDUCTIONS[reduction](parts[0], parts[1], out=out)
            if reduction == "mean":
                _divide(out, count)
            return
        if len(tree.groups) == 1 and all(out.data_ptr() != part.data_ptr() for part in parts[2:]):
            _combine_directly(parts, out, reduction, count)
            return
    if out.numel() <= SUM_BLOCK:
        out.copy_(_combine_block(tree, parts, reduction, count))
        return
    for place, *pieces in _in_blocks(out, *parts):
        place.copy_(_combine_block(tree, pieces, reduction, count))


def combiner(tree: SummationTree, reduction: str, wire: torch.dtype, out: torch.dtype) -> Combine:
    """`combine` for contributions of dtype `wire` and a result of dtype `out`. To be kept: it spares small calls what
    `combine` finds out each time."""
    if tree.world != 2 or not out == wire == sum_dtype(wire):
        return lambda parts, target: combine(tree, parts, target, reduction)
    add = REDUCTIONS[reduction]
    if reduction != "mean":
        return lambda parts, target: add(parts[0], parts[1], out=target)
    return lambda parts, target: _divide(add(parts[0], parts[1], out=target), 2)


def _combine_directly(parts: Sequence[Tensor], out: Tensor, reduction: str, count: int) -> None:
    """In one group, straight into the output: nothing is rounded on the way and no later part is overwritten."""
    add = REDUCTIONS[reduction]
    for place, first, *others in _in_blocks(out, *parts):
        total = first
        for other in others:
            total = add(total, other, out=place)
        if reduction == "mean":
            _divide(place, count)


def _in_blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, SUM_BLOCK) for tensor in tensors), strict=True)


def _combine_block(tree: SummationTree, parts: Sequence[Tensor], reduction: str, count: int) -> Tensor:
    add = REDUCTIONS[reduction]
    wire, accumulate = parts[0].dtype, sum_dtype(parts[0].dtype)
    total: Tensor | None = None
    for ranks in tree.groups:
        partial = parts[ranks[0]].to(accumulate, copy=True)
        for rank in ranks[1:]:
            add(partial, parts[rank], out=partial)
        if len(tree.groups) > 1 and wire != accumulate:
            partial = partial.to(wire).to(accumulate)
        total = partial if total is None else add(total, partial, out=total)
    assert total is not None
    if reduction == "mean":
        _divide(total, count)
    return total


def _divide(total: Tensor, count: int) -> None:
    if count & (count - 1) == 0 and total.is_floating_point():
        total.mul_(1 / count)  # the same bits for a power of two, and faster
    elif total.is_floating_point() or total.is_complex():
        total.div_(count)
    else:
        total.div_(count, rounding_mode="floor")
