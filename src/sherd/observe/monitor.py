"""What this process sees of its run while events are on: phases, batches, roots. `current` is None while they are off.

The loader, the backward and the optimizer's step tell it; whoever emits a `step` event reads it. There may be several
who read, each with figures of its own: each optimizer has its own steps.

    (loader)  data -> forward;  backward() -> rest;  step(): update -> rest
    without a training loader the time after a step is forward, as nobody can tell where data ends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sherd.observe.phases import BACKWARD, DATA, FORWARD, PHASES, REST, UPDATE, PhaseClock


@dataclass
class Tally:
    """What has happened since somebody looked last."""

    batches: int = 0
    """that training loaders yielded"""
    samples: int = 0
    """in them; those that are only repeated, so that every rank has a batch, count nothing"""
    backwards: int = 0
    """from scalar roots"""
    roots: float = 0.0
    """their sum"""


class Reader:
    """One of those who look: at each look it gets what has happened since the last."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._spent = clock.spent()
        self.tally = Tally()

    def read(self) -> tuple[Tally, dict[str, float]]:
        """What has happened, and the seconds by phase."""
        spent, before, tally = self._clock.spent(), self._spent, self.tally
        self._spent, self.tally = spent, Tally()
        return tally, {name: (spent[phase] - before[phase]) / 1e9 for phase, name in enumerate(PHASES)}


class RunMonitor:
    """One run as this process sees it."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.loads = False
        """Whether there is a training loader, which tells where data ends."""
        self.optimizers = 0
        """How many were distributed."""
        self.steps = 0
        """Real steps of the one that took the first: the steps that figures belong to."""
        self.leader: int | None = None
        """Which one that was; None before the first step."""
        self.scaled = False
        """Whether a GradScaler is in use: what a backward begins at may then be a scaled loss."""
        self.grad_enabled: Callable[[], bool] = lambda: True
        """Whether gradients are on; batches fetched while they are off are for an evaluation."""
        self._moved = False  # whether a batch came or a backward began since the last step
        self._readers: list[Reader] = []

    def reader(self) -> Reader:
        """One more who looks, from now on."""
        self._readers.append(Reader(self.clock))
        return self._readers[-1]

    # ---------------------------------------------------------------- what happens

    def begin_batch(self, trains: bool) -> None:
        """A loader was asked for a batch; `trains` says whether it is a training loader."""
        self.clock.enter(DATA if trains and self.grad_enabled() else REST)

    def end_batch(self, trains: bool, samples: int | None) -> None:
        """It yielded so many samples; None: it had no more."""
        to_train = trains and samples is not None and self.grad_enabled()
        self.clock.enter(FORWARD if to_train else REST)
        if to_train and samples is not None:
            self._moved = True
            for reader in self._readers:
                reader.tally.batches += 1
                reader.tally.samples += samples

    def begin_backward(self, losses: Sequence[float]) -> None:
        """An outermost backward begins at these, and perhaps at others that are no numbers."""
        self.clock.enter(BACKWARD)
        self._moved = True
        for reader in self._readers:
            reader.tally.backwards += len(losses)
            reader.tally.roots += sum(losses)

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
        if self.leader is None:
            self.leader = optimizer
        if optimizer == self.leader:
            self.steps += 1

    def step_of_log(self) -> int:
        """The step that what is logged now belongs to: the last one, if neither a batch nor a backward came since."""
        return self.steps if self._moved or not self.steps else self.steps - 1


current: RunMonitor | None = None
"""The one of this process, while events are on."""


def start() -> RunMonitor:
    """Begin a new one."""
    global current
    current = RunMonitor()
    return current


def stop() -> None:
    """Have none."""
    global current
    current = None
