"""Small calls, where the time goes into Python and not into bytes.

A contribution that fits a small part of one staging chunk needs no stream: one copy in, one flag, one look at each
peer's header and one operation of torch on views that were made the first time. What goes over the board and through
the chunks is the same as in a stream, so that a rank may take either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sherd.comm.calls import Call
from sherd.comm.host.operation import Operation

if TYPE_CHECKING:
    from sherd.comm.host.scheduler import Scheduler
    from sherd.comm.host.streams import Streams

Finish = Callable[[list[Tensor], Tensor], None]
"""finish(parts, target): make the result of what the contributors gave."""


class SmallPlan:
    """What does not change from one time a small call is made to the next. Views are listed by staging chunk."""

    __slots__ = ("call", "chunks", "finish", "mine", "views")

    def __init__(
        self,
        call: Call,
        mine: Sequence[Tensor] | None,
        views: Sequence[Sequence[Tensor] | None],
        finish: Finish,
    ) -> None:
        self.call = call
        self.mine = mine  # where this rank's contribution goes
        self.views = views  # by rank: what this rank reads, None where a rank contributes nothing
        self.chunks = 1 if any(views) else 0
        self.finish = finish


class SmallOperation(Operation):
    """A small call under way: its contribution is posted, one step is left."""

    __slots__ = ("_streams", "plan", "target")

    def __init__(self, scheduler: Scheduler, number: int, plan: SmallPlan, target: Tensor, streams: Streams) -> None:
        super().__init__(scheduler, number, plan.call)
        self.plan = plan
        self.target = target
        self.posted = self.staged_all = True
        self._streams = streams

    def step(self) -> None:
        self._streams.finish_small(self)
