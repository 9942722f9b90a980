"""Torch's own DDP and FSDP2 over the backend "sherd" and over gloo: `python -m benchmarks.backend`.

Model, data, turns and tables are those of `benchmarks.training`. Ranks of the backend "sherd" keep the memory that
torch frees (`SHERD_KEEP_FREED_MEMORY=1`, see docs/backend.md); those of gloo, as torch has it, do not.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from rich.console import Console

from benchmarks.gpt import SIZES
from benchmarks.training import RESULTS, WORKLOADS, Run, end_ranks_when_stopped, interleave, publish
from benchmarks.training_report import Target, training_report

NAMES = ["unconnected", "torch-ddp", "torch-ddp-on-sherd", "fsdp2", "fsdp2-on-sherd"]
TARGETS: list[Target] = [
    *((workload, "torch-ddp-on-sherd", "torch-ddp", 1.1) for workload in WORKLOADS),
    *((workload, "fsdp2-on-sherd", "fsdp2", 1.5) for workload in WORKLOADS),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="33.7m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a turn")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a group has for an answer (default: 300)")
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    end_ranks_when_stopped()
    os.environ["SHERD_KEEP_FREED_MEMORY"] = "1"  # ranks are started from here
    console = Console(width=130, highlight=False)
    console.print("SHERD_KEEP_FREED_MEMORY=1 for the ranks of the backend sherd")
    run = Run(arguments.ranks, arguments.size, arguments.timeout, console)
    measured = interleave(run, NAMES, arguments.rounds, arguments.steps)
    tables = training_report(arguments.ranks, arguments.size, measured, WORKLOADS, TARGETS)
    results = {workload: {name: asdict(one) for name, one in by.items()} for workload, by in measured.items()}
    saved = {"ranks": arguments.ranks, "size": arguments.size, "results": results, "failures": run.details}
    publish("backend", [*tables], saved, console, not arguments.no_save)


if __name__ == "__main__":
    main()
