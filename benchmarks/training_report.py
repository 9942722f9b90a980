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
LIMIT, YARDSTICK = "unconnected", "torch-ddp"
SHARDED = ("sherd-zero1", "sherd-zero2", "sherd-zero3")
SLOW_PEERS = ("fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")

# workload, contender, by whom it is measured, at least so many times as fast; for 2 ranks and 33.7 M parameters
Target = tuple[str, str, str, float]
TARGETS: list[Target] = [
    *(("A", ours, LIMIT, 0.95) for ours in SHARDED),
    *(("A", ours, YARDSTICK, 1.15) for ours in SHARDED),
    *(("A", ours, peer, 1.8) for ours in SHARDED for peer in SLOW_PEERS),
    ("A", "sherd-ddp", YARDSTICK, 1.05),
    *(("B", ours, YARDSTICK, 1.7) for ours in SHARDED),
    *(("B", ours, LIMIT, 1.0) for ours in SHARDED),
]
TARGETS_FOR = (2, "33.7m")

# ranks: at most so many bytes per parameter, at 98 M parameters
MEMORY_TARGETS = {2: 18.0, 4: 19.0}
MEMORY_TARGETS_OF = ("sherd-zero2", "sherd-zero3")
MEMORY_TARGETS_FOR = "98m"


@dataclass
class Measured:
    """One contender in one workload."""

    seconds: list[float] = field(default_factory=list)
    disturbances: list[float] = field(default_factory=list)  # in each turn, the part of the machine others had
    loss: float = 0.0  # of the last turn
    bytes_per_parameter: float = 0.0
    bytes_sent: int = 0  # in all steps, by the host that sent most
    failure: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Weighed:
    """One contender's memory, in bytes per parameter on the whole host."""

    parameters: int = 0
    built: float = 0.0
    peak: float = 0.0
    failure: str | None = None


def training_report(
    ranks: int,
    size: str,
    measured: Mapping[str, Mapping[str, Measured]],
    workloads: Mapping[str, tuple[int, int]],
    targets: Sequence[Target] = TARGETS,
) -> list[Table]:
    tables = []
    for workload, by_name in measured.items():
        sequences, tokens = workloads[workload]
        table = new_table(
            f"workload {workload}: {sequences} x {tokens} tokens per rank, GPT {size}, {ranks} ranks on "
            f"{len(os.sched_getaffinity(0))} cores",
            "contender",
            "step (median)",
            "of the limit",
            "speed to torch DDP",
            "bytes per parameter",
            "loss",
        )
        limit, yardstick = (by_name[name].median if name in by_name else None for name in (LIMIT, YARDSTICK))
        for name, one in by_name.items():
            if one.median is None:
                table.add_row(CONTENDERS[name].title, few_words(one.failure))
                continue
            table.add_row(
                CONTENDERS[name].title,
                f"{1000 * one.median:.0f} ms",
                f"{100 * limit / one.median:.0f}%" if limit else "",
                f"{yardstick / one.median:.2f}x" if yardstick else "",
                f"{one.bytes_per_parameter:.1f}",
                "" if name == LIMIT else f"{one.loss:.4f}",
            )
        table.caption = quiet_or_not(by_name)
        tables.append(table)
    if (ranks, size) == TARGETS_FOR:
        tables.append(speed_targets(measured, targets))
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
        times = [measured[workload].get(name, Measured()).median for name in (reference, ours)]
        row = (workload, CONTENDERS[ours].title, CONTENDERS[reference].title, f"{target:.2f}x")
        if times[0] and times[1]:
            ratio = times[0] / times[1]
            table.add_row(*row, f"{ratio:.2f}x", "met" if ratio >= target else "missed")
        else:
            table.add_row(*row, "", "not measured")
    return table


def memory_report(ranks: int, size: str, weighed: Mapping[str, Weighed]) -> list[Table]:
    table = new_table(
        f"host bytes per parameter: GPT {size}, {ranks} ranks, 1 x 32 tokens per rank",
        "contender",
        "when built",
        "peak during steps",
    )
    for name, one in weighed.items():
        if one.failure:
            table.add_row(CONTENDERS[name].title, few_words(one.failure))
            continue
        table.add_row(CONTENDERS[name].title, f"{one.built:.1f}", f"{one.peak:.1f}")
    if size != MEMORY_TARGETS_FOR or ranks not in MEMORY_TARGETS:
        return [table]
    return [table, _memory_targets(ranks, weighed)]


def _memory_targets(ranks: int, weighed: Mapping[str, Weighed]) -> Table:
    most = MEMORY_TARGETS[ranks]
    table = new_table(f"targets: bytes per parameter at {ranks} ranks", "contender", "target", "measured", "")
    for name in MEMORY_TARGETS_OF:
        one = weighed.get(name, Weighed(failure="not measured"))
        row = (CONTENDERS[name].title, f"<= {most:g}")
        if one.failure:
            table.add_row(*row, "", "not measured")
        else:
            table.add_row(*row, f"{one.peak:.1f}", "met" if one.peak <= most else "missed")
    return table


def few_words(failure: str | None) -> Text:
    text = Text(failure or "")  # not markup: it may have brackets in it
    text.truncate(MOST_OF_A_FAILURE, overflow="ellipsis")
    return text


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number and heading else "left")
    return table
