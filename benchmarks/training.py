"""Strategies of sherd and of its peers on one small GPT, interleaved in one run: `python -m benchmarks.training`.

Every contender has a group of ranks of its own. The groups take turns: one trains some steps while all others sleep.
Each round gives every group one turn for each workload, in a new order, so that whatever else the machine does hits
all of them alike; how much that was stands below each table. A turn's first step is not counted; in it the memory is
weighed. A turn counts as the median of its steps on the slowest rank; reported is each contender's best turn.

`no communication` are as many processes as the others have ranks, without any: the limit of this machine. `one
process, all cores` is what a user would do instead on one machine: it trains on the data of all ranks, with a thread
for each core. Everybody else uses one thread for each rank, and sees the same data in the same order from the same
first weights, so the losses should agree: each is the mean of the workload's last turn over steps and ranks. Those of
`no communication` are of separate models.

All have the same AdamW, in torch's default implementation or fused. The default one is slow, so that those who update
only a part of the model on each rank gain more by that than communication costs them; `--optimizer both` measures one
after the other. On two cores with DeepSpeed installed a run of one implementation takes about 8 minutes.

Memory is the proportional set size (PSS) of all ranks together, without pages of files:
the peak during steps, less what the ranks had before the model was built, with everything imported, the process group
up and a step of a tiny model done, since torch loads much at its first step. The model's parameters count.

`--against REVISION` lets sherd take part a second time, as it was at that commit, and saves nothing.

`--memory` measures memory alone, one contender after the other with no other group alive, at 98 M parameters and one
sequence of 32 tokens on each rank; it samples throughout all steps. It begins with one plain process: ranks should need
16 bytes per parameter together, and each what a plain process takes beyond its own 16, everything counted. It takes
about 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console, RenderableType

from benchmarks.gpt import SIZES
from benchmarks.processes import GroupFailed
from benchmarks.training_contenders import CONTENDERS, EARLIER, OPTIMIZERS, chosen, of_training
from benchmarks.training_group import Group
from benchmarks.training_memory import OURS, memory_report, weigh, weigh_plain
from benchmarks.training_place import Place
from benchmarks.training_rank import Train
from benchmarks.training_report import TARGETS, Measured, training_report

WORKLOADS = {"A": (2, 128), "B": (1, 32)}  # sequences and tokens of each rank
RESULTS = Path(__file__).parent / "results"


@dataclass
class Run:
    """What is measured, and what came of it."""

    ranks: int
    size: str
    timeout: float
    console: Console
    place: Place | None = None  # of the ranks, if not this machine
    optimizer: str = "default"
    groups: dict[str, Group] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, stack: ExitStack) -> Group | None:
        if missing := CONTENDERS[name].missing:
            self.failures[name] = missing
            return None
        self.console.print(f"starting {CONTENDERS[name].title} ...")
        group = stack.enter_context(Group(name, self.ranks, self.size, self.timeout, self.place, self.optimizer))
        self.groups[name] = group
        try:
            group.start()
        except GroupFailed as failure:
            self.drop(name, failure)
            return None
        return group

    def drop(self, name: str, failure: GroupFailed) -> None:
        self.groups.pop(name).kill()
        self.failures[name], self.details[name] = str(failure), failure.details
        self.console.print(f"  {CONTENDERS[name].title}: {failure}", markup=False)


def interleave(
    run: Run, names: list[str], rounds: int, steps: int, workloads: Mapping[str, tuple[int, int]] = WORKLOADS
) -> dict[str, dict[str, Measured]]:
    """Measurements by workload and contender."""
    measured = {workload: {name: Measured() for name in names} for workload in workloads}
    order = random.Random(0)
    with ExitStack() as stack:
        for name in names:
            run.start(name, stack)
        for number in range(rounds):
            run.console.print(f"round {number + 1} of {rounds} ...")
            for workload in measured:
                for name in order.sample(list(run.groups), len(run.groups)):
                    try:
                        take_turn(run.groups[name], workloads[workload], steps, measured[workload][name])
                    except GroupFailed as failure:
                        run.drop(name, failure)
    for by_name in measured.values():
        for name, reason in run.failures.items():
            by_name[name] = Measured(failure=reason)
    return measured


def take_turn(group: Group, shape: tuple[int, int], steps: int, measured: Measured) -> None:
    """A step that is weighed, then steps that are timed."""
    peak = group.train_weighed(Train(*shape, steps=1))
    before = group.place.sent()
    trained = group.train(Train(*shape, steps=steps))
    sent = [after - bytes_before for after, bytes_before in zip(group.place.sent(), before, strict=True)]
    measured.bytes_sent += max(sent, default=0)
    measured.disturbances.append(group.disturbance)
    measured.seconds += max((rank.seconds for rank in trained), key=statistics.median)
    measured.loss = statistics.fmean(loss for rank in trained for loss in rank.losses)
    grown = (peak - group.bytes_joined) / group.parameters
    measured.bytes_per_parameter = max(measured.bytes_per_parameter, grown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2; with --memory: 2 4 8")
    parser.add_argument("--size", choices=SIZES, help="default: 33.7m; with --memory: 98m")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS, "both"], help="of torch's AdamW (default: both)")
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", help="default: A B; A alone for fused AdamW")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a turn; all steps with --memory")
    parser.add_argument("--only", help="contenders by comma; the beginning of several names stands for all of them")
    parser.add_argument("--list", action="store_true", help="name the contenders and stop")
    parser.add_argument("--memory", action="store_true", help=f"measure memory alone, by default of {', '.join(OURS)}")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a group has for an answer (default: 300)")
    parser.add_argument("--against", metavar="REVISION", help="measure sherd as it was at that commit too")
    parser.add_argument("--no-save", action="store_true", help=f"write nothing to {RESULTS.name}/")
    arguments = parser.parse_args()
    if arguments.list:
        for name, contender in CONTENDERS.items():
            print(f"{name:14}{contender.missing or contender.title}")
        return
    try:
        names = chosen(arguments.only.split(",")) if arguments.only else None
    except ValueError as error:
        parser.error(str(error))
    end_ranks_when_stopped()
    console = Console(width=130, highlight=False)
    measure = measure_memory if arguments.memory else measure_speed
    with at_revision(arguments.against) if arguments.against else nullcontext():
        if arguments.against:
            names = [*(names or (OURS if arguments.memory else of_training())), *chosen(["before"])]
        tables, saved = measure(arguments, names, console)
    save = not (arguments.no_save or arguments.against)
    publish("training_memory" if arguments.memory else "training", tables, saved, console, save)


@contextmanager
def at_revision(revision: str) -> Iterator[None]:
    """Inside, contenders that are to be as they were `before` have the package of that commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision, "src"], capture_output=True, check=False)
        if archive.returncode:
            raise SystemExit(f"--against {revision}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        os.environ[EARLIER] = str(Path(folder) / "src")
        yield


def measure_speed(arguments: Any, names: list[str] | None, console: Console) -> tuple[list[RenderableType], list[Any]]:
    size = arguments.size or "33.7m"
    chosen_ones = arguments.optimizer or "both"
    tables: list[RenderableType] = []
    saved: list[Any] = []
    for ranks in arguments.ranks or [2]:
        for optimizer in OPTIMIZERS if chosen_ones == "both" else [chosen_ones]:
            run = Run(ranks, size, arguments.timeout, console, optimizer=optimizer)
            default = WORKLOADS if optimizer == "default" else ["A"]
            workloads = {name: WORKLOADS[name] for name in arguments.workloads or default}
            measured = interleave(run, names or of_training(), arguments.rounds, arguments.steps, workloads)
            tables += training_report(ranks, size, measured, workloads, TARGETS[optimizer], optimizer)
            data = {w: {name: asdict(one) for name, one in by.items()} for w, by in measured.items()}
            found = {"ranks": ranks, "size": size, "optimizer": optimizer, "results": data, "failures": run.details}
            saved.append(found)
    return tables, saved


def measure_memory(arguments: Any, names: list[str] | None, console: Console) -> tuple[list[RenderableType], list[Any]]:
    size, shape = arguments.size or "98m", WORKLOADS["B"]
    optimizer = arguments.optimizer if arguments.optimizer in OPTIMIZERS else "default"
    plain = weigh_plain(Run(1, size, arguments.timeout, console, optimizer=optimizer), shape, arguments.steps)
    tables: list[RenderableType] = []
    saved: list[Any] = []
    for ranks in arguments.ranks or [2, 4, 8]:
        run = Run(ranks, size, arguments.timeout, console, optimizer=optimizer)
        weighed = weigh(run, names or list(OURS), shape, arguments.steps)
        tables += memory_report(ranks, size, shape, weighed, plain)
        data = {name: asdict(one) for name, one in weighed.items()}
        found = {"ranks": ranks, "size": size, "optimizer": optimizer, "plain": asdict(plain), "results": data}
        saved.append(found | {"failures": run.details})
    return tables, saved


def publish(name: str, tables: list[RenderableType], saved: Any, console: Console, save: bool) -> None:
    console.print(*tables, sep="\n")
    for run in saved if isinstance(saved, list) else [saved]:
        run["machine"] = machine()
    if save:
        recorder = Console(width=130, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
        recorder.print(*tables, sep="\n")
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.txt").write_text(recorder.export_text())
        text = json.dumps(saved, indent=1).replace(f"{RESULTS.parents[1]}{os.sep}", "")  # in tracebacks of failures
        (RESULTS / f"{name}.json").write_text(text + "\n")


def machine() -> dict[str, object]:
    """What the README says of the machine, and what a reader would ask next."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = found[1] if found else platform.machine()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def end_ranks_when_stopped() -> None:
    signal.signal(signal.SIGTERM, _stop)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit("stopped")  # so that the groups are ended on the way out


if __name__ == "__main__":
    main()
