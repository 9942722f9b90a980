"""ResNet-50 on 2 and on 4 ranks beside one process on one core and on all of them: `python -m benchmarks.resnet`.

Everybody trains the same network with AdamW on the same batch in all: on N ranks each takes an Nth of it, with one
thread. So the speed-up is that of one and the same training, and a machine can give at most as many times the speed of
one core as it has cores. Contenders take turns as in `benchmarks.training`, which says how they are measured; memory is
the peak of the whole host, with activations.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console, RenderableType
from rich.table import Table

from benchmarks.images import NAME
from benchmarks.training import RESULTS, Run, end_ranks_when_stopped, interleave, publish
from benchmarks.training_contenders import CONTENDERS, CORES
from benchmarks.training_report import Measured, few_words, new_table, quiet_or_not

ONE, ALL = "one-core", "all-cores"
NAMES = [ONE, ALL, "torch-ddp", "sherd-ddp", "sherd-zero1", "sherd-zero2", "sherd-zero3"]
PARAMETERS = 25_557_032


def table_of(ranks: int, batch: int, size: int, measured: dict[str, Measured]) -> Table:
    table = new_table(
        f"ResNet-50, {size} x {size} pixels, {batch} images a step, {ranks} ranks on {CORES} cores",
        "contender",
        "images/s",
        "speed-up to one core",
        "to all cores",
        "peak memory of the host",
        "bytes per parameter",
    )
    one, whole = (measured[name].best if name in measured else None for name in (ONE, ALL))
    for name, found in measured.items():
        if found.best is None:
            table.add_row(CONTENDERS[name].title, few_words(found.failure))
            continue
        table.add_row(
            CONTENDERS[name].title,
            f"{batch / found.best:.1f}",
            f"{one / found.best:.2f}x" if one else "",
            f"{whole / found.best:.2f}x" if whole else "",
            f"{found.bytes_per_parameter * PARAMETERS / 1e6:,.0f} MB",
            f"{found.bytes_per_parameter:.1f}",
        )
    table.caption = quiet_or_not(measured)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=64, help="pixels of an image in each direction (default: 64)")
    parser.add_argument("--batch", type=int, default=32, help="images of a step on all ranks together (default: 32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a turn (default: 2)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a group has for an answer (default: 300)")
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        if ranks < 1 or arguments.batch % ranks:
            parser.error(f"--batch {arguments.batch} cannot be dealt to {ranks} ranks evenly")
    end_ranks_when_stopped()
    console = Console(width=130, highlight=False)
    tables: list[RenderableType] = []
    saved = []
    for ranks in arguments.ranks:
        run = Run(ranks, NAME, arguments.timeout, console)
        shape = (arguments.batch // ranks, arguments.size)
        measured = interleave(run, NAMES, arguments.rounds, arguments.steps, {NAME: shape})[NAME]
        tables.append(table_of(ranks, arguments.batch, arguments.size, measured))
        saved.append(
            {
                "ranks": ranks,
                "cores": CORES,
                "size": arguments.size,
                "batch": arguments.batch,
                "parameters": PARAMETERS,
                "results": {name: asdict(one) for name, one in measured.items()},
                "failures": run.details,
            }
        )
    publish("resnet", tables, saved, console, not arguments.no_save)


if __name__ == "__main__":
    main()
