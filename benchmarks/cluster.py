"""sherd and its peers on several hosts with a slow network between them: `python -m benchmarks.cluster`.

Model, data and turns are those of `benchmarks.training`. The hosts are network namespaces of this machine, so they
share its cores; whatever a host sends passes a token bucket at the link's rate. Needs root.

`MB sent` is what leaves the busiest host in a step, from its interface's own counters, headers and acknowledgements
included. The wire's limit is how long the link takes for these bytes if it is never idle: no step of that contender
can be shorter, nor can it be shorter than a step of `unconnected`, whose ranks do not communicate.

With a bf16 wire gradients travel in half their bytes: beside torch DDP with its bf16 hook.

`--averaging` measures those who exchange parameters every 50 steps beside those who exchange gradients in each
(see `exchange_less`), by default at 100 Mbit/s, in about 15 minutes with two rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks import exchange_less
from benchmarks.gpt import SIZES
from benchmarks.training import RESULTS, WORKLOADS, Run, end_ranks_when_stopped, interleave, publish
from benchmarks.training_contenders import CONTENDERS, EVERY, chosen
from benchmarks.training_place import OnHosts
from benchmarks.training_report import (
    LIMIT,
    YARDSTICK,
    Measured,
    Target,
    few_words,
    new_table,
    quiet_or_not,
    speed_targets,
)
from sherd.errors import SherdError
from sherd.testing import Hosts

NAMES = [
    *("unconnected", "torch-ddp", "torch-ddp-bf16", "fsdp2", "sherd-zero2", "sherd-zero3"),
    *("sherd-zero2-bf16", "sherd-zero3-bf16"),
]
REFERENCES = (YARDSTICK, "fsdp2")
MEGABITS = 1000
TARGETS: list[Target] = [("A", "sherd-zero2", YARDSTICK, 1.3), ("A", "sherd-zero3", "fsdp2", 2.0)]
TARGETS_FOR = (2, 2, "33.7m", MEGABITS)


def cluster_report(title: str, megabits: int, by_name: Mapping[str, Measured]) -> Table:
    references = [f"speed to {CONTENDERS[name].title}" for name in REFERENCES]
    wire = ("MB sent", "wire's limit", "of that")
    headings = ("contender", "step (best median)", "of the limit", *references, *wire, "loss")
    table = new_table(title, *headings)
    yardsticks = [by_name[name].best if name in by_name else None for name in (LIMIT, *REFERENCES)]
    for name, one in by_name.items():
        if one.best is None:
            table.add_row(CONTENDERS[name].title, few_words(one.failure))
            continue
        limit, *ratios = [yardstick / one.best if yardstick else None for yardstick in yardsticks]
        sent = one.bytes_sent / len(one.seconds)
        busy = 8 * sent / (megabits * 1e6)
        table.add_row(
            CONTENDERS[name].title,
            f"{1000 * one.best:.0f} ms",
            f"{100 * limit:.0f}%" if limit else "",
            *(f"{ratio:.2f}x" if ratio else "" for ratio in ratios),
            f"{sent / 1e6:.1f}",
            f"{1000 * busy:.0f} ms",
            f"{100 * busy / one.best:.0f}%",
            "" if name == LIMIT else f"{one.loss:.4f}",
        )
    table.caption = quiet_or_not(by_name)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--averaging", action="store_true", help="those who exchange parameters now and then")
    speeds = f"(default: {MEGABITS}, {exchange_less.MEGABITS} with --averaging)"
    parser.add_argument("--megabits", type=int, help=f"a second, of each link {speeds}")
    parser.add_argument("--size", choices=SIZES, default="33.7m")
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=["A"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a turn")
    parser.add_argument("--only", help=f"contenders by comma, such as sherd (default: {','.join(NAMES)})")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a group has for an answer (default: 300)")
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    try:
        default = exchange_less.NAMES if arguments.averaging else NAMES
        names = chosen(arguments.only.split(",")) if arguments.only else default
    except ValueError as error:
        parser.error(str(error))
    arguments.megabits = arguments.megabits or (exchange_less.MEGABITS if arguments.averaging else MEGABITS)
    end_ranks_when_stopped()
    try:
        hosts = Hosts(arguments.hosts, ranks_per_host=arguments.ranks_per_host, rate=f"{arguments.megabits}mbit")
    except SherdError as error:
        print(f"no hosts to measure on: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with hosts:
        (measure_averaging if arguments.averaging else measure)(hosts, names, arguments)


def measure_averaging(hosts: Hosts, names: list[str], arguments: argparse.Namespace) -> None:
    count, per_host, size, megabits = arguments.hosts, arguments.ranks_per_host, arguments.size, arguments.megabits
    console = Console(width=130, highlight=False)
    run = Run(count * per_host, size, arguments.timeout, console, OnHosts(hosts, count, per_host))
    measured = exchange_less.measure(run, names, arguments.rounds, arguments.steps)
    where = f"{count} hosts x {per_host} ranks on {len(os.sched_getaffinity(0))} cores, {megabits} Mbit/s"
    table = exchange_less.report(f"an exchange every {EVERY} steps, GPT {size}, {where}", run.ranks, measured)
    saved = {"hosts": count, "ranks_per_host": per_host, "size": size, "megabits": megabits, "every": EVERY}
    results = {name: asdict(one) for name, one in measured.items()}
    publish("averaging", [table], saved | {"results": results, "failures": run.details}, console, not arguments.no_save)


def measure(hosts: Hosts, names: list[str], arguments: argparse.Namespace) -> None:
    count, per_host, size, megabits = arguments.hosts, arguments.ranks_per_host, arguments.size, arguments.megabits
    console = Console(width=130, highlight=False)
    place = OnHosts(hosts, count, per_host)
    run = Run(count * per_host, size, arguments.timeout, console, place)
    measured = interleave(
        run, names, arguments.rounds, arguments.steps, {name: WORKLOADS[name] for name in arguments.workloads}
    )
    where = f"{count} hosts x {per_host} ranks on {len(os.sched_getaffinity(0))} cores, {megabits} Mbit/s"
    tables = []
    for workload, by_name in measured.items():
        sequences, tokens = WORKLOADS[workload]
        title = f"workload {workload}: {sequences} x {tokens} tokens per rank, GPT {size}, {where}"
        tables.append(cluster_report(title, megabits, by_name))
    if (count, per_host, size, megabits) == TARGETS_FOR and "A" in measured:
        tables.append(speed_targets(measured, TARGETS))
    results = {workload: {name: asdict(one) for name, one in by.items()} for workload, by in measured.items()}
    saved = {"hosts": count, "ranks_per_host": per_host, "size": size, "megabits": megabits, "results": results}
    publish("cluster", [*tables], saved | {"failures": run.details}, console, not arguments.no_save)


if __name__ == "__main__":
    main()
