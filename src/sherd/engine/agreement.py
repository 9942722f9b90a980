"""What ranks tell each other at the end of a round, in one small sum.

Some of it none of them knows alone: which parameters were used anywhere, whether every sum is finite, what all
contributions weigh together, which buckets have late gradients. The rest must be the same everywhere, and is not if the
ranks' programs have come apart: the step, how many backwards were made, which parameters require a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sherd.comm import Communicator
from sherd.errors import Diverged

_TRAINABLE = float(1 << 24)
"""How many ranks require a gradient of an entry is counted in units of this, on top of how many have used it."""


@dataclass(frozen=True)
class Report:
    """What one rank says."""

    step: int
    backwards: int
    finite: bool
    weight: float
    weighed: bool
    late: Sequence[bool]
    """by bucket"""
    used: Sequence[bool]
    """by entry"""
    trainable: Sequence[bool]
    """by entry"""


@dataclass(frozen=True)
class Agreement:
    """What all ranks say together."""

    finite: bool
    weight: float
    weighing: float
    """the number of ranks that weighed"""
    late: list[bool]
    used: list[bool]


def agree(comm: Communicator, report: Report, names: Sequence[str]) -> Agreement:
    """Sum the ranks' reports; raise if their programs have come apart. Collective."""
    step, backwards = float(report.step), float(report.backwards)
    head = [float(not report.finite), report.weight, float(report.weighed), step, step**2, backwards, backwards**2]
    entries = [_TRAINABLE * can + has for can, has in zip(report.trainable, report.used, strict=True)]
    mine = torch.tensor([*head, *map(float, report.late), *entries], dtype=torch.float64)
    with comm.counters.agreeing():
        total: list[float] = comm.all_reduce(mine).wait().tolist()
        bad, weight, weighing, *counts = total[: len(head)]
        late, entries = total[len(head) : -len(entries) or None], total[len(total) - len(entries) :]
        _compare_numbers(comm, report, counts)
        _compare_trainable(comm, report, entries, names)
    used = [count % _TRAINABLE > 0 for count in entries]
    return Agreement(bad == 0, weight, weighing, [count > 0 for count in late], used)


def _compare_numbers(comm: Communicator, report: Report, counts: Sequence[float]) -> None:
    step, step_squares, backwards, backwards_squares = counts
    # Numbers are all the same exactly if the square of their sum is their count times the sum of their squares.
    if step**2 != comm.world * step_squares:
        steps = comm.all_gather_object(report.step)
        raise _diverged(steps, lambda step: f"is in step {step}", "take the same steps on every rank")
    if backwards**2 != comm.world * backwards_squares:
        made = comm.all_gather_object(report.backwards)
        fix = "make as many on every rank; one without data can be given no weight: sherd.weigh(model, 0)"
        raise _diverged(made, lambda count: f"made {count} backwards for step {report.step}", fix)


def _compare_trainable(comm: Communicator, report: Report, counts: Sequence[float], names: Sequence[str]) -> None:
    for entry, count in enumerate(counts):
        if count // _TRAINABLE not in (0, comm.world):
            can = comm.all_gather_object(report.trainable[entry])
            yes, no = can.index(True), can.index(False)
            raise Diverged(
                f"step {report.step}: parameter {names[entry]!r} requires a gradient on rank {yes} and not on rank "
                f"{no}; set requires_grad alike on every rank",
                ranks=(yes, no),
            )


def _diverged(found: Sequence[int], words: Callable[[int], str], fix: str) -> Diverged:
    other = next(rank for rank, number in enumerate(found) if number != found[0])
    return Diverged(
        f"the ranks have come apart: rank 0 {words(found[0])} and rank {other} {words(found[other])}; {fix}",
        ranks=(0, other),
    )
