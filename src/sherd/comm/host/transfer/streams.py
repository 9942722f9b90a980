"""The two movements that every collective of the host transport is made of.

In a *scatter* each rank gives every other rank a different piece; in a *gather* it gives all of them the same one. Both
stream in chunks: a rank stages chunks ahead of its readers and reads the chunks of all its peers in step. The caller's
`take` uses the parts that arrive.

A contribution that already lies in shared memory is *lent*: peers read it where it is, and the operation is complete
when they have. So is one in private memory that the ring of chunks cannot hold, where ranks can read each other's: such
a rank would have to wait for its readers anyway. What is to be summed is staged all the same: it is added straight out
of the chunks, and reading it first took a tenth longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sherd.comm.calls import Call
from sherd.comm.codec import Codec, decoded, encode
from sherd.comm.host.board import HEADERS, progress
from sherd.comm.host.memory import PRIVATE, STAGED, Location, SharedMemory
from sherd.comm.host.operation import Headers, SteppedOperation, Steps
from sherd.comm.host.remote_reader import RemoteReader
from sherd.comm.host.transfer.staging import Geometry, Staging, is_small
from sherd.comm.memo import Memo

Take = Callable[[int, int, list[Tensor]], None]
"""take(start, stop, parts): use elements [start, stop) of what each contributor gave."""
Stage = Callable[[int, int], None]
"""stage(chunk number, index): write the index-th chunk of a contribution."""
Receive = Callable[[int, int, int], None]
"""receive(start, stop, index): use elements [start, stop), which are in every rank's index-th chunk."""
Room = Callable[[int, int, int], Tensor]
"""room(rank, start, stop): where these elements of a rank's contribution may be read to."""


class _Movement(NamedTuple):
    """How the contributions of some ranks move: `numel` elements of each, cut by `g` into chunks of a ring."""

    o: SteppedOperation
    staging: Staging
    g: Geometry
    numel: int
    contributors: Sequence[int]
    dtype: torch.dtype
    codec: Codec | None
    room: Room | None
    first: int = 0
    """chunks that earlier movements of the operation used"""


class Streams:
    """Moves tensors between the ranks of a host. The generators are the steps of operations."""

    def __init__(
        self, headers: Headers, small: Staging, large: Staging, memory: SharedMemory, remote: RemoteReader | None = None
    ) -> None:
        self._headers = headers
        self._board = headers.board
        self._small, self._large = small, large
        self._memory = memory
        self._rank, self._world = headers.board.rank, headers.board.world
        self._remote = remote
        self._geometries = Memo[tuple[Call, int, int, bool], Geometry]()

    @property
    def written(self) -> int:
        """Chunks that this rank has ever staged, but for small contributions."""
        return self._large.written

    def scattered_chunks(self, call: Call, cut: int, itemsize: int) -> int:
        """How many chunks each rank posts in a `scatter` that is not small."""
        return self._geometry(call, cut, self._world - 1, itemsize, None, self._large).chunks

    def gathered_chunks(self, call: Call, numel: int, itemsize: int) -> int:
        """How many chunks each rank posts in a `gather` that is not small."""
        return self._geometry(call, numel, 1, itemsize, None, self._large).chunks

    # ---------------------------------------------------------------- movements

    def scatter(
        self,
        o: SteppedOperation,
        source: Tensor,
        cut: int,
        codec: Codec | None,
        take: Take,
        last: bool = True,
        own: Tensor | None = None,
        room: Room | None = None,
    ) -> Steps:
        """Give rank r elements [r * cut, (r + 1) * cut) of `source`, and take what all ranks gave for this one.

        `last` unless other movements of the same operation follow. `own` replaces this rank's own part of `source`,
        which no other rank reads unless it is staged whole or through a codec.
        """
        rank, world, size = self._rank, self._world, source.element_size()
        # A small contribution is staged whole: one copy costs less than several. Otherwise, without a codec, no rank
        # reads its own piece from a chunk, so that needs no room. All movements of an operation use one ring.
        whole = last and codec is None and is_small(world * cut * size)
        staging = self._small if whole else self._large
        if whole:
            g = Geometry(cut, 1 if cut else 0, cut * size)
        else:
            g = self._geometry(o.call, cut, world if codec else world - 1, size, codec, staging)
        m = _Movement(o, staging, g, cut, range(world), source.dtype, codec, room)
        mine = min(cut, max(source.numel() - rank * cut, 0))

        def stage(chunk: int, index: int) -> None:
            if whole:
                self._write(m, chunk, 0, source)
                return
            for r in range(world):
                start = r * cut + index * g.elements
                stop = min(start + g.elements, (r + 1) * cut, source.numel())
                if start < stop and (codec or r != rank):
                    self._write(m, chunk, _piece(r, rank, codec) * g.stride, source[start:stop])

        def part(r: int, start: int, stop: int, index: int) -> Tensor:
            if r == rank and codec is None:
                return source[rank * cut + start : rank * cut + stop] if own is None else own[start:stop]
            offset = (rank if whole else _piece(rank, r, codec)) * g.stride
            return self._read(m, r, start, stop, index, rank * cut, offset)

        def receive(start: int, stop: int, index: int) -> None:
            stop = min(stop, mine)
            if start < stop:
                take(start, stop, [part(r, start, stop, index) for r in range(world)])

        yield from self._move(m, source, stage, receive, last)
        o.used = g.chunks

    def gather(
        self,
        o: SteppedOperation,
        source: Tensor,
        cut: int,
        contributors: Sequence[int],
        codec: Codec | None,
        take: Take,
        room: Room | None = None,
        first: int = 0,
    ) -> Steps:
        """Give every rank `source`, at most `cut` elements, and take what each of `contributors` gave.

        `first` is the number of chunks that earlier movements of the operation used.
        """
        rank, size = self._rank, source.element_size()
        staging = self._small if not first and codec is None and is_small(cut * size) else self._large
        g = self._geometry(o.call, cut, 1, size, codec, staging)
        m = _Movement(o, staging, g, cut, contributors, source.dtype, codec, room, first)

        def stage(chunk: int, index: int) -> None:
            piece = source[index * g.elements : (index + 1) * g.elements]
            if piece.numel():
                self._write(m, chunk, 0, piece)

        def part(r: int, start: int, stop: int, index: int) -> Tensor:
            return source[start:stop] if r == rank and codec is None else self._read(m, r, start, stop, index)

        def receive(start: int, stop: int, index: int) -> None:
            take(start, stop, [part(r, start, stop, index) for r in contributors])

        yield from self._move(m, source, stage, receive)

    def scatter_gather(
        self, o: SteppedOperation, source: Tensor, mine: Tensor, cut: int, codec: Codec | None, take: Take, spread: Take
    ) -> Steps:
        """A scatter whose `take` fills `mine`, then a gather of every rank's `mine`, used by `spread`."""
        yield from self.scatter(o, source, cut, codec, take, last=False)
        yield from self.gather(o, mine, cut, range(self._world), codec, spread, first=o.used)

    def publish(self, o: SteppedOperation, source: Tensor, place: Tensor) -> Steps:
        """Write `source` into its `place` in a tensor that all ranks share, once none of them reads the old values."""
        yield from self._announce(o, STAGED, self._small)
        yield from self._meet(o)
        if source.data_ptr() != place.data_ptr():
            place.copy_(source)
        self._board.raise_flag(self._headers.my_done, o.base + 1)
        yield self._headers.done_by_peers, o.base + 1

    # ---------------------------------------------------------------- their parts

    def _move(self, m: _Movement, source: Tensor, stage: Stage, receive: Receive, last: bool = True) -> Steps:
        """Announce a movement, stream it, and wait for the readers of what this rank lends."""
        gives = self._rank in m.contributors
        lent = self._lend(m, source) if gives else STAGED
        yield from self._announce(m.o, lent, m.staging)
        yield from self._stream(m, stage if gives and lent[0] < 0 else None, receive, last)
        if lent[0] >= 0:
            m.o.passed = last
            yield self._headers.done_by_peers, m.o.base + m.g.chunks

    def _lend(self, m: _Movement, source: Tensor) -> Location:
        """Where peers can read `source` in place, possibly in this rank's own memory.

        A small one is staged all the same: a copy costs less than waiting for readers, and an all-reduce in place may
        overwrite a small contribution while others read it.
        """
        if m.codec is not None or m.first or is_small(source.numel() * source.element_size()):
            return STAGED
        place = self._memory.find(source)
        if place[0] < 0 and self._remote is not None and m.room is not None and m.g.chunks > m.staging.chunks:
            return PRIVATE, source.data_ptr()
        return place

    def _announce(self, o: SteppedOperation, lent: Location, staging: Staging) -> Steps:
        """Write the header of an operation; its first contribution follows."""
        if o.posted:
            return  # by an earlier movement, or it was lent before it became a stream: others may be reading its header
        if not self._headers.is_free(o.number):
            yield self._headers.done_by_all, progress(o.number - HEADERS + 1)
        self._board.write_header(o.number, o.call, o.site, lent, staging.written)

    def _stream(self, m: _Movement, stage: Stage | None, receive: Receive, last: bool) -> Steps:
        """Stage chunks ahead of the readers, and receive every rank's in step. Without `stage`, this rank contributes
        nothing, or lends its contribution."""
        o, staging, g, headers = m.o, m.staging, m.g, self._headers
        base, count = o.base + m.first, g.chunks
        if count == 0:
            o.staged_all = last
            yield from self._meet(o, m.first)
            return
        staged = 0
        if stage is None:
            staged = count
            o.staged_all = last
            self._post(o, base + count)
        for index in range(count):
            while stage and staged < min(count, index + staging.chunks):
                needed = staging.free_after()
                if needed and staged > index:
                    break  # read what has arrived before waiting for a chunk
                if needed:
                    yield headers.done_by_peers, needed
                stage(staging.take(base + staged + 1), staged)
                staged += 1
                self._post(o, base + staged)
                o.staged_all = last and staged == count
            yield headers.posted_by_peers, base + index + 1
            if o.locations is None:
                o.locations = headers.compare(o)
                if count > 1 and all(o.locations[r][0] >= 0 for r in m.contributors):
                    receive(0, m.numel, 0)
                    break
            receive(index * g.elements, min((index + 1) * g.elements, m.numel), index)
            if index + 1 < count:
                self._board.raise_flag(headers.my_done, base + index + 1)
        self._board.raise_flag(headers.my_done, base + count)

    def _meet(self, o: SteppedOperation, first: int = 0) -> Steps:
        """Wait until every rank is here, with the same call."""
        self._post(o, o.base + first)
        yield self._headers.posted_by_peers, o.base + first
        if o.locations is None:
            o.locations = self._headers.compare(o)
        self._board.raise_flag(self._headers.my_done, o.base + first)

    def _post(self, o: SteppedOperation, reached: int) -> None:
        # What was lent before it became a stream is posted already, and so may be what came after it.
        if self._board.words[self._headers.my_posted] < reached:
            self._board.raise_flag(self._headers.my_posted, reached)
        o.posted = True

    def _write(self, m: _Movement, chunk: int, offset: int, piece: Tensor) -> None:
        if m.codec is None:
            m.staging.view(self._rank, chunk, offset, piece.numel(), piece.dtype).copy_(piece)
        else:
            wire = m.staging.view(self._rank, chunk, offset, m.codec.wire_bytes(piece.numel()), torch.uint8)
            encode(m.codec, piece, wire)

    def _read(
        self, m: _Movement, rank: int, start: int, stop: int, index: int, before: int = 0, offset: int = 0
    ) -> Tensor:
        """Elements [start, stop) of what `rank` gave: they begin `before` elements into what it lends, or `offset`
        bytes into the index-th chunk that it staged."""
        assert m.o.locations is not None
        block, where, chunk = m.o.locations[rank]
        if block >= 0 and m.first == 0:
            where += (before + start) * m.dtype.itemsize
            if block != PRIVATE:
                return self._memory.view((block, where), stop - start, m.dtype)
            assert self._remote is not None and m.room is not None
            return self._remote.read(rank, where, m.room(rank, start, stop))
        if block < 0:
            chunk += m.first
        if m.codec is None:
            return m.staging.view(rank, chunk + index, offset, stop - start, m.dtype)
        wire = m.staging.view(rank, chunk + index, offset, m.codec.wire_bytes(stop - start), torch.uint8)
        return decoded(m.codec, wire, stop - start, m.dtype)

    def _geometry(
        self, call: Call, numel: int, pieces: int, itemsize: int, codec: Codec | None, staging: Staging
    ) -> Geometry:
        key = (call, pieces, itemsize, staging is self._small)
        geometry = self._geometries.get(key)
        if geometry is None:
            geometry = Geometry.fit(numel, pieces, staging.chunk_bytes, itemsize, codec)
            self._geometries[key] = geometry
        return geometry


def _piece(owner: int, writer: int, codec: Codec | None) -> int:
    """Where the piece for `owner` lies in a chunk of `writer`: without a codec, its own piece is left out."""
    return owner if codec or owner < writer else owner - 1
