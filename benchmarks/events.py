"""What events cost a step: `python -m benchmarks.events`.

Two ranks, zero2, AdamW, 128 tokens each, events on. *Recording* is the CPU time of every call that records something,
in the middle of training, where the caches are cold; what the stopwatch takes by itself is left out. For the small
model, whose steps are short enough to see it, *on - off* is the median difference between blocks of steps with events
and without, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sherd
from benchmarks.gpt import SIZES, Gpt, batch
from benchmarks.training import RESULTS
from sherd.api.recording.steps import StepRecorder
from sherd.api.training import training_of
from sherd.observe import monitor
from sherd.observe.monitor import RunMonitor
from sherd.observe.phases import PhaseClock
from sherd.testing import run_ranks

TARGET = 200e-6
WARM_UP = 3
RECORDING = {
    StepRecorder: ("_emit",),
    RunMonitor: ("begin_batch", "end_batch", "begin_backward", "end_backward", "begin_step", "end_step"),
    PhaseClock: ("enter",),
}


class Stopwatch:
    """Adds up the CPU time of this thread in functions that may call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = False

    def around(self, function: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside = True
            start = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - start
                self.calls += 1
                self._inside = False

        return timed


class Loop:
    """Steps of a model on this rank."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._rank = int(os.environ["RANK"])
        model = Gpt(SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = sherd.distribute(model, optimizer, strategy="zero2")
        self._step = 0
        self.run(WARM_UP)

    def run(self, steps: int) -> float:
        """CPU seconds per step."""
        begin = time.process_time()
        for _ in range(steps):
            self.model.loss(*batch((self._rank,), self._step, 1, 128)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._step += 1
        return (time.process_time() - begin) / steps


def measure(size: str, steps: int) -> dict[str, float]:
    """CPU seconds per step, in all and for recording."""
    watch = Stopwatch()
    for kind, names in RECORDING.items():
        for name in names:
            setattr(kind, name, watch.around(getattr(kind, name)))
    loop = Loop(size)
    watch.seconds, watch.calls = 0.0, 0
    whole = loop.run(steps)
    empty = Stopwatch()
    nothing = empty.around(lambda: None)
    for _ in range(1000):
        nothing()
    recording = watch.seconds - watch.calls * empty.seconds / empty.calls
    return {"step": whole, "recording": recording / steps, "calls": watch.calls / steps}


def compare(size: str, blocks: int, steps: int) -> float:
    """Seconds of CPU time that a step with events takes more than one without."""
    loop = Loop(size)
    training, run = training_of(loop.model), monitor.current
    recorders, differences = training.recorders, []
    for _ in range(blocks):
        on = loop.run(steps)
        training.recorders, monitor.current = {}, None
        off = loop.run(steps)
        training.recorders, monitor.current = recorders, run
        differences.append(on - off)
    return statistics.median(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "33.7m"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=40, help="of steps with events and without, for the small model")
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    table = Table(title=f"zero2, {arguments.ranks} ranks x 128 tokens: CPU time per step")
    for column in ("model", "rank", "step, ms", "recording, us", "calls", "share", "on - off, us", "target"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as directory:
            env = {"SHERD_EVENTS": directory}
            rows = run_ranks(measure, arguments.ranks, size, arguments.steps, env=env, timeout=600)
            more: list[Any] = [None] * arguments.ranks
            if size == "small":
                more = run_ranks(compare, arguments.ranks, size, arguments.blocks, 10, env=env, timeout=600)
        found[size] = [{**row, "on - off": difference} for row, difference in zip(rows, more, strict=True)]
        for rank, one in enumerate(found[size]):
            difference = one["on - off"]
            met = "met" if max(one["recording"], difference or 0.0) < TARGET else "missed"
            table.add_row(
                size,
                str(rank),
                f"{1e3 * one['step']:.1f}",
                f"{1e6 * one['recording']:.0f}",
                f"{one['calls']:.0f}",
                f"{one['recording'] / one['step']:.2%}",
                "" if difference is None else f"{1e6 * difference:.0f}",
                f"< {1e6 * TARGET:.0f} us {met}",
            )
    console = Console(width=110, highlight=False, record=True)
    console.print(table)
    if not arguments.no_save:
        (RESULTS / "events.txt").write_text(console.export_text())
        (RESULTS / "events.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
