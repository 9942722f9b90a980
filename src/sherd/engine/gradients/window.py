"""Accumulation: which `step()` is the real one, and how contributions are weighed."""

from __future__ import annotations

from sherd.data import share
from sherd.errors import ConfigError


class Window:
    """`length` calls of `step()`, of which the last one is real."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._steps = 0
        self._begun = False

    def begin(self) -> None:
        """A backward begins."""
        self._begun = True

    @property
    def complete(self) -> bool:
        """Whether the gradient of a window is whole: its last backward was made, or nothing of the next one."""
        return self.last if self._begun else not self.open

    @property
    def open(self) -> bool:
        """Whether the last `step()` was not a real one: what follows belongs to the same gradient."""
        return self._steps > 0

    @property
    def last(self) -> bool:
        """Whether the next `step()` will be the real one."""
        return self._steps == self.length - 1

    def advance(self) -> bool:
        """Count a `step()`: whether it is the real one."""
        self._steps = (self._steps + 1) % self.length
        self._begun = False
        return self._steps == 0


class Weights:
    """How much this rank's contributions count, and how much everybody's do together.

    Without weights every contribution counts the same (`loss_reduction="mean"`) or is added as it is (`"sum"`). With
    them a contribution is multiplied by its weight, and the sum is divided by the sum of the weights once it is used.
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
        """What this rank's contributions weigh together."""
        self.divided = False
        self._entered: float | None = None

    def set(self, weight: float) -> None:
        """Weigh the next backward."""
        if not weight >= 0 or weight == float("inf"):
            raise ConfigError(f"sherd.weigh got {weight!r}; a weight is a finite number, such as a count of tokens")
        self._next = float(weight)

    @property
    def pending(self) -> float | None:
        """The weight of the next backward, if there is one yet."""
        return self._next

    @pending.setter
    def pending(self, weight: float | None) -> None:
        self._next = weight

    def enter(self) -> float:
        """A backward begins: what its contributions are multiplied with."""
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
        """How much the backward at hand counts on this rank against the others', whether or not it has entered yet.

        The loader's share of the batch is in it. Sums and weights say themselves how much there is in a batch, but not
        that one is only repeated.
        """
        weight = self._entered if self._next is None else self._next
        part = share.current()
        if weight is None and self._mean:
            return part
        return (1.0 if weight is None else weight) if part else 0.0

    @property
    def op(self) -> str:
        """How contributions of the ranks are reduced."""
        return "mean" if self._mean and not self.weighed else "sum"

    def agreed(self, weight: float, weighing: float, world: int) -> None:
        """Take what all ranks weighed together; `weighing` is the number of ranks that did."""
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
        """How much this rank's loss counts, whether or not a backward was made of it, and if that is a weight."""
        if self._next is None and self.weighed:
            return self.own, True
        return self.current, self._next is not None

    def loss(self, total: float, weight: float, weighing: float, world: int) -> float:
        """The loss of all ranks: `total` is the sum of their losses times `of_loss`, `weight` that of their weights."""
        self._check(weighing, world)
        if weighing and not weight:
            raise ConfigError("every weight of this step was 0, so its loss has no mean; skip the step")
        if weighing:
            return total / weight
        return total / world if self._mean else total

    def divisor(self) -> float:
        """What the sum has to be divided by, once."""
        if not self.weighed or self.divided or self.total == 0:
            return 1.0
        self.divided = True
        return self.total

    def undivide(self) -> float:
        """What a divided sum has to be multiplied with, for more to be added to it."""
        divided, self.divided = self.divided, False
        return self.total if divided else 1.0

    @property
    def pointless(self) -> bool:
        """Whether there is a weighed gradient that has no mean."""
        return bool(self.weighed) and self.total == 0
