"""Gradient sums and their norms, which must not fall out of step with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from sherd.comm import Communicator
from sherd.engine.gradients.gradients import RingGradients
from sherd.engine.gradients.norms import BlockNorms
from sherd.layout.shard_layout import ShardLayout


class Measured:
    """Keeps the norms of `gradients`, which are made by `make`; that is told what to call with each new sum."""

    def __init__(self, layout: ShardLayout, make: Callable[[Callable[[int], None]], RingGradients]) -> None:
        self._norms = BlockNorms(layout)
        self._stale: dict[int, float] = {}  # buckets that were scaled since their norms were taken: by how much
        self._clipped = 1.0  # how much of the gradient clipping has left
        self.edited: set[int] = set()
        """Buckets that were changed through `p.grad` and not measured since."""
        self.gradients = make(self.measure)

    def grow(self, layout: ShardLayout) -> None:
        """Take the buckets that `layout` has more."""
        self._norms = self._norms.grown(layout)
        self.gradients.grow(layout)

    def measure(self, bucket: int) -> None:
        """Take the norms of a bucket."""
        self._norms.measure(bucket, self.gradients.slices[bucket])
        self._stale.pop(bucket, None)
        self.edited.discard(bucket)

    def finite(self) -> bool:
        """Whether what this rank measured is finite."""
        return self._norms.finite()

    def norm(self, comm: Communicator, suspects: Iterable[int]) -> float:
        """The 2-norm of the whole gradient; `suspects` may have changed unnoticed. Collective."""
        for bucket in sorted({*self._stale, *suspects}):
            self.measure(bucket)
        return self._norms.total(comm)

    def own_squared(self) -> float:
        """This rank's share of the squared 2-norm that the gradient would have had without clipping."""
        return self._norms.squared(self._unclipped())

    def own_squares(self) -> list[Tensor]:
        """The same, block by block of this rank's slice of each bucket."""
        return self._norms.squares(self._unclipped())

    def _unclipped(self) -> dict[int, float]:
        """What the norms that were taken have to be multiplied with, by bucket; all others are right."""
        if self._clipped == 1.0:
            return self._stale
        left = self._clipped or 1.0  # nothing, of an infinite one
        return {bucket: self._stale.get(bucket, 1.0) / left for bucket in range(len(self.gradients.summed))}

    def scale(self, factor: float) -> None:
        """Multiply every sum."""
        for bucket, summed in enumerate(self.gradients.summed):
            if summed:
                self.gradients.sums[bucket].mul_(factor)
                self._stale[bucket] = self._stale.get(bucket, 1.0) * factor

    def clip(self, factor: float) -> None:
        """The same, because the norm was too large."""
        self.scale(factor)
        self._clipped *= factor

    def keep_clipped(self) -> None:
        """More is about to be added to the gradient as it is: what was clipped off is gone."""
        self._clipped = 1.0

    def zero(self) -> None:
        """Make every sum zero."""
        for bucket, summed in enumerate(self.gradients.summed):
            if summed:
                self.gradients.sums[bucket].zero_()  # zero times NaN is NaN

    def forget_norms(self) -> None:
        """There is nothing to measure any more."""
        self._norms.forget()
        self._clipped = 1.0
        self._stale.clear()
        self.edited.clear()
