"""What looking for edits of parameters costs a step that has none: `python -m benchmarks.edits`.

CPU time of the calls that look, against that of whole steps, on each rank; two ranks, zero2, AdamW, 128 tokens each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sherd
from benchmarks.gpt import SIZES, Gpt, batch
from benchmarks.training import RESULTS
from sherd.engine.parameters.host_store import HostStore
from sherd.testing import run_ranks

TARGET = 0.01


class Stopwatch:
    """Adds up the CPU time of this thread in calls of a function."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - start
                self.calls += 1

        return timed


def measure(size: str, steps: int) -> dict[str, float]:
    """Train on this rank; CPU seconds per step, in all and for looking."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Gpt(SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    looking = Stopwatch()
    HostStore.edited = looking.around(HostStore.edited)  # type: ignore[method-assign]
    model, optimizer = sherd.distribute(model, optimizer, strategy="zero2")
    begin = 0.0
    for step in range(steps + 2):
        if step == 2:
            begin, looking.seconds, looking.calls = time.process_time(), 0.0, 0
        model.loss(*batch((rank,), step, 1, 128)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    whole = (time.process_time() - begin) / steps
    return {"step": whole, "looking": looking.seconds / steps, "calls": looking.calls / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="33.7m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    found = run_ranks(measure, arguments.ranks, arguments.size, arguments.steps, timeout=600)
    table = Table(title=f"GPT {arguments.size}, zero2, {arguments.ranks} ranks x 128 tokens: CPU ms per step")
    for column in ("rank", "step", "looking for edits", "share", "target"):
        table.add_column(column, justify="right")
    for rank, one in enumerate(found):
        share = one["looking"] / one["step"]
        met = "met" if share < TARGET else "missed"
        table.add_row(
            str(rank),
            f"{1e3 * one['step']:.0f}",
            f"{1e3 * one['looking']:.2f}",
            f"{share:.2%}",
            f"< {TARGET:.0%} {met}",
        )
    console = Console(width=110, highlight=False, record=True)
    console.print(table)
    if not arguments.no_save:
        (RESULTS / "edits.txt").write_text(console.export_text())
        (RESULTS / "edits.json").write_text(json.dumps({"size": arguments.size, "ranks": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
