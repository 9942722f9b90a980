"""Send and receive: a channel for each ordered pair of ranks.

A channel is a short ring of chunks with a flag at each end: *sent*, written by the sender, and *taken*, written by the
receiver. Messages arrive in the order in which they were sent; each has a header that the receiver compares with what
it expects. A message in shared memory is lent: only its location travels.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sherd.comm.calls import Call, Site
from sherd.comm.handle import Done, Handle
from sherd.comm.host.board import Board, State, progress
from sherd.comm.host.memory import STAGED, Location, SharedBlock, SharedMemory
from sherd.comm.host.operation import Operation, SteppedOperation, Steps
from sherd.comm.host.scheduler import Scheduler
from sherd.comm.memo import Memo
from sherd.comm.waiting import faults
from sherd.errors import Diverged

CHUNKS = 4
CHUNK_BYTES = 1 << 16
_MESSAGES = 8  # headers per channel
_TEXT_BYTES = 480
_HEADER = struct.Struct(f"<4Q{_TEXT_BYTES}s")  # fingerprint, block + 1, offset, first chunk, call and site
_HEADER_WORDS = struct.Struct("<4Q")
_HEADER_BYTES = 512
_CHANNEL_BYTES = _MESSAGES * _HEADER_BYTES + CHUNKS * CHUNK_BYTES


@dataclass
class _End:
    """One rank's end of a channel."""

    offset: int  # of the channel in its block
    sent: int
    taken: int
    queue: deque[Operation]
    messages: int = 0
    written: int = 0
    free_after: list[int] = field(default_factory=lambda: [0] * CHUNKS)

    def header(self, message: int) -> int:
        return self.offset + message % _MESSAGES * _HEADER_BYTES

    def chunk(self, number: int) -> int:
        return self.offset + _MESSAGES * _HEADER_BYTES + number % CHUNKS * CHUNK_BYTES


class Channels:
    """The channels that start or end at one rank."""

    def __init__(self, block: SharedBlock, board: Board, memory: SharedMemory, scheduler: Scheduler) -> None:
        self._block = block
        self._board = board
        self._memory = memory
        self.scheduler = scheduler
        self._views = Memo[tuple[int, int, torch.dtype], Tensor](1024)
        self._texts = Memo[tuple[Call, Site], bytes](1024)
        self._used = False
        me, world = board.rank, board.world
        self._out = [self._end(me, r) for r in range(world)]
        self._in = [self._end(r, me) for r in range(world)]

    @staticmethod
    def nbytes(world: int) -> int:
        return world * world * _CHANNEL_BYTES

    def made(self) -> tuple[int, list[int], list[int]]:
        """The calls of this rank so far: its last collective, and its messages to and from every rank."""
        last = self.scheduler.last_collective()
        return last, [end.messages for end in self._out], [end.messages for end in self._in]

    def send(self, call: Call, site: Site, source: Tensor, to: int) -> Handle:
        if not self._used:
            self._note()
        end = self._out[to]
        if self._fits_now(end, source):
            end.messages += 1
            self._write_header(end, end.messages, call, site, STAGED)
            self._write_chunk(end, source, progress(end.messages, 1))
            return Done(source)
        o = self._operation(call, site, end)
        o.steps = self._send_steps(o, end, source)
        return self.scheduler.issue_message(o, end.queue)

    def recv(self, call: Call, site: Site, target: Tensor, source: int) -> Handle:
        if not self._used:
            self._note()
        end = self._in[source]
        if target.numel() * target.element_size() <= CHUNK_BYTES:
            end.messages += 1
            small = _SmallRecv(self, end, call, site, target, source)
            return self.scheduler.issue_message(small, end.queue)
        o = self._operation(call, site, end)
        o.steps = self._recv_steps(o, end, target, source)
        return self.scheduler.issue_message(o, end.queue)

    def take_small(self, o: _SmallRecv) -> None:
        """Take a message of one chunk, which has arrived."""
        end, target = o.end, o.target
        place, first = self._check_header(o, end, o.source)
        if place[0] >= 0:
            target.copy_(self._memory.view(place, target.numel(), target.dtype))
        else:
            target.copy_(self._view(end.chunk(first), target))
        self._board.raise_flag(end.taken, o.base + 1)

    # ---------------------------------------------------------------- steps of larger messages

    def _send_steps(self, o: SteppedOperation, end: _End, source: Tensor) -> Steps:
        elements, chunks = _cut(source)
        if o.number > _MESSAGES:
            yield (end.taken,), progress(o.number - _MESSAGES + 1)
        lent = self._memory.find(source)
        self._write_header(end, o.number, o.call, o.site, lent)
        if lent[0] >= 0:
            self._board.raise_flag(end.sent, o.base + chunks)
            yield (end.taken,), o.base + chunks
            return
        for index in range(chunks):
            needed = end.free_after[end.written % CHUNKS]
            if self._board.words[end.taken] < needed:
                yield (end.taken,), needed
            self._write_chunk(end, source[index * elements : (index + 1) * elements], o.base + index + 1)

    def _recv_steps(self, o: SteppedOperation, end: _End, target: Tensor, source: int) -> Steps:
        elements, chunks = _cut(target)
        yield (end.sent,), o.base + 1
        place, first = self._check_header(o, end, source)
        if place[0] >= 0:
            target.copy_(self._memory.view(place, target.numel(), target.dtype))
            self._board.raise_flag(end.taken, o.base + chunks)
            return
        for index in range(chunks):
            yield (end.sent,), o.base + index + 1
            piece = target[index * elements : (index + 1) * elements]
            piece.copy_(self._view(end.chunk(first + index), piece))
            self._board.raise_flag(end.taken, o.base + index + 1)

    # ---------------------------------------------------------------- their parts

    def _note(self) -> None:
        self._used = True
        self._board.note_messages()

    def _fits_now(self, end: _End, source: Tensor) -> bool:
        """Whether a message goes out in one chunk without waiting, and without overtaking another."""
        if end.queue or source.numel() * source.element_size() > CHUNK_BYTES:
            return False
        taken = self._board.words[end.taken]
        return taken >= end.free_after[end.written % CHUNKS] and taken >= progress(end.messages + 2 - _MESSAGES)

    def _write_header(self, end: _End, number: int, call: Call, site: Site, lent: Location) -> None:
        text = self._texts.get((call, site))
        if text is None:
            text = self._texts[(call, site)] = call.made_at(site).encode()[: _TEXT_BYTES - 1]
        where = end.header(number)
        _HEADER.pack_into(self._block.memory, where, call.fingerprint, lent[0] + 1, lent[1], end.written, text)

    def _write_chunk(self, end: _End, piece: Tensor, reached: int) -> None:
        self._view(end.chunk(end.written), piece).copy_(piece)
        end.free_after[end.written % CHUNKS] = reached
        end.written += 1
        self._board.raise_flag(end.sent, reached)

    def _check_header(self, o: SteppedOperation | _SmallRecv, end: _End, source: int) -> tuple[Location, int]:
        """Where a message lies: the location it is lent from, and its first chunk."""
        where = end.header(o.number)
        fingerprint, block, offset, first = _HEADER_WORDS.unpack_from(self._block.memory, where)
        if fingerprint != o.call.fingerprint:
            raise self._diverged(o, source, where)
        return (block - 1, offset), first

    def _view(self, offset: int, like: Tensor) -> Tensor:
        key = (offset, like.numel(), like.dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._block.tensor(*key)
        return view

    def _operation(self, call: Call, site: Site, end: _End) -> SteppedOperation:
        end.messages += 1
        return SteppedOperation(self.scheduler, end.messages, call, site)

    def _end(self, source: int, to: int) -> _End:
        board = self._board
        offset = (source * board.world + to) * _CHANNEL_BYTES
        return _End(offset, board.sent(source, to), board.taken(source, to), self.scheduler.new_queue())

    def _diverged(self, o: SteppedOperation | _SmallRecv, source: int, where: int) -> Diverged:
        board, text = self._board, _HEADER.unpack_from(self._block.memory, where)[-1]
        sides = [
            f"{board.names[board.rank]} called {o.call.made_at(o.site)}",
            f"{board.names[source]} called {text.rstrip(bytes(1)).decode(errors='replace')}",
        ]
        error = faults.diverged(o.number, sides, (board.numbers[board.rank], board.numbers[source]))
        return board.reported(error, State.DIVERGED)


class _SmallRecv(Operation):
    """A receive of one chunk: one need, one step."""

    __slots__ = ("_channels", "end", "site", "source", "target")

    def __init__(self, channels: Channels, end: _End, call: Call, site: Site, target: Tensor, source: int) -> None:
        super().__init__(channels.scheduler, end.messages, call)
        self.end = end
        self.site = site
        self.source = source
        self.target = target
        self.need = ((end.sent,), self.base + 1)
        self._channels = channels

    def step(self) -> None:
        self._channels.take_small(self)
        self.finished = True


def _cut(tensor: Tensor) -> tuple[int, int]:
    """Elements per chunk and number of chunks. A message of no elements takes one too: its header must be seen."""
    elements = CHUNK_BYTES // tensor.element_size()
    return elements, max(-(-tensor.numel() // elements), 1)
