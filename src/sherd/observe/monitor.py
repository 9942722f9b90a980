"""What this process sees of its run while events are on: phases, batches, roots. `current` is None while they are off.

The loader, the backward and the optimizer's step report to it; the emitter of a `step` event reads it. There may be
several readers, each with its own counts, because each optimizer has its own steps.

    (loader)  data -> forward;  backward() -> rest;  step(): update -> rest
    without a training loader the time after a step counts as forward, since the end of data is unknown
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sherd.observe.phases import BACKWARD, DATA, FORWARD, PHASES, REST, UPDATE, PhaseClock


@dataclass
class Tally:
    """What has happened since the last read."""

    batches: int = 0
    """yielded by training loaders"""
    samples: int = 0
    """in them; those repeated to give every rank a batch do not count"""
    backwards: int = 0
    """from scalar roots"""
    roots: float = 0.0
    """their sum"""


class Reader:
    """Gets, at each read, what has happened since its last one."""

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
        """Whether there is a training loader, which marks where data ends."""
        self.optimizers = 0
        """How many optimizers were distributed."""
        self.steps = 0
        """Real steps of the optimizer that took the first one: the steps that figures belong to."""
        self.leader: int | None = None
        """The number of that optimizer; None before the first step."""
        self.scaled = False
        """Whether a GradScaler is in use: the root of a backward may then be a scaled loss."""
        self.grad_enabled: Callable[[], bool] = lambda: True
        """Whether gradients are on; batches fetched while they are off are for an evaluation."""
        self._moved = False  # whether there was a batch or a backward since the last step
        self._readers: list[Reader] = []

    def reader(self) -> Reader:
        """A new reader, which starts now."""
        self._readers.append(Reader(self.clock))
        return self._readers[-1]

    # ---------------------------------------------------------------- what happens

    def begin_batch(self, trains: bool) -> None:
        """A loader was asked for a batch; `trains`: it is a training loader."""
        self.clock.enter(DATA if trains and self.grad_enabled() else REST)

    def end_batch(self, trains: bool, samples: int | None) -> None:
        """It yielded a batch with this many samples; None: it had no more."""
        to_train = trains and samples is not None and self.grad_enabled()
        self.clock.enter(FORWARD if to_train else REST)
        if to_train and samples is not None:
            self._moved = True
            for reader in self._readers:
                reader.tally.batches += 1
                reader.tally.samples += samples

    def begin_backward(self, losses: Sequence[float]) -> None:
        """An outermost backward starts from these losses, and perhaps from roots that are not scalars."""
        self.clock.enter(BACKWARD)
        self._moved = True
        for reader in self._readers:
            reader.tally.backwards += len(losses)
            reader.tally.roots += sum(losses)

    def end_backward(self) -> None:
        """The backward is over, or has failed."""
        self.clock.enter(REST)

    def evaluation(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a closure of `step()`, so that its time does not count as update."""

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
        """`step()` is over, whether it was a real step or inside an accumulation window."""
        self.clock.enter(REST if self.loads else FORWARD)

    def stepped(self, optimizer: int) -> None:
        """It was a real step of this optimizer."""
        self._moved = False
        if self.leader is None:
            self.leader = optimizer
        if optimizer == self.leader:
            self.steps += 1

    def step_of_log(self) -> int:
        """The step that a log entry belongs to: the last one, if there was no batch or backward since."""
        return self.steps if self._moved or not self.steps else self.steps - 1


current: RunMonitor | None = None
"""The monitor of this process, while events are on."""


def start() -> RunMonitor:
    """Start a new monitor."""
    global current
    current = RunMonitor()
    return current


def stop() -> None:
    """Remove the monitor."""
    global current
    current = None
