"""What the training benchmark found: tables of measurements, and whether the targets were met."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from benchmarks.training_contenders import CONTENDERS

QUIET = 0.05
MOST_OF_A_FAILURE = 90  # characters; the rest is in the .json
LIMIT, YARDSTICK, ONE_PROCESS = "unconnected", "torch-ddp", "all-cores"
SHARDED = ("sherd-zero1", "sherd-zero2", "sherd-zero3")
DEEPSPEED = ("deepspeed-1", "deepspeed-2", "deepspeed-3")

# workload, contender, by whom it is measured, at least so many times as fast; for 2 ranks and 33.7 M parameters
Target = tuple[str, str, str, float]


def _targets(limit: float, ddp: float, fsdp2: float) -> list[Target]:
    references = ((LIMIT, limit), (YARDSTICK, ddp), ("fsdp2", fsdp2))
    return [("A", ours, reference, target) for reference, target in references for ours in SHARDED]


TARGETS: dict[str, list[Target]] = {  # by AdamW's implementation
    "default": [
        *_targets(1.03, 1.25, 1.9),
        *(("A", ours, peer, 1.8) for ours in SHARDED for peer in DEEPSPEED),
        ("A", "sherd-ddp", YARDSTICK, 1.05),
        *(("B", ours, YARDSTICK, 1.7) for ours in SHARDED),
        *(("B", ours, LIMIT, 1.0) for ours in SHARDED),
    ],
    "fused": _targets(0.98, 1.2, 1.8),
}
TARGETS_FOR = (2, "33.7m")


@dataclass
class Measured:
    """One contender in one workload."""

    seconds: list[float] = field(default_factory=list)  # of all steps, turn by turn, on the slowest rank of each
    disturbances: list[float] = field(default_factory=list)  # in each turn, the part of the machine others had
    loss: float = 0.0  # of the last turn
    bytes_per_parameter: float = 0.0
    bytes_sent: int = 0  # in all steps, by the host that sent most
    failure: str | None = None

    @property
    def best(self) -> float | None:
        return best_median(self.seconds, len(self.disturbances)) if self.seconds else None


def best_median(seconds: Sequence[float], turns: int) -> float:
    """Of the turns: a machine that others use has slow minutes, so what a contender can do is its best one."""
    steps = len(seconds) // turns
    return min(statistics.median(seconds[begin : begin + steps]) for begin in range(0, len(seconds), steps))


def training_report(
    ranks: int,
    size: str,
    measured: Mapping[str, Mapping[str, Measured]],
    workloads: Mapping[str, tuple[int, int]],
    targets: Sequence[Target],
    optimizer: str = "default",
) -> list[Table]:
    tables = []
    for workload, by_name in measured.items():
        sequences, tokens = workloads[workload]
        table = new_table(
            f"workload {workload}: {sequences} x {tokens} tokens per rank, GPT {size}, {ranks} ranks on "
            f"{len(os.sched_getaffinity(0))} cores, {optimizer} AdamW",
            "contender",
            "step (best median)",
            "of the limit",
            "to torch DDP",
            "to one process",
            "bytes per parameter",
            "loss",
        )
        limit, *references = [
            by_name[name].best if name in by_name else None for name in (LIMIT, YARDSTICK, ONE_PROCESS)
        ]
        for name, one in by_name.items():
            if one.best is None:
                table.add_row(CONTENDERS[name].title, few_words(one.failure))
                continue
            table.add_row(
                CONTENDERS[name].title,
                f"{1000 * one.best:.0f} ms",
                f"{100 * limit / one.best:.0f}%" if limit else "",
                *(f"{reference / one.best:.2f}x" if reference else "" for reference in references),
                f"{one.bytes_per_parameter:.1f}",
                "" if name == LIMIT else f"{one.loss:.4f}",
            )
        table.caption = quiet_or_not(by_name)
        tables.append(table)
    if (ranks, size) == TARGETS_FOR:
        tables.append(speed_targets(measured, [target for target in targets if target[0] in measured]))
    return tables


def quiet_or_not(by_name: Mapping[str, Measured]) -> str:
    """Turns average out a disturbance that is the same for all, but not one that comes and goes."""
    shares = [share for one in by_name.values() for share in one.disturbances] or [0.0]
    mean, worst = statistics.fmean(shares), max(shares)
    verdict = "" if mean <= QUIET else ": TOO MUCH, measure again on a quiet machine"
    return f"other processes had {100 * mean:.0f}% of the cores during turns, {100 * worst:.0f}% at worst{verdict}"


def speed_targets(measured: Mapping[str, Mapping[str, Measured]], targets: Sequence[Target]) -> Table:
    table = new_table("targets: times as fast", "workload", "contender", "as", "target", "measured", "")
    for workload, ours, reference, target in targets:
        times = [measured.get(workload, {}).get(name, Measured()).best for name in (reference, ours)]
        row = (workload, CONTENDERS[ours].title, CONTENDERS[reference].title, f"{target:.2f}x")
        table.add_row(*row, *verdict(times[0] / times[1] if times[0] and times[1] else None, target, "{:.2f}x"))
    return table


def verdict(measured: float | None, target: float, form: str, most: bool = False) -> tuple[str, str]:
    """The last two cells of a row of targets: the figure, and whether it is at least, or at `most`, its target."""
    if measured is None:
        return "", "not measured"
    return form.format(measured), "met" if (measured <= target if most else measured >= target) else "missed"


def few_words(failure: str | None) -> Text:
    text = Text(failure or "")  # not markup: it may have brackets in it
    text.truncate(MOST_OF_A_FAILURE, overflow="ellipsis")
    return text


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number and heading else "left")
    return table
