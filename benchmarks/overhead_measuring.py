"""How one section of `benchmarks.overhead` is measured: contenders take turns, each in processes of its own."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from benchmarks.overhead_contenders import CONTENDERS
from benchmarks.overhead_rank import Build, Join, Train
from benchmarks.overhead_sections import SECTIONS, Effort, Measured, Measurement, Result, Section
from benchmarks.processes import GroupFailed, Processes
from benchmarks.training_place import ThisMachine


def slowest_median(turns: Sequence[Sequence[Sequence[float]]]) -> float:
    """Of the rank whose median step is the slowest; `turns[turn][rank][step]`.

    Not the median of each step's slowest rank: without communication nothing makes the ranks slow in the same step, so
    that would be longer than a step of either.
    """
    medians: list[float] = [
        statistics.median([step for turn in of_rank for step in turn]) for of_rank in zip(*turns, strict=True)
    ]
    return max(medians)


class Measuring:
    """One section, round by round. A contender that fails with one network comes back for the next."""

    def __init__(self, name: str, networks: Iterable[str], effort: Effort, console: Console) -> None:
        self.section, self.effort, self.console = SECTIONS[name], effort, console
        self._order = random.Random(0)
        self._groups: dict[str, Processes] = {}
        results = [
            Result(network, optimizer, contenders={one: Measured() for one in self.section.contenders})
            for network in networks
            if network in self.section.networks
            for optimizer in self.section.optimizers
        ]
        self.found = Measurement(name, effort.rounds, effort.turns, results)

    def run(self) -> Measurement:
        for number in range(self.effort.rounds):
            self.console.print(f"{self.section.title}: round {number + 1} of {self.effort.rounds} ...")
            with ExitStack() as stack:
                for result in self.found.results:
                    self._round(result, stack)
            self._groups = {}
        return self.found

    def _round(self, result: Result, stack: ExitStack) -> None:
        taking_part = [name for name, one in result.contenders.items() if one.failure is None]
        self._start([name for name in taking_part if name not in self._groups], result, stack)
        turns: dict[str, list[Any]] = {}
        build = Build(result.network, result.optimizer, self.section.micro_batches)
        for name in taking_part:
            if built := self._ask(name, build, result):
                result.parameters, result.tensors = built[0].parameters, built[0].tensors
                result.contenders[name].loss = statistics.fmean(one.loss for one in built)
                turns[name] = []
        result.steps = self.effort.steps_of(result.network, self.section)
        for _ in range(self.effort.turns):
            for name in self._order.sample(list(turns), len(turns)):
                if trained := self._ask(name, Train(result.steps), result):
                    turns[name].append(trained)
                    self.found.disturbances.append(self._groups[name].disturbance)
                else:
                    del turns[name]
        for name, of_ranks in turns.items():
            one = result.contenders[name]
            one.medians.append(slowest_median([[rank.seconds for rank in turn] for turn in of_ranks]))
            one.cpu_medians.append(slowest_median([[rank.cpu_seconds for rank in turn] for turn in of_ranks]))

    def _start(self, names: Sequence[str], result: Result, stack: ExitStack) -> None:
        """All processes first: they import torch side by side."""
        for name in names:
            self._groups[name] = stack.enter_context(_processes(self.section, self.effort.timeout))
        for name in names:
            ranks = self.section.ranks
            self._ask_each(name, [Join(name, rank, ranks, self.effort.timeout) for rank in range(ranks)], result)

    def _ask(self, name: str, command: Build | Train, result: Result) -> list[Any]:
        """An answer of each rank, or none if the contender has failed."""
        return self._ask_each(name, [command] * self.section.ranks, result)

    def _ask_each(self, name: str, commands: Sequence[Any], result: Result) -> list[Any]:
        group = self._groups.get(name)
        if group is None:
            return []  # it could not even start
        try:
            return group.ask_watched(commands)
        except GroupFailed as failure:
            self._groups.pop(name).kill()
            result.contenders[name].failure = str(failure)
            self.found.details[f"{result.network}, {result.optimizer}, {name}"] = failure.details
            title = f"{CONTENDERS[name].title}, {result.network}, {result.optimizer}"
            self.console.print(f"  {title}: {failure}", markup=False)
            return []


def _processes(section: Section, timeout: float) -> Processes:
    cores = sorted(os.sched_getaffinity(0))[: section.cores] if section.cores else None
    group = Processes("benchmarks.overhead_rank", timeout)
    for variables in ThisMachine().meeting_point(section.ranks):
        group.start_process(variables, cores=cores)
    return group
