"""All memory of all ranks, against what it would have to be: `python -m benchmarks.memory`.

    least   16 bytes per parameter (fp32, AdamW: parameters, gradients, two moments) once for the host, and for each
            rank what one plain process takes beyond its own 16: interpreter, torch, activations, temporaries
    found   the peak over some steps of all ranks together, nothing subtracted

Counted are anonymous and shared pages, each divided by the number of processes that have it, and page tables. Pages of
files are not: libraries are there once, whatever the ranks, and a plain process would be charged with all of them.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpt import SIZES
from benchmarks.training import end_ranks_when_stopped
from benchmarks.training_group import Group
from benchmarks.training_rank import Train

BYTES_PER_PARAMETER = 16
MOST_OVER = 0.05
PLAIN = "one-core"
TIMEOUT = 600.0
MB = 1 << 20
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


class Weighing:
    """The memory of a group's ranks, in bytes by kind, at its peak."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.peak: Counter[str] = Counter()

    def look(self) -> None:
        now: Counter[str] = Counter()
        for process in self._group.processes:
            now.update(_by_kind(process.pid))
        if now.total() > self.peak.total():
            self.peak = now


def _by_kind(pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    try:
        mappings = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        tables = re.search(r"VmPTE:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return found  # it has just died, which the next answer tells
    kind = ""
    for line in mappings:
        if _MAPPING.match(line):
            kind = _kind(line.split(maxsplit=5)[5:])
        elif line.startswith(("Pss:", "Pss_Dirty:")) and kind:
            # What a process has of a file and did not change is clean; shared memory and private pages never are.
            wanted = "Pss_Dirty:" if kind == "private" else "Pss:"
            found[kind] += 1024 * int(line.split()[1]) if line.startswith(wanted) else 0
    found["page tables"] = 1024 * int(tables[1]) if tables else 0
    return found


def _kind(name: list[str]) -> str:
    label = name[0] if name else ""
    if label.startswith("/memfd:sherd-"):
        return {"tensor": "parameters", "buffers": "slots"}.get(label.split("-")[1].split()[0], "staging")
    return "heap" if label == "[heap]" else "private"


def weigh(name: str, ranks: int, size: str, steps: int, tokens: int) -> tuple[int, Counter[str]]:
    """The model's parameters, and the group's memory at its peak."""
    with Group(name, ranks, size, TIMEOUT) as group:
        group.start()
        weighing = Weighing(group)
        group._ask_all(Train(1, tokens, steps), weighing.look)
        return group.parameters, weighing.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--strategies", nargs="+", default=["zero2", "zero3"])
    parser.add_argument("--size", choices=SIZES, default="98m")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of each rank's one sequence (default: 32)")
    arguments = parser.parse_args()
    end_ranks_when_stopped()
    console = Console(width=130, highlight=False)
    what = arguments.size, arguments.steps, arguments.tokens
    plain = [weigh(PLAIN, 1, *what) for _ in range(3)]
    state = BYTES_PER_PARAMETER * plain[0][0]
    rest = statistics.median(peak.total() for _, peak in plain) - state
    console.print(f"{arguments.size}: {state / MB:.0f} MB of state; a plain process takes {rest / MB:.0f} MB beyond it")
    kinds = ("parameters", "slots", "staging", "heap", "private", "page tables")
    table = Table("ranks", "strategy", *kinds, "found", "least", "over", title="MB of all ranks at their peak")
    for ranks in arguments.ranks:
        for strategy in arguments.strategies:
            _, peak = weigh(f"sherd-{strategy}", ranks, *what)
            least = state + ranks * rest
            over = peak.total() / least - 1
            row = [f"{bytes_ / MB:.0f}" for bytes_ in (*(peak[kind] for kind in kinds), peak.total(), least)]
            table.add_row(str(ranks), strategy, *row, f"{over:+.1%}{'' if over <= MOST_OVER else ' (target: +5%)'}")
    console.print(table)


if __name__ == "__main__":
    main()
