"""How one section of `benchmarks.overhead` is measured: contenders take turns, most in processes of their own."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks.overhead_contenders import CONTENDERS
from benchmarks.overhead_rank import Build, Join, Train, Trained
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


Team = tuple[str, ...]
"""Contenders in the same processes."""


class Measuring:
    """One section, round by round. A contender that fails with one network comes back for the next."""

    def __init__(self, name: str, networks: Iterable[str], effort: Effort, console: Console) -> None:
        self.section, self.console = SECTIONS[name], console
        self.effort = replace(effort, rounds=self.section.more_rounds * effort.rounds)
        self._order = random.Random(0)
        self._groups: dict[Team, Processes] = {}
        results = [
            Result(network, optimizer, contenders={one: Measured() for one in self.section.contenders})
            for network in networks
            if network in self.section.networks
            for optimizer in self.section.optimizers
        ]
        self.found = Measurement(name, self.effort.rounds, effort.turns, results)

    def run(self) -> Measurement:
        for number in range(self.effort.rounds):
            self.console.print(f"{self.section.title}: round {number + 1} of {self.effort.rounds} ...")
            with ExitStack() as stack:
                for result in self.found.results:
                    self._round(result, stack)
            self._groups = {}
        return self.found

    def _round(self, result: Result, stack: ExitStack) -> None:
        taking_part = [team for team in self.section.teams if result.contenders[team[0]].failure is None]
        self._start([team for team in taking_part if team not in self._groups], result, stack)
        turns: dict[str, list[list[Trained]]] = {}
        for team in taking_part:
            order = tuple(self._order.sample(team, len(team)))  # it decides where their memory lies
            build = Build(result.network, result.optimizer, self.section.micro_batches, order)
            if built := self._ask(team, build, result):
                for name in team:
                    of_ranks = [one[name] for one in built]
                    result.parameters, result.tensors = of_ranks[0].parameters, of_ranks[0].tensors
                    result.contenders[name].loss = statistics.fmean(one.loss for one in of_ranks)
                    turns[name] = []
        result.steps = self.effort.steps_of(result.network, self.section)
        team_of = {name: team for team in self.section.teams for name in team}
        for _ in range(self.effort.turns):
            for name in self._order.sample(list(turns), len(turns)):
                team = team_of[name]
                if trained := self._ask(team, Train(result.steps, name), result):
                    turns[name].append(trained)
                    self.found.disturbances.append(self._groups[team].disturbance)
                else:
                    del turns[name]
        for name, of_ranks in turns.items():
            one = result.contenders[name]
            one.medians.append(slowest_median([[rank.seconds for rank in turn] for turn in of_ranks]))
            one.cpu_medians.append(slowest_median([[rank.cpu_seconds for rank in turn] for turn in of_ranks]))

    def _start(self, teams: Sequence[Team], result: Result, stack: ExitStack) -> None:
        """All processes first: they import torch side by side."""
        for team in teams:
            self._groups[team] = stack.enter_context(_processes(self.section, self.effort.timeout))
        for team in teams:
            ranks = self.section.ranks
            self._ask_each(team, [Join(team, rank, ranks, self.effort.timeout) for rank in range(ranks)], result)

    def _ask(self, team: Team, command: Build | Train, result: Result) -> list[Any]:
        """An answer of each rank, or none if the team has failed."""
        return self._ask_each(team, [command] * self.section.ranks, result)

    def _ask_each(self, team: Team, commands: Sequence[Any], result: Result) -> list[Any]:
        group = self._groups.get(team)
        if group is None:
            return []  # it could not even start
        try:
            return group.ask_watched(commands)
        except GroupFailed as failure:
            self._groups.pop(team).kill()
            names = ", ".join(CONTENDERS[name].title for name in team)
            for name in team:
                result.contenders[name].failure = str(failure)
                self.found.details[f"{result.network}, {result.optimizer}, {name}"] = failure.details
            self.console.print(f"  {names}, {result.network}, {result.optimizer}: {failure}", markup=False)
            return []


def _processes(section: Section, timeout: float) -> Processes:
    cores = sorted(os.sched_getaffinity(0))[: section.cores] if section.cores else None
    group = Processes("benchmarks.overhead_rank", timeout)
    for variables in ThisMachine().meeting_point(section.ranks):
        group.start_process(variables, cores=cores)
    return group
