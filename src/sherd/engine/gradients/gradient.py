"""The gradient of a whole model: its accumulation window, the weights of its contributions, and its norm."""

from __future__ import annotations

import enum

from torch import Tensor

from sherd.comm import Communicator
from sherd.data import batch_weight
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.norms import squares
from sherd.errors import ConfigError


class Filling(enum.Enum):
    """The state of a window's gradient."""

    BETWEEN = "between two gradients"
    FILLING = "being filled"
    """more backwards follow, so the gradient is not visible yet"""
    WHOLE = "whole"


class Window:
    """`length` calls of `step()`, of which only the last is real."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.state = Filling.BETWEEN
        self._position = 0
        self.holding = False
        """Whether the user said that a backward is not the last of its step."""

    def backward(self) -> None:
        """A backward begins."""
        self.state = Filling.WHOLE if self.last else Filling.FILLING

    @property
    def whole(self) -> bool:
        """Whether the gradient is visible: inside a window it is not whole yet."""
        return self.state is not Filling.FILLING

    @property
    def open(self) -> bool:
        """Whether the last `step()` was not real: the next backward belongs to the same gradient."""
        return self._position > 0

    @property
    def last(self) -> bool:
        """Whether the next `step()` is the real one."""
        return self._position == self.length - 1

    def advance(self) -> bool:
        """Count a `step()`; return whether it is the real one."""
        self._position = (self._position + 1) % self.length
        self.state = Filling.FILLING if self.open else Filling.BETWEEN
        return not self.open

    def restart(self) -> None:
        """Start over."""
        self._position, self.state = 0, Filling.BETWEEN


class LossWeights:
    """The weights of this rank's contributions, and their sum over all ranks.

    Without weights every contribution counts the same (`loss_reduction="mean"`) or is added as it is (`"sum"`). With
    weights a contribution is multiplied by its weight, and the sum is divided by the sum of the weights before use.
    """

    def __init__(self, loss_reduction: str, length: int) -> None:
        self._mean = loss_reduction == "mean"
        self._length = length
        self._next: float | None = None
        self.forget()

    def forget(self) -> None:
        """A new gradient begins."""
        self.weighed: bool | None = None
        self.local = 0.0
        self.total = 0.0
        self.own = 0.0
        """The sum of the weights of this rank's contributions."""
        self.divided = False
        self._entered: float | None = None

    def set(self, weight: float) -> None:
        """Set the weight of the next backward."""
        if not weight >= 0 or weight == float("inf"):
            raise ConfigError(f"sherd.weigh got {weight!r}; a weight is a finite number, such as a count of tokens")
        self._next = float(weight)

    @property
    def pending(self) -> float | None:
        """The weight of the next backward, if it was set."""
        return self._next

    @pending.setter
    def pending(self, weight: float | None) -> None:
        self._next = weight

    def enter(self) -> float:
        """A backward begins; return the factor for its contributions."""
        weight, self._next = self._next, None
        if self.weighed not in (None, weight is not None):
            raise ConfigError(
                "some backwards of one step were weighed and others not; call sherd.weigh(model, n) before each of them"
            )
        self.weighed = weight is not None
        self._entered = weight
        counts = self.current
        if self.weighed:
            self.local += counts
            self.own += counts
            return counts
        return counts / self._length if self._mean else counts

    @property
    def current(self) -> float:
        """The weight of this rank's current backward relative to the other ranks', whether or not it has entered yet.

        It includes the loader's share of the batch. Sums and weights already reflect the size of a batch, but not that
        it is only a repeated one, which counts as zero.
        """
        weight = self._entered if self._next is None else self._next
        part = batch_weight.current()
        if weight is None and self._mean:
            return part
        return (1.0 if weight is None else weight) if part else 0.0

    @property
    def op(self) -> str:
        """The operation that reduces the ranks' contributions."""
        return "mean" if self._mean and not self.weighed else "sum"

    def agreed(self, weight: float, weighing: float, world: int) -> None:
        """Add the sum of all ranks' weights; `weighing` is the number of ranks that set one."""
        self._check(weighing, world)
        self.total += weight
        self.local = 0.0

    @staticmethod
    def _check(weighing: float, world: int) -> None:
        if weighing not in (0, world):
            raise ConfigError(
                f"{weighing:g} of {world} ranks weighed this backward; call sherd.weigh(model, n) on every rank"
            )

    @property
    def of_loss(self) -> tuple[float, bool]:
        """How much this rank's loss counts, with or without a backward, and whether that is a weight."""
        if self._next is None and self.weighed:
            return self.own, True
        return self.current, self._next is not None

    def loss(self, total: float, weight: float, weighing: float, world: int) -> float:
        """The loss over all ranks: `total` sums their losses times `of_loss`, and `weight` sums their weights."""
        self._check(weighing, world)
        if weighing and not weight:
            raise ConfigError("every weight of this step was 0, so its loss has no mean; skip the step")
        if weighing:
            return total / weight
        return total / world if self._mean else total

    def divisor(self) -> float:
        """The divisor of the sum, to be applied once."""
        if not self.weighed or self.divided or self.total == 0:
            return 1.0
        self.divided = True
        return self.total

    def undivide(self) -> float:
        """The factor that undoes the division, so that more can be added."""
        divided, self.divided = self.divided, False
        return self.total if divided else 1.0

    @property
    def pointless(self) -> bool:
        """Whether the weights sum to zero, so that the gradient has no mean."""
        return bool(self.weighed) and self.total == 0


class Gradient:
    """The sums of all buckets together. `buckets` is passed each time, since it is replaced when more is trained."""

    def __init__(self, weights: LossWeights) -> None:
        self.weights = weights
        self.finite = True
        """Whether it is finite on every rank."""
        self.backwards = 0
        """The number of backwards in it."""
        self._left = 1.0  # the fraction that clipping left

    def restart(self, buckets: BucketList) -> None:
        """Start over: the next backward is the first."""
        self.weights.forget()
        self.backwards = 0
        self._left = 1.0
        buckets.table.norms.zero_()
        for bucket in buckets.buckets:
            bucket.scaled, bucket.edited = 1.0, False

    def scale(self, buckets: BucketList, factor: float) -> None:
        """Multiply every sum."""
        for bucket in buckets.buckets:
            if bucket.summed:
                bucket.scale(factor)

    def divide(self, buckets: BucketList) -> None:
        """Turn a weighted sum into a weighted mean."""
        divisor = self.weights.divisor()
        if divisor != 1.0:
            self.scale(buckets, 1.0 / divisor)

    def add(self, buckets: BucketList) -> None:
        """Prepare to add more: a mean becomes a sum again; clipping is not undone."""
        self._left = 1.0
        divided = self.weights.undivide()
        if divided != 1.0:
            self.scale(buckets, divided)

    def clip(self, buckets: BucketList, max_norm: float, comm: Communicator, suspects: set[Bucket]) -> float:
        """Scale it to a 2-norm of at most `max_norm`; return the norm before. `suspects` may have changed undetected.

        Collective. The same bits on every rank, and under every strategy with the same `AccumulateAt`.
        """
        for bucket in buckets.buckets:
            if bucket.scaled != 1.0 or bucket in suspects:
                bucket.measure()
        norm = buckets.table.total(comm)
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            self.scale(buckets, factor)
            self._left *= factor
        return norm

    def own_squares(self, buckets: BucketList) -> list[Tensor]:
        """The squared norms of this rank's blocks before clipping, bucket by bucket."""
        return [squares(bucket, self._left or 1.0) for bucket in buckets.buckets]  # an infinite norm is clipped to 0

    def own_squared(self, buckets: BucketList) -> float:
        """Their sum: this rank's share of the squared 2-norm."""
        if self._left == 1.0 and all(bucket.scaled == 1.0 for bucket in buckets.buckets):
            return float(buckets.table.norms.dot(buckets.table.norms))
        return sum(float(each.sum()) for each in self.own_squares(buckets))
