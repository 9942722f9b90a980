"""Those who exchange parameters now and then instead of gradients in every step: `benchmarks.cluster --averaging`.

An exchange belongs to all the steps between two of them, so these contenders train a whole cycle in a turn, and so do
the ranks without communication; what counts is the mean of its steps. Exposed communication is what a cycle takes
longer than one without any.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from contextlib import ExitStack

from rich.table import Table

from benchmarks.processes import GroupFailed
from benchmarks.training import WORKLOADS, Run, take_turn
from benchmarks.training_contenders import CONTENDERS, EVERY
from benchmarks.training_report import LIMIT, Measured, few_words, new_table, quiet_or_not

NAMES = [LIMIT, "torch-ddp", "sherd-ddp", "sherd-zero2", "sherd-diloco", "sherd-streaming"]
IN_CYCLES = (LIMIT, "sherd-diloco", "sherd-streaming")
MEGABITS = 100
TARGETS = "streaming: at least 90% of no communication, and at most a third of what DiLoCo exposes"


def measure(run: Run, names: list[str], rounds: int, steps: int) -> dict[str, Measured]:
    """Measurements by contender; those that meet in every step train only `steps` in a turn."""
    measured, order = {name: Measured() for name in names}, random.Random(0)
    with ExitStack() as stack:
        for name in names:
            run.start(name, stack)
        for number in range(rounds):
            run.console.print(f"round {number + 1} of {rounds} ...")
            for name in order.sample(list(run.groups), len(run.groups)):
                count = EVERY if name in IN_CYCLES else steps
                try:
                    take_turn(run.groups[name], WORKLOADS["A"], count, measured[name])
                except GroupFailed as failure:
                    run.drop(name, failure)
    return measured | {name: Measured(failure=reason) for name, reason in run.failures.items()}


def report(title: str, ranks: int, by_name: Mapping[str, Measured]) -> Table:
    """Speed, bytes and exposed communication of each."""
    table = new_table(
        title, "contender", "step (mean)", "tokens/s", "of no communication", "exposed a step", "MB a step"
    )
    means = {name: statistics.fmean(one.seconds) for name, one in by_name.items() if one.seconds}
    sequences, tokens = WORKLOADS["A"]
    limit = means.get(LIMIT)
    for name, one in by_name.items():
        if name not in means:
            table.add_row(CONTENDERS[name].title, few_words(one.failure))
            continue
        mean = means[name]
        table.add_row(
            CONTENDERS[name].title,
            f"{1000 * mean:.0f} ms",
            f"{ranks * sequences * tokens / mean:.0f}",
            f"{100 * limit / mean:.0f}%" if limit else "",
            f"{1000 * (mean - limit):.0f} ms" if limit and name != LIMIT else "",
            f"{one.bytes_sent / len(one.seconds) / 1e6:.1f}",
        )
    table.caption = f"{TARGETS}\n{quiet_or_not(by_name)}"
    return table
