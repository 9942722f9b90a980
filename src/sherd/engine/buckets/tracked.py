"""One parameter as the engine tracks it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sherd.layout.entry import Dtypes, Entry, dtype_name, memory_order
from sherd.layout.slicing import Segment

if TYPE_CHECKING:
    from sherd.engine.buckets.bucket import Bucket


class Mode(enum.Enum):
    """Whether a parameter is trained. Once trained, it stays so, whatever `requires_grad` says later."""

    FROZEN = "frozen"
    TRAINED = "trained"


class TrackedParameter:
    """One parameter: what it is, where it is stored, and the state of its gradient."""

    bucket: Bucket
    position: int
    """Its index among the members of its bucket."""
    offset: int
    """Where it begins in its bucket."""
    home: Tensor
    """Its memory in the store as this rank sees it: its `parameter.data`."""
    original: Tensor
    """Its memory in the store where updates are made."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        ranks: tuple[int, ...] | None = None,
        dtypes: Dtypes | None = None,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.ranks = ranks
        """The ranks that hold it, if not all do."""
        dtypes = dtypes or Dtypes.all(dtype_name(parameter))
        self.entry = Entry(name, tuple(parameter.shape), dtypes.parameter, order=memory_order(parameter), dtypes=dtypes)
        self.mode = Mode.FROZEN
        self.used = False
        """Whether it has a gradient on any rank."""
        self.used_here = False
        """Whether autograd computed its gradient on this rank since the ranks last agreed on what was used."""
        self.arrived = False
        """Whether it did so in the current round."""
        self.contribution: Tensor | None = None
        """The gradient that autograd computed in this round, as it is, until its bucket is launched or it is added to
        what came before."""
        self.held: Tensor | None = None
        """The sum of what came before, times its factors, if it is not added up in `local`."""
        self.late: Tensor | None = None
        """The gradient that arrived after its bucket was launched."""
        self.local: Tensor | None = None
        """Its view of this rank's whole gradient, where the exchange keeps one."""
        self.filled = False
        """Whether `local` has a contribution."""
        self.warned = False
        """Whether the user was told that its gradient is sparse."""

    def __repr__(self) -> str:
        return f"{self.name!r} ({self.mode.value})"

    @property
    def flattened(self) -> Tensor:
        """The parameter, flat, in the memory order that all ranks share."""
        return self.entry.flattened(self.parameter.detach())

    def segments(self) -> tuple[Segment, ...]:
        """The part that each owner has."""
        return self.bucket.segments_of(self)

    def own_parts(self) -> Iterator[tuple[Tensor, int]]:
        """What this rank keeps of the sum of its gradient, and where in the parameter that begins."""
        bucket = self.bucket
        for segment in self.segments():
            if segment.owner == bucket.comm.rank:
                yield bucket.slice[segment.offset : segment.offset + segment.numel], segment.region.start

    def shaped_in(self, whole: Tensor) -> Tensor:
        """Its part of a tensor that is as long as its bucket."""
        return self.entry.shaped(whole[self.offset : self.offset + self.entry.numel])

    @property
    def moved_home(self) -> bool:
        """Whether its home is no longer where updates are made: share_memory() moves the memory below a tensor."""
        return self.home.data_ptr() != self.original.data_ptr()

    def settle(self) -> None:
        """Bring home what an optimizer has made of the parameter itself."""
        if not (self.home.is_meta or self.parameter.is_set_to(self.home)):
            self.home.copy_(self.parameter.detach())
            self.parameter.data = self.home
        if self.moved_home:
            self.original.copy_(self.home)

    def forget(self) -> None:
        """Drop the gradient."""
        self.used = self.used_here = self.filled = False
        self.contribution = self.held = self.late = None
