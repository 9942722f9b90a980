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
from sherd.comm.host.board import CHUNK_BITS, HEADER_WORDS, HEADERS
from sherd.comm.host.memory import STAGED
from sherd.comm.host.operation import Completes, Headers, Operation
from sherd.comm.host.transfer.staging import Staging, is_small

Finish = Callable[[list[Tensor], Tensor], object]
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
    """Issues small calls."""

    def __init__(self, headers: Headers, staging: Staging) -> None:
        self.headers = headers
        self.board = headers.board
        self.staging = staging

    def plan(
        self, call: Call, numel: int, dtype: torch.dtype, cut: int, contributors: Sequence[int], finish: Finish
    ) -> SmallPlan | None:
        """A plan for contributions of `numel` elements of which each rank reads `cut`, if they are small."""
        if not is_small(numel * dtype.itemsize):
            return None
        rank, world = self.board.rank, self.board.world
        offset = rank * cut * dtype.itemsize if cut < numel else 0
        reads = contributors if numel else ()
        views = [self.staging.views(r, offset, cut, dtype) if r in reads else None for r in range(world)]
        mine = self.staging.views(rank, 0, numel, dtype) if rank in reads else None
        return SmallPlan(call, mine, views, finish, 1 if reads else 0)

    def start(
        self,
        scheduler: Completes,
        number: int,
        plan: SmallPlan,
        site: Site,
        source: Tensor,
        target: Tensor,
        own: Tensor | None,
    ) -> Operation | None:
        """Issue a small call; None if there is no room right now: a stream waits for it."""
        staging, headers = self.staging, self.headers
        if staging.free_after() or (number > headers.free and not headers.is_free(number)):
            return None
        o = SmallOperation(scheduler, number, plan, target, own, self)
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

    def __init__(
        self,
        scheduler: Completes,
        number: int,
        plan: SmallPlan,
        target: Tensor,
        own: Tensor | None,
        calls: SmallCalls,
    ) -> None:
        # What the base class does, without calling it.
        self._scheduler = scheduler
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
