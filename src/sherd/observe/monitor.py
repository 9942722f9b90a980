"""What this process sees of its run while events are on: phases, batches, losses. `current` is None while they are off.

The loader, the backward, the optimizer's step and the user's `sherd.log` tell it; whoever emits a `step` event reads
it. All figures only grow, and a reader keeps what it saw last: so several optimizers can each have steps of their own.

    (loader)  data -> forward;  backward() -> rest;  step(): update -> rest
    without a training loader the time after a step is forward, as nobody can tell where data ends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sherd.observe.phases import BACKWARD, DATA, FORWARD, PHASES, REST, UPDATE, PhaseClock


class Totals(NamedTuple):
    """What has happened so far."""

    spent: tuple[int, ...]
    """nanoseconds by phase"""
    batches: int = 0
    """that training loaders yielded"""
    samples: int = 0
    """in them; one that is only repeated, so that every rank has a batch, counts nothing"""
    told_tokens: int = 0
    tokens: float = 0
    told_losses: float = 0.0
    """the sum of their weights"""
    losses: float = 0.0
    """their weighted sum"""
    backwards: int = 0
    """from scalar roots"""
    roots: float = 0.0
    """their sum"""

    def seconds_since(self, before: Totals) -> dict[str, float]:
        """Seconds by phase."""
        return {name: (now - then) / 1e9 for name, now, then in zip(PHASES, self.spent, before.spent, strict=True)}


class RunMonitor:
    """One run as this process sees it."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.loads = False
        """Whether there is a training loader, which tells where data ends."""
        self.optimizers = 0
        """How many were distributed."""
        self.steps = 0
        """Real steps of the first of them."""
        self.batch: int | None = None
        """Samples of the last batch of a training loader."""
        self._moved = False  # whether a batch came or a backward began since the last step
        self._batches = self._samples = 0
        self._told_tokens, self._tokens = 0, 0.0
        self._told_losses = self._losses = 0.0
        self._backwards, self._roots = 0, 0.0

    def totals(self) -> Totals:
        """What has happened so far."""
        told = self._told_tokens, self._tokens, self._told_losses, self._losses
        return Totals(self.clock.spent(), self._batches, self._samples, *told, self._backwards, self._roots)

    # ---------------------------------------------------------------- what happens

    def begin_batch(self, trains: bool) -> None:
        """A loader was asked for a batch; `trains` says whether it is a training loader."""
        self.clock.enter(DATA if trains else REST)

    def end_batch(self, trains: bool, samples: int | None) -> None:
        """It yielded so many samples; None: it had no more."""
        self.clock.enter(FORWARD if trains and samples is not None else REST)
        if trains and samples is not None:
            self._moved = True
            self._batches += 1
            self._samples += samples
            self.batch = samples

    def begin_backward(self, losses: Sequence[float]) -> None:
        """An outermost backward begins at these, and perhaps at others that are no numbers."""
        self.clock.enter(BACKWARD)
        self._moved = True
        self._backwards += len(losses)
        self._roots += sum(losses)

    def end_backward(self) -> None:
        """It is over, or has failed."""
        self.clock.enter(REST)

    def evaluation(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure of `step()` whose time is not that of the update."""

        def evaluate(*args: Any, **options: Any) -> Any:
            before = self.clock.enter(FORWARD)
            try:
                return closure(*args, **options)
            finally:
                self.clock.enter(before)

        return evaluate

    def begin_step(self) -> None:
        """`step()` was called."""
        self.clock.enter(UPDATE)

    def end_step(self) -> None:
        """It is over. Inside an accumulation window too."""
        self.clock.enter(REST if self.loads else FORWARD)

    def stepped(self, optimizer: int) -> None:
        """It was a real one, of this optimizer."""
        self._moved = False
        if optimizer == 0:
            self.steps += 1

    # ---------------------------------------------------------------- what is told

    def step_of_log(self) -> int:
        """The step that what is logged now belongs to: the last one, if neither a batch nor a backward came since."""
        return self.steps if self._moved or not self.steps else self.steps - 1

    def tell(self, loss: float | None, tokens: float | None, weight: float) -> None:
        """Keep a loss for the next step event, unless it is of the step before, and tokens."""
        if tokens is not None:
            self._told_tokens += 1
            self._tokens += tokens
        if loss is not None and self.step_of_log() == self.steps:
            self._told_losses += weight
            self._losses += weight * loss


current: RunMonitor | None = None
"""The one of this process, while events are on."""


def start() -> None:
    """Begin a new one."""
    global current
    current = RunMonitor()


def stop() -> None:
    """Have none."""
    global current
    current = None
