"""Reductions of contributions that all ranks lend: one flag, one look at each peer's header, one reduction.

As with small calls, what is written to the board is the same as in a stream, so each rank may take either path. A rank
that finds that another does not lend its contribution goes on as a stream.

An all-reduce in place is one exchange where every rank's contribution is lent: a rank reduces its slice of all of them,
and writes the result into all of them. Nobody else touches that slice of any of them meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sherd.comm.calls import Call, Site
from sherd.comm.host.board import CHUNK_BITS, HEADER_WORDS, HEADERS, IN_PLACE
from sherd.comm.host.memory import PRIVATE, SharedMemory
from sherd.comm.host.operation import Completes, Headers, SteppedOperation, Stream
from sherd.comm.host.transfer.staging import is_small
from sherd.comm.host.transfer.streams import Streams
from sherd.comm.summation import Combine


@dataclass(frozen=True, slots=True)
class LentPlan:
    """What stays the same each time a reduction is made."""

    call: Call
    start: int  # of the slice that this rank reduces, in bytes
    numel: int  # of that slice
    dtype: torch.dtype
    combine: Combine
    chunks: int  # that a stream of it would be cut into
    in_place: bool  # the result goes into every rank's contribution


class LentCalls:
    """Issues these reductions, which may yet become `streams`."""

    def __init__(self, headers: Headers, memory: SharedMemory, streams: Streams) -> None:
        self.headers = headers
        self.board = headers.board
        self.memory = memory
        self._streams = streams

    def plan(self, call: Call, source: Tensor, cut: int, combine: Combine, in_place: bool = False) -> LentPlan | None:
        """A plan for slices of `cut` elements, the last may be shorter; None if they would be staged anyway."""
        numel, size, rank = source.numel(), source.element_size(), self.board.rank
        if is_small(numel * size):
            return None
        mine = min(cut, max(numel - rank * cut, 0))
        chunks = self._streams.scattered_chunks(call, cut, size)
        return LentPlan(call, rank * cut * size, mine, source.dtype, combine, chunks, in_place)

    def start(
        self,
        scheduler: Completes,
        number: int,
        plan: LentPlan,
        site: Site,
        source: Tensor,
        target: Tensor,
        own: Tensor | None,
        stream: Stream,
    ) -> SteppedOperation | None:
        """Issue a reduction, if `source` can be lent right now; else a stream waits for that, or stages it."""
        block, offset = self.memory.find(source)
        if block < 0 or (number > self.headers.free and not self.headers.is_free(number)):
            return None
        if plan.in_place:
            block |= IN_PLACE
        o = LentOperation(scheduler, number, plan, site, target, own, stream, self)
        reached = o.base + plan.chunks
        self.board.write_header(number, plan.call, site, (block, offset), self._streams.written)
        self.board.raise_flag(self.headers.my_posted, reached)
        o.need = (self.headers.posted_by_peers, o.base + 1)  # one that stages its contribution has posted no more
        return o


class LentOperation(SteppedOperation):
    """A reduction under way: its contribution is lent. One step is left, and waiting until the others have read."""

    __slots__ = ("_calls", "_own", "_plan", "_stream", "_target")

    def __init__(
        self,
        scheduler: Completes,
        number: int,
        plan: LentPlan,
        site: Site,
        target: Tensor,
        own: Tensor | None,
        stream: Stream,
        calls: LentCalls,
    ) -> None:
        # What the base classes do, without calling them.
        self._scheduler = scheduler
        self.number = number
        self.base = number << CHUNK_BITS
        self.call = plan.call
        self.site = site
        self.finished = self.passed = False
        self.posted = True
        self.staged_all = not plan.in_place  # which may yet become a stream that stages its slice of the result
        self.locations = None
        self.used = 0
        self._plan = plan
        self._target = target
        self._own = own
        self._stream: Stream | None = stream
        self._calls = calls

    def step(self) -> None:
        if self.passed:
            self.finished = True
        elif self._stream is None:
            super().step()
        else:
            self._reduce()

    def _reduce(self) -> None:
        """Every rank has posted: make the result, or go on as a stream."""
        calls, plan = self._calls, self._plan
        parts = self._parts()
        if parts is None:
            assert self._stream is not None
            self.steps, self._stream = self._stream(self), None
            super().step()
            return
        if not plan.in_place:
            plan.combine(parts, self._target)
        else:
            if plan.numel:
                plan.combine(parts, parts[0])
                for part in parts[1:]:
                    part.copy_(parts[0])
            if not self._target.is_inference():
                increment_version(self._target)  # the others write into it
        reached = self.base + plan.chunks
        calls.board.raise_flag(calls.headers.my_done, reached)
        self.need = (calls.headers.done_by_peers, reached)
        self.passed = True

    def _parts(self) -> list[Tensor] | None:
        """This rank's slice of what each rank lends; None unless all do, and all in place if this rank does."""
        calls, plan, own = self._calls, self._plan, self._own
        board, headers = calls.board, calls.headers
        words, within, rank = board.words, self.number % HEADERS * HEADER_WORDS, board.rank
        check, fingerprint = headers.check, plan.call.fingerprint
        parts: list[Tensor] | None = []
        for r, start in enumerate(board.headers):
            header = start + within
            if check and words[header] != fingerprint:
                raise headers.diverged(self, r)
            block = words[header + 2] - 1
            if plan.in_place:
                block = block ^ IN_PLACE if block & IN_PLACE and block > 0 else -1
            if parts is None or not 0 <= block < PRIVATE:
                parts = None
            elif r == rank and own is not None:
                parts.append(own)
            else:
                parts.append(calls.memory.view((block, words[header + 3] + plan.start), plan.numel, plan.dtype))
        return parts
