"""The gradient that an optimizer steps from: its accumulation window, the weights of its contributions, its norms."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.data import batch_weight
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList, assign
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.norms import squares
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.isolation import bypass_torch_function
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
        self.pending: float | None = None
        """The weight of the next backward, if it was set."""
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
        self._counted = False  # whether the ranks have agreed on a contribution

    def enter(self) -> float:
        """A backward begins; return the factor for its contributions."""
        weight, self.pending = self.pending, None
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
        weight = self._entered if self.pending is None else self.pending
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
        self._counted = True

    def withdraw(self) -> None:
        """No rank had a contribution in these backwards: they were about other parameters."""
        self.own -= self.local
        self.local = 0.0
        if not self._counted:
            self.weighed = None

    @staticmethod
    def _check(weighing: float, world: int) -> None:
        if weighing not in (0, world):
            raise ConfigError(
                f"{weighing:g} of {world} ranks weighed this backward; call sherd.weigh(model, n) on every rank"
            )

    @property
    def of_loss(self) -> tuple[float, bool]:
        """How much this rank's loss counts, with or without a backward, and whether that is a weight."""
        if self.pending is None and self.weighed:
            return self.own, True
        return self.current, self.pending is not None

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
    """The gradient of the parameters that one optimizer steps; without an optimizer, of all parameters.

    Optimizers of one model share every backward. Each drops its own gradient, and takes its own steps. `buckets` is
    passed each time, since it is replaced when more is trained.
    """

    def __init__(self, optimizer: Optimizer | None, name: str, loss_reduction: str, accumulate: int) -> None:
        self.optimizer = optimizer
        self.name = name
        """Which of several optimizers, in words; empty if there is only one."""
        self.window = Window(accumulate)
        self.weights = LossWeights(loss_reduction, accumulate)
        self.backwards = 0
        """The number of backwards in it."""
        self.steps = 0
        """How many steps were taken."""
        self.skipped = 0
        self.overflowed = 0
        """How many of these were skipped because of the loss scale."""
        self.elsewhere = False
        """Whether other ranks have used parameters of it that this one does not hold."""
        self._left = 1.0  # the fraction that clipping left

    @property
    def calls(self) -> int:
        """How many real `step()` calls there were, skipped ones included."""
        return self.steps + self.skipped

    @property
    def label(self) -> str:
        """The current step, in words."""
        return f"step {self.steps} of {self.name}" if self.name else f"step {self.steps}"

    def restart(self, buckets: Iterable[Bucket]) -> None:
        """Start over: the next backward is the first."""
        self.weights.forget()
        self.backwards = 0
        self.elsewhere = False
        self._left = 1.0
        for bucket in buckets:
            bucket.norms.zero_()
            bucket.scaled, bucket.edited = 1.0, False

    def divide(self, buckets: Iterable[Bucket]) -> None:
        """Turn a weighted sum into a weighted mean."""
        _scale(buckets, 1.0 / self.weights.divisor())

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Prepare to add more: a mean becomes a sum again; clipping is not undone."""
        self.unclip()
        _scale(buckets, self.weights.undivide())

    def unclip(self) -> None:
        """More is added, which is not clipped."""
        self._left = 1.0

    def clip(self, buckets: Iterable[Bucket], factor: float) -> None:
        """Keep this fraction of it."""
        _scale(buckets, factor)
        self._left *= factor

    def own_squares(self, buckets: Iterable[Bucket]) -> list[Tensor]:
        """The squared norms of this rank's blocks before clipping, bucket by bucket."""
        return [squares(bucket, self._left or 1.0) for bucket in buckets]  # an infinite norm is clipped to 0

    def own_squared(self, buckets: Sequence[Bucket]) -> float:
        """Their sum: this rank's share of the squared 2-norm."""
        if self._left == 1.0 and all(bucket.scaled == 1.0 for bucket in buckets):
            return sum(float(bucket.norms.dot(bucket.norms)) for bucket in buckets)
        return sum(float(each.sum()) for each in self.own_squares(buckets))


class Trained:
    """What is trained together: a model's parameters in their buckets, and one gradient per optimizer."""

    def __init__(
        self,
        inventory: Inventory,
        buckets: BucketList,
        optimizers: Sequence[Optimizer],
        reduction: str,
        accumulate: int,
    ) -> None:
        self.inventory = inventory
        self.optimizers = tuple(optimizers)
        self.accumulate = accumulate
        stepping: Sequence[Optimizer | None] = optimizers or (None,)
        names = [name_of(each, index) for index, each in enumerate(optimizers)] if len(optimizers) > 1 else [""]
        self.gradients = tuple(
            Gradient(each, name, reduction, accumulate) for each, name in zip(stepping, names, strict=True)
        )
        """One per optimizer; one of all parameters, if there is no optimizer."""
        self.buckets = buckets
        self.shards: dict[Optimizer, Any] = {}
        """What steps the parameters of each optimizer, and follows what is trained."""
        self.backwards = 0
        """How many backwards there were."""
        self.samples = 0.0
        """How many samples this rank has trained on; where losses are weighed, the sum of their weights."""
        self.modules_communicate = False
        """Whether modules exchange something of their own during a backward. Where ranks use different parameters,
        buckets would be launched between different ones of these exchanges: they then wait for the end."""
        self.holding = False
        """Whether the user said that a backward is not the last of its step."""

    @property
    def steps(self) -> int:
        """How many steps were taken, by the optimizer that took most."""
        return max(gradient.steps for gradient in self.gradients)

    @property
    def buckets(self) -> BucketList:
        """What is trained. Replaced whole, when more is trained or launched in another order."""
        return self._buckets

    @buckets.setter
    def buckets(self, buckets: BucketList) -> None:
        self._buckets = buckets
        self.parts = [(gradient, buckets.of(gradient.optimizer)) for gradient in self.gradients]
        """Every gradient, with its buckets."""
        self._by_gradient = dict(self.parts)
        self._parameters = {gradient: [m.parameter for b in its for m in b.members] for gradient, its in self.parts}

    def of(self, gradient: Gradient) -> tuple[Bucket, ...]:
        """The buckets of a gradient."""
        return self._by_gradient[gradient]

    def parameters_of(self, gradient: Gradient) -> list[nn.Parameter]:
        """The parameters of a gradient, by bucket. The members of many small buckets are no longer in any cache after
        a backward."""
        return self._parameters[gradient]

    def thawed(self) -> list[TrackedParameter]:
        """Parameters that require a gradient and are not trained yet."""
        frozen = self._buckets.frozen
        if not frozen:
            return []
        with bypass_torch_function():
            found = {member for bucket in frozen for member in bucket.members if member.parameter.requires_grad}
        return [member for member in self.inventory.members if member in found] if found else []

    def train(self, members: Sequence[TrackedParameter], elsewhere: Iterable[str] = ()) -> None:
        """Train these parameters from now on; other ranks train those `elsewhere` too, by name."""
        assign((member.bucket for member in members), self.optimizers)
        self.buckets = self.buckets.unfrozen(members, elsewhere)
        for shard in self.shards.values():
            shard.follow(self.buckets)

    def count_samples(self, weight: float | None) -> None:
        """A step is taken, by a gradient of this weight or, without one, of the current batch; that is 1 if there is no
        loader."""
        samples = batch_weight.samples()
        found = 1.0 if samples is None else float(samples)
        self.samples += found if weight is None else weight

    def weigh(self, weight: float | None) -> None:
        """Set the weight of the next backward, which is the same in every gradient."""
        for gradient in self.gradients:
            gradient.weights.pending = weight


def name_of(optimizer: Optimizer, index: int) -> str:
    """The name of one of several optimizers in messages."""
    return f"optimizer {index} ({type(optimizer).__name__})"


def _scale(buckets: Iterable[Bucket], factor: float) -> None:
    """Multiply every sum."""
    if factor != 1.0:
        for bucket in buckets:
            if bucket.summed:
                bucket.scale(factor)
