"""What a collective does with the parts that arrive.

A `Take` is called with each part of a stream, a `Finish` with the parts of a small call; a `Room` says where a part may
be read to directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm.host.transfer.streams import Room, Take
from sherd.comm.summation import combine
from sherd.layout.tree import SummationTree


def reducing(tree: SummationTree, target: Tensor, op: str) -> Take:
    """Reduce the parts of all ranks into `target`."""

    def take(start: int, stop: int, parts: list[Tensor]) -> None:
        whole = start == 0 and stop == target.numel()
        combine(tree, parts, target if whole else target[start:stop], op)

    return take


def spreading(target: Tensor, cut: int) -> Take:
    """Put the part of rank r at r * cut, unless it is there already."""

    def take(start: int, stop: int, parts: list[Tensor]) -> None:
        for rank, part in enumerate(parts):
            place = target[rank * cut + start : rank * cut + stop]
            numel = place.numel()  # the last ranks' slices of an uneven cut are shorter
            if numel and place.data_ptr() != part.data_ptr():
                place.copy_(part[:numel])

    return take


def ignoring(start: int, stop: int, parts: list[Tensor]) -> None:
    pass


def room_in(source: Tensor, target: Tensor, cut: int) -> Room | None:
    """The part of rank r may be read straight to r * cut, unless it has to be converted."""
    if source.dtype != target.dtype:
        return None
    return lambda rank, start, stop: target[rank * cut + start : rank * cut + stop]


def concatenate(parts: list[Tensor], target: Tensor) -> None:
    torch.cat(parts, out=target)


def copy_first(parts: list[Tensor], target: Tensor) -> None:
    target.copy_(parts[0])


def keep_target(parts: Sequence[Tensor], target: Tensor) -> None:
    pass
