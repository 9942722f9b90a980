"""Staging: the chunks through which a rank's private tensors reach its peers.

Each rank has a ring of chunks in a block that all ranks map. A contribution larger than a chunk streams through the
ring, so memory is bounded, and chunks stay in the cache between the rank that writes and the ranks that read. A chunk
may be written again once every rank's done flag has passed what it held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm.codec import Codec
from sherd.comm.host.board import Board
from sherd.comm.host.memory import SharedBlock, round_up
from sherd.comm.memo import Memo
from sherd.errors import ConfigError

ALIGNMENT = 64

# Contributions up to this size go whole through a ring of their own: many may be under way at once, while the ring for
# streams is short. Two alternating chunks stay in the cache from the copy in to the copy out; with eight, an all-gather
# of 100 MB took a third longer.
SMALL_BYTES = 1 << 16
SMALL_CHUNKS = 16


def is_small(nbytes: int) -> bool:
    """Whether contributions of this size take the short path. The same on all ranks."""
    return nbytes <= SMALL_BYTES


@dataclass(frozen=True)
class Geometry:
    """How pieces of `numel` elements are cut into chunks, each of which holds one part of every piece."""

    elements: int  # of each piece per chunk
    chunks: int
    stride: int  # bytes from one piece to the next inside a chunk

    @classmethod
    def fit(cls, numel: int, pieces: int, chunk_bytes: int, itemsize: int, codec: Codec | None) -> Geometry:
        room = chunk_bytes // pieces // ALIGNMENT * ALIGNMENT
        elements = room // itemsize if codec is None else _largest_fit(codec, room)
        if elements == 0:
            raise ConfigError(
                f"a staging chunk of {chunk_bytes} bytes has no room for {pieces} pieces; "
                f"write CommOptions(chunk_bytes={round_up(8192 * pieces, 4096)})"
            )
        elements = min(elements, max(numel, 1))
        used = elements * itemsize if codec is None else codec.wire_bytes(elements)
        return cls(elements, -(-numel // elements), round_up(used, ALIGNMENT))


def _largest_fit(codec: Codec, room: int) -> int:
    """The most elements, in whole blocks of the codec, that fit `room` bytes."""
    low, high = 0, room  # blocks; a codec spends at least one byte per block
    while low < high:
        middle = (low + high + 1) // 2
        if codec.wire_bytes(middle * codec.block) <= room:
            low = middle
        else:
            high = middle - 1
    return low * codec.block


class Staging:
    """This rank's ring of chunks, and views of every rank's."""

    def __init__(self, block: SharedBlock, board: Board, chunk_bytes: int, chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = chunks
        self.written = 0  # chunks this rank has ever written
        self.block = block
        self._words = board.words
        self._done = board.done
        self._free_after = [0] * chunks
        self._drained = 0  # progress that every rank has passed, this one too: small calls read their own chunk
        self._views = Memo[tuple[int, int, torch.dtype], Tensor]()

    @staticmethod
    def nbytes(world: int, chunk_bytes: int, chunks: int) -> int:
        return world * chunk_bytes * chunks

    def free_after(self) -> int:
        """0 if the next chunk may be written now, else the progress that all done flags must reach first."""
        needed = self._free_after[self.written % self.chunks]
        if self._drained < needed:
            self._drained = min(self._words[index] for index in self._done)
            if self._drained < needed:
                return needed
        return 0

    def take(self, progress_when_read: int) -> int:
        """Take the next chunk, which must be free, and return its number."""
        number = self.written
        self._free_after[number % self.chunks] = progress_when_read
        self.written = number + 1
        return number

    def views(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The same part of each chunk of a rank."""
        return [self.view(rank, chunk, offset, numel, dtype) for chunk in range(self.chunks)]

    def view(self, rank: int, chunk: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat view of a part of a rank's chunk."""
        start = (rank * self.chunks + chunk % self.chunks) * self.chunk_bytes + offset
        key = (start, numel, dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.block.tensor(start, numel, dtype)
        return view
