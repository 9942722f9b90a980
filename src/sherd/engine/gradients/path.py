"""The way of a gradient from autograd to the update, of which there are two: summed over the ranks, or left alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.gradient import Gradient
from sherd.errors import ConfigError


class GradientPath(ABC):
    """Listens to backwards (see `patches.backward`), and has what they made ready for an update."""

    together: Communicator
    """The ranks that decide together about a gradient."""
    finite: bool
    """Whether the gradient is finite on all of them, as far as that is known."""

    @abstractmethod
    def begin_round(self) -> None:
        """An outermost backward begins, of this model or of another."""

    @abstractmethod
    def end_round(self) -> None:
        """It is over; every gradient hook has been called."""

    @abstractmethod
    def abandon_round(self, error: BaseException) -> None:
        """It failed."""

    @abstractmethod
    def settle(self, wanted: Sequence[Gradient]) -> None:
        """Make the gradient whole: nothing is local any more, nothing under way, and weights are divided out.

        It is `wanted` for a step of these optimizers.
        """

    @abstractmethod
    def measure(self) -> None:
        """Know whether the gradient is finite, and its norms."""

    @abstractmethod
    def clip(self, max_norm: float, by_program: bool) -> float:
        """Scale the gradient of all parameters so that its 2-norm is at most `max_norm`; the norm it had.

        `by_program` it is an edit like any other; else the other optimizers that step from it take it as it is.
        """

    @abstractmethod
    def forget(self, gradient: Gradient, keep_zeros: bool) -> None:
        """Drop a gradient, or set it to zero."""

    @abstractmethod
    def lend(self, buckets: Iterable[Bucket]) -> None:
        """An update is about to read the gradients of these, from `owned_sum`."""

    @abstractmethod
    def take_back(self, buckets: Iterable[Bucket]) -> None:
        """It is over."""

    @abstractmethod
    def follow(self, members: Iterable[TrackedParameter]) -> None:
        """Take the gradients of these parameters from now on."""

    @abstractmethod
    def leave(self) -> None:
        """The other way is taken from now on."""

    @abstractmethod
    def bytes(self) -> dict[str, int]:
        """What this rank allocated for gradients, by kind."""


def refuse_pointless(wanted: Iterable[Gradient]) -> None:
    """Raise if the weights of a gradient sum to zero."""
    if any(gradient.weights.pointless for gradient in wanted):
        raise ConfigError("every weight of this step was 0, so its gradient has no mean; skip the step")
