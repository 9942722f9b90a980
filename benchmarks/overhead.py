"""What sherd costs where steps are short, interleaved with its peers: `python -m benchmarks.overhead`.

GPTs of 0.4, 1.2 and 3.7 M parameters, a ResNet-18 on small images and an MLP of 3,000 small tensors, each with two
parameter groups (decay, no decay), in four sections:

2-ranks       every strategy against torch DDP and against the same loop without communication (AdamW)
4-ranks       every strategy against torch DDP where ranks outnumber cores: four ranks are confined to two cores
1-rank        a world of one against the plain loop, with default AdamW, SGD with momentum and fused AdamW
accumulation  a loop of 4 micro-batches a step without no_sync and with torch's clip_grad_norm_, as in nanoGPT, against
              torch DDP with require_backward_grad_sync off in all but the last

Every rank has one thread. Every contender has processes of its own, as in `benchmarks.training`: sherd tells all its
models of every backward in a process, so contenders in one process would slow each other down. They take turns of about
0.4 s: in a round, which has new processes, each has some turns with each network, in a new order every time. In a world
of one the plain loop and sherd take their turns in the same process, where sherd's model is not told of the plain
loop's backwards: two processes of the same program differ by 1 to 2 ms a step in where their memory lies, and the
targets are tenths of that. A turn's first step does not count. A contender's figure is its best round; a round's is the
median of its steps on the slowest rank. Targets are in the tables, with whether they are met.

A full run takes 12 to 14 minutes on two cores (5, 4, 3 and 2 by section), a quick one about 2. It writes
results/overhead.txt and .json; a run of some sections replaces these there, a quick one or one of some networks writes
nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType

from benchmarks.overhead_measuring import Measuring
from benchmarks.overhead_networks import NETWORKS
from benchmarks.overhead_report import figures, summary, tables_of
from benchmarks.overhead_sections import SECTIONS, Effort, Measured, Measurement, Result
from benchmarks.training import RESULTS, end_ranks_when_stopped, machine, publish

QUICK = Effort(rounds=1, turns=1, steps=2, timeout=120.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, metavar="NETWORK", help=f"some of {', '.join(NETWORKS)}")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="of a contender with a network in a round (default: 3)")
    parser.add_argument("--steps", type=int, help="counted steps of a turn (default: about 0.4 s of them)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds a contender has for a turn (default: 120)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of one turn of two steps: does it run?")
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    effort = Effort(arguments.rounds, arguments.turns, arguments.steps, arguments.timeout)
    if min(effort.rounds, effort.turns, effort.steps or 1) < 1:
        parser.error("--rounds, --turns and --steps are at least 1")
    end_ranks_when_stopped()
    console = Console(width=130, highlight=False)
    networks, start = arguments.only or [*NETWORKS], time.monotonic()
    found = []
    for name in SECTIONS:
        if name in arguments.sections:
            measuring = Measuring(name, networks, QUICK if arguments.quick else effort, console)
            if measuring.found.results:
                found.append(measuring.run())
    console.print(f"took {time.monotonic() - start:.0f} s")
    save = not (arguments.quick or arguments.only or arguments.no_save)
    if save:
        found = _with_saved(found)
    tables: list[RenderableType] = [table for one in found for table in tables_of(one)]
    publish("overhead", [*tables, summary(found)], [_saved(one) for one in found], console, save)


def _saved(found: Measurement) -> dict[str, Any]:
    judged = [asdict(figure) | {"met": figure.met} for figure in figures(found)]
    return asdict(found) | {"figures": judged, "machine": machine()}


def _with_saved(found: list[Measurement]) -> list[Measurement]:
    """These, and from the file the sections that were not measured now, in the order of SECTIONS."""
    path = RESULTS / "overhead.json"
    kept = [loaded(one) for one in json.loads(path.read_text())] if path.exists() else []
    by_name = {one.section: one for one in (*kept, *found) if one.section in SECTIONS}
    return [by_name[name] for name in SECTIONS if name in by_name]


def loaded(saved: dict[str, Any]) -> Measurement:
    """What `asdict` made of a measurement."""
    results = [
        Result(**{**one, "contenders": {name: Measured(**by) for name, by in one["contenders"].items()}})
        for one in saved["results"]
    ]
    keys = ("section", "rounds", "turns", "disturbances", "details")
    return Measurement(results=results, **{key: saved[key] for key in keys})


if __name__ == "__main__":
    main()
