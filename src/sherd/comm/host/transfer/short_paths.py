"""Short paths through a collective: one flag, one look at each peer's header, one operation of torch.

What is written to the board and the chunks is the same as in a stream, so each rank may take either path.

A *small* contribution fits a chunk of the small ring. There time is spent in Python and not on bytes: one copy in, and
views that are kept from the first time.

A contribution is *lent* where it lies in shared memory. A rank that finds that another does not lend its own goes on as
a stream. An all-reduce in place is one exchange where every rank's contribution is lent: a rank reduces its slice of
all of them, and writes the result into all of them. Nobody else touches that slice of any of them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sherd.comm.calls import Call, Site
from sherd.comm.host.board import CHUNK_BITS, HEADER_WORDS, HEADERS, IN_PLACE
from sherd.comm.host.memory import PRIVATE, STAGED, SharedMemory
from sherd.comm.host.operation import Completes, Headers, Operation, SteppedOperation, Stream
from sherd.comm.host.transfer.staging import Staging, is_small
from sherd.comm.host.transfer.streams import Streams
from sherd.comm.summation import Combine

Finish = Callable[[list[Tensor], Tensor], object]
"""finish(parts, target): make the result from the contributions."""


# ---------------------------------------------------------------- small


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """What stays the same each time a small call is made. Views are listed by staging chunk."""

    call: Call
    mine: Sequence[Tensor] | None  # where this rank's contribution goes
    views: Sequence[Sequence[Tensor] | None]  # by rank: what this rank reads, None where a rank contributes nothing
    finish: Finish
    chunks: int  # 1, or 0 if there is nothing to read


class SmallCalls:
    """Issues small calls."""

    def __init__(self, headers: Headers, staging: Staging, scheduler: Completes) -> None:
        self.headers = headers
        self.board = headers.board
        self.staging = staging
        self.scheduler = scheduler

    def plan(
        self, call: Call, source: Tensor, cut: int, contributors: Sequence[int], finish: Finish
    ) -> SmallPlan | None:
        """A plan for contributions like `source`, of which each rank reads `cut` elements, if they are small."""
        numel, dtype = source.numel(), source.dtype
        if not is_small(numel * dtype.itemsize):
            return None
        rank, world = self.board.rank, self.board.world
        offset = rank * cut * dtype.itemsize if cut < numel else 0
        reads = contributors if numel else ()
        views = [self.staging.views(r, offset, cut, dtype) if r in reads else None for r in range(world)]
        mine = self.staging.views(rank, 0, numel, dtype) if rank in reads else None
        return SmallPlan(call, mine, views, finish, 1 if reads else 0)

    def start(
        self, number: int, plan: SmallPlan, site: Site, source: Tensor, target: Tensor, own: Tensor | None
    ) -> Operation | None:
        """Issue a small call; None if there is no room right now: a stream waits for it."""
        staging, headers = self.staging, self.headers
        if staging.free_after() or (number > headers.free and not headers.is_free(number)):
            return None
        o = SmallOperation(self, number, plan, target, own)
        reached = o.base + plan.chunks
        chunk = 0
        if plan.mine is not None:
            chunk = staging.take(reached)
            plan.mine[chunk % staging.chunks].copy_(source)
        self.board.write_header(number, plan.call, site, STAGED, chunk)
        self.board.raise_flag(headers.my_posted, reached)
        o.need = (headers.posted_by_peers, reached)
        return o


class SmallOperation(Operation):
    """A small call under way: its contribution is posted, one step is left."""

    __slots__ = ("_calls", "_own", "_plan", "_target")

    posted = staged_all = True

    def __init__(self, calls: SmallCalls, number: int, plan: SmallPlan, target: Tensor, own: Tensor | None) -> None:
        # What the base class does, without calling it.
        self._scheduler = calls.scheduler
        self.number = number
        self.base = number << CHUNK_BITS
        self.call = plan.call
        self.finished = False
        self._plan = plan
        self._target = target
        self._own = own
        self._calls = calls

    def step(self) -> None:
        """Every rank has posted: make the result."""
        calls, plan, own = self._calls, self._plan, self._own
        board, headers = calls.board, calls.headers
        words, chunks, within = board.words, calls.staging.chunks, self.number % HEADERS * HEADER_WORDS
        check, fingerprint = headers.check, plan.call.fingerprint
        parts = []
        for r, views in enumerate(plan.views):
            header = board.headers[r] + within
            if check and words[header] != fingerprint:
                raise headers.diverged(self, r)
            if views is not None:
                parts.append(views[words[header + 4] % chunks] if own is None or r != board.rank else own)
        if parts:
            plan.finish(parts, self._target)
        board.raise_flag(headers.my_done, self.base + plan.chunks)
        self.finished = True


# ---------------------------------------------------------------- lent


@dataclass(frozen=True, slots=True)
class LentPlan:
    """What stays the same each time a reduction is made."""

    call: Call
    start: int  # of the slice that this rank reduces, in bytes
    numel: int  # of that slice
    dtype: torch.dtype
    combine: Combine
    chunks: int  # that a stream of it would be cut into
    in_place: bool  # an all-reduce: the result goes into every rank's contribution, if it is to be there


class LentCalls:
    """Issues reductions of contributions that are lent, which may yet become `streams`."""

    def __init__(self, headers: Headers, memory: SharedMemory, streams: Streams, scheduler: Completes) -> None:
        self.headers = headers
        self.board = headers.board
        self.memory = memory
        self.scheduler = scheduler
        self._streams = streams

    def plan(self, call: Call, source: Tensor, cut: int, combine: Combine, in_place: bool = False) -> LentPlan | None:
        """A plan for slices of `cut` elements, the last may be shorter; None if they would be staged anyway."""
        numel, size, rank = source.numel(), source.element_size(), self.board.rank
        if is_small(numel * size):
            return None
        mine = min(cut, max(numel - rank * cut, 0))
        chunks = self._streams.scattered_chunks(call, cut, size)
        return LentPlan(call, rank * cut * size, mine, source.dtype, combine, chunks, in_place)

    def plan_whole(self, call: Call, source: Tensor, numel: int, combine: Combine) -> LentPlan | None:
        """A plan for a rank that reads `numel` elements, which are all or none; None if they would be staged anyway."""
        size = source.element_size()
        if is_small(source.numel() * size):
            return None
        chunks = self._streams.gathered_chunks(call, source.numel(), size)
        return LentPlan(call, 0, numel, source.dtype, combine, chunks, in_place=False)

    def start(
        self,
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
            if target.data_ptr() != source.data_ptr():
                return None
            block |= IN_PLACE
        o = LentOperation(self, number, plan, site, target, own, stream)
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
        calls: LentCalls,
        number: int,
        plan: LentPlan,
        site: Site,
        target: Tensor,
        own: Tensor | None,
        stream: Stream,
    ) -> None:
        # What the base classes do, without calling them.
        self._scheduler = calls.scheduler
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
