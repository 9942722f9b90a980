"""Small calls, where time is spent in Python and not on bytes.

A contribution that fits a chunk of the small ring needs no stream: one copy in, one flag, one look at each peer's
header and one operation of torch on views that are kept from the first time. What is written to the board and the
chunks is the same as in a stream, so each rank may take either path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm.calls import Call, Site
from sherd.comm.host.board import HEADER_WORDS, HEADERS
from sherd.comm.host.memory import STAGED
from sherd.comm.host.operation import Headers, Operation
from sherd.comm.host.scheduler import Scheduler
from sherd.comm.host.transfer.staging import Staging, is_small

Finish = Callable[[list[Tensor], Tensor], None]
"""finish(parts, target): make the result from the contributions."""


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """What stays the same each time a small call is made. Views are listed by staging chunk."""

    call: Call
    mine: Sequence[Tensor] | None  # where this rank's contribution goes
    views: Sequence[Sequence[Tensor] | None]  # by rank: what this rank reads, None where a rank contributes nothing
    finish: Finish
    chunks: int  # 1, or 0 if there is nothing to read


class SmallCalls:
    """Issues small calls and completes them."""

    def __init__(self, headers: Headers, staging: Staging) -> None:
        self._headers = headers
        self._board = headers.board
        self._staging = staging

    def plan(
        self, call: Call, numel: int, dtype: torch.dtype, cut: int, contributors: Sequence[int], finish: Finish
    ) -> SmallPlan | None:
        """A plan for contributions of `numel` elements of which each rank reads `cut`, if they are small."""
        if not is_small(numel * dtype.itemsize):
            return None
        rank, world = self._board.rank, self._board.world
        offset = rank * cut * dtype.itemsize if cut < numel else 0
        reads = contributors if numel else ()
        views = [self._staging.views(r, offset, cut, dtype) if r in reads else None for r in range(world)]
        mine = self._staging.views(rank, 0, numel, dtype) if rank in reads else None
        return SmallPlan(call, mine, views, finish, 1 if reads else 0)

    def start(
        self, scheduler: Scheduler, number: int, plan: SmallPlan, site: Site, source: Tensor, target: Tensor
    ) -> Operation | None:
        """Issue a small call; None if there is no room right now: a stream waits for it."""
        staging = self._staging
        if staging.free_after() or not self._headers.is_free(number):
            return None
        o = SmallOperation(scheduler, number, plan, target, self)
        chunk = 0
        if plan.mine is not None:
            chunk = staging.take(o.base + 1)
            plan.mine[chunk % staging.chunks].copy_(source)
        self._board.write_header(number, plan.call, site, STAGED, chunk)
        self._board.raise_flag(self._headers.my_posted, o.base + plan.chunks)
        o.need = (self._headers.posted_by_peers, o.base + plan.chunks)
        return o

    def finish(self, o: SmallOperation) -> None:
        """The step that is left when every rank has posted."""
        board, plan = self._board, o.plan
        words, chunks, within = board.words, self._staging.chunks, o.number % HEADERS * HEADER_WORDS
        parts = []
        for r, start_of_headers in enumerate(board.headers):
            header = start_of_headers + within
            if self._headers.check and words[header] != plan.call.fingerprint:
                raise self._headers.diverged(o, r)
            views = plan.views[r]
            if views is not None:
                parts.append(views[words[header + 4] % chunks])
        if parts:
            plan.finish(parts, o.target)
        board.raise_flag(self._headers.my_done, o.base + plan.chunks)
        o.finished = True


class SmallOperation(Operation):
    """A small call under way: its contribution is posted, one step is left."""

    __slots__ = ("_calls", "plan", "target")

    def __init__(self, scheduler: Scheduler, number: int, plan: SmallPlan, target: Tensor, calls: SmallCalls) -> None:
        super().__init__(scheduler, number, plan.call)
        self.plan = plan
        self.target = target
        self.posted = self.staged_all = True
        self._calls = calls

    def step(self) -> None:
        self._calls.finish(self)
