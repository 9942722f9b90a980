"""What `benchmarks.overhead` found: figures with their targets, and tables of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from benchmarks.overhead_contenders import CONTENDERS, PLAIN, SHERD, TORCH_DDP
from benchmarks.overhead_networks import NETWORKS
from benchmarks.overhead_sections import SECTIONS, Measured, Measurement, Result
from benchmarks.training_report import QUIET, few_words, new_table, verdict

NO_SLOWER = 0.97
FASTER = 1.1  # times torch DDP, or NO_SLOWER of no communication
MANY_TENSORS = 1.3  # times torch DDP, under zero2
CPU_PER_STEP, CPU_PER_TENSOR = 100.0, 2.0  # microseconds that sherd may add in a world of one


@dataclass(frozen=True)
class Figure:
    """One contender against its reference."""

    network: str
    optimizer: str
    contender: str
    unit: str  # "times torch DDP", "times the plain loop", "us of CPU time more"
    measured: float | None
    target: float | None
    most: bool = False  # the target is the largest allowed

    @property
    def met(self) -> bool | None:
        if self.measured is None or self.target is None:
            return None
        return self.measured <= self.target if self.most else self.measured >= self.target


def figures(found: Measurement) -> list[Figure]:
    return [figure for result in found.results for figure in _figures(found.section, result)]


def _figures(section: str, result: Result) -> Iterator[Figure]:
    if section == "1-rank":
        yield _alone(result)
        return
    reference = result.contenders[TORCH_DDP].best
    for name, one in result.contenders.items():
        if name in (PLAIN, TORCH_DDP):
            continue
        measured = reference / one.best if reference and one.best else None
        target = _target(result, name) if section == "2-ranks" else NO_SLOWER
        yield Figure(result.network, result.optimizer, name, "times torch DDP", measured, target)


def _target(result: Result, name: str) -> float | None:
    """In times torch DDP; none if what it depends on was not measured."""
    if name == "sherd-zero2" and NETWORKS[result.network].many:
        return MANY_TENSORS
    reference, limit = (result.contenders[other].best for other in (TORCH_DDP, PLAIN))
    return min(FASTER, NO_SLOWER * reference / limit) if reference and limit else None


def _alone(result: Result) -> Figure:
    plain, ours = result.contenders[PLAIN], result.contenders[SHERD]
    row = (result.network, result.optimizer, SHERD)
    if result.optimizer == "AdamW":
        ratio = plain.best / ours.best if plain.best and ours.best else None
        return Figure(*row, "times the plain loop", ratio, NO_SLOWER)
    differences = _differences(plain, ours)
    more = statistics.median(differences) if differences else None
    allowed = CPU_PER_STEP + CPU_PER_TENSOR * result.tensors
    return Figure(*row, "us of CPU time more", more, allowed, most=True)


def _differences(plain: Measured, ours: Measured) -> list[float]:
    """Microseconds of CPU time that a step of ours takes more, round by round: in one both are in the same process."""
    if plain.failure or ours.failure:
        return []
    return [1e6 * (one - other) for other, one in zip(plain.cpu_medians, ours.cpu_medians, strict=True)]


def tables_of(found: Measurement) -> list[Table]:
    table = _table_alone(found) if found.section == "1-rank" else _table_of_ranks(found)
    noise = "CPU more is the median of the rounds, noise what they differ by; " if found.section == "1-rank" else ""
    table.caption = f"{noise}{_losses(found)}; {_quiet_or_not(found)}"
    return [table]


def summary(all_found: list[Measurement]) -> str:
    judged = [figure.met for found in all_found for figure in figures(found)]
    return f"targets met: {judged.count(True)}, missed: {judged.count(False)}, not measured: {judged.count(None)}"


def _title(found: Measurement) -> str:
    section = SECTIONS[found.section]
    cores = "" if section.cores else f" on {len(os.sched_getaffinity(0))} cores"
    thread = "one thread" if section.ranks == 1 else "one thread per rank"
    return f"{section.title}{cores}, {thread}; best median of {found.rounds} round(s)"


def _table_of_ranks(found: Measurement) -> Table:
    table = new_table(
        _title(found), "network", "contender", "step", "of no communication", "times torch DDP", "target", ""
    )
    by_contender = {(figure.network, figure.contender): figure for figure in figures(found)}
    for result in found.results:
        limit = result.contenders[PLAIN].best if PLAIN in result.contenders else None
        heading = _heading(result)
        for name, one in result.contenders.items():
            first = next(heading, "")
            if one.best is None:
                table.add_row(first, CONTENDERS[name].title, few_words(one.failure))
            else:
                row = [first, CONTENDERS[name].title, _milliseconds(one.best)]
                row.append(f"{limit / one.best:.0%}" if limit else "")
                figure = by_contender.get((result.network, name))
                if figure is None:
                    reference = result.contenders[TORCH_DDP].best
                    row.append(f"{reference / one.best:.2f}x" if reference else "")
                table.add_row(*row, *_cells(figure, "{:.2f}x"))
        table.add_section()
    return table


def _table_alone(found: Measurement) -> Table:
    headings = ("network", "optimizer", "plain loop", "sherd", "times plain", "CPU more", "noise", "target", "")
    table = new_table(_title(found), *headings)
    heading: Iterator[str] = iter(())
    for result, figure in zip(found.results, figures(found), strict=True):
        plain, ours = result.contenders[PLAIN], result.contenders[SHERD]
        if result.optimizer == SECTIONS[found.section].optimizers[0]:
            heading = _heading(result)
            table.add_section()
        row = [next(heading, ""), result.optimizer]
        differences = _differences(plain, ours)
        if plain.best is None or ours.best is None or not differences:
            table.add_row(*row, few_words(plain.failure or ours.failure))
            continue
        row += [_milliseconds(plain.best), _milliseconds(ours.best), f"{plain.best / ours.best:.2f}x"]
        row += [f"{statistics.median(differences):+.0f} us", f"{max(differences) - min(differences):.0f} us"]
        table.add_row(*row, *_cells(figure, "{:.0f} us" if figure.most else "{:.2f}x")[-2:])
    return table


def _cells(figure: Figure | None, form: str) -> tuple[str, ...]:
    """Measured, target, verdict."""
    if figure is None:
        return ("", "")
    if figure.target is None:
        return (form.format(figure.measured) if figure.measured else "", "", "not measured")
    measured, judged = verdict(figure.measured, figure.target, form, most=figure.most)
    return measured, ("<= " if figure.most else ">= ") + form.format(figure.target), judged


def _heading(result: Result) -> Iterator[str]:
    """For the first column of rows one below the other."""
    network = NETWORKS[result.network]
    yield network.title
    yield f"{result.parameters / 1e6:.2f} M in {result.tensors:,} tensors"
    yield f"{network.shape} per rank"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _losses(found: Measurement) -> str:
    """All train the same model on the same data; without communication, each rank has its own."""
    worst = 0.0
    for result in found.results:
        compared = {name: one.loss for name, one in result.contenders.items() if one.loss is not None}
        if found.section != "1-rank":
            compared.pop(PLAIN, None)
        if compared:
            losses = compared.values()
            worst = max(worst, (max(losses) - min(losses)) / statistics.fmean(losses))
    return f"losses after the first steps differ by {worst:.1g} at most"


def _quiet_or_not(found: Measurement) -> str:
    mean, worst = statistics.fmean(found.disturbances or [0.0]), max(found.disturbances, default=0.0)
    advice = "" if mean <= QUIET else ": TOO MUCH, measure again on a quiet machine"
    return f"other processes had {mean:.0%} of the cores during turns, {worst:.0%} at worst{advice}"
