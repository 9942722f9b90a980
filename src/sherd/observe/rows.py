"""Steps of a run as readers show them: the reports of all ranks on one step, merged into one row. Pure arithmetic.

The loss of a step is what `sherd.log(loss=...)` got, averaged over ranks and calls by weight like every figure; else
what the step's closure returned; else what its backwards started from (the *root*, a mean if there were several). The
last two are averaged over ranks by samples. Norms are reported as squared parts, summed before the square root is
taken. A host's memory is the sum over its ranks by kind: each reports what it allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from sherd.observe.by_rank import ByRank, shared
from sherd.observe.hosts import Host
from sherd.observe.means import sum_by_key, total, weighted_mean
from sherd.observe.phases import PHASES

__all__ = ["PHASES", "LayerFigures", "StepRow", "StepTable", "merge"]

LOSS = "loss"
BACKWARD_LOSS = "loss (as passed to backward)"
_NO_LAYERS: Mapping[str, LayerFigures] = {}


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer in one step. `update_ratio` is the norm of the update over the norm of the values."""

    norm: float | None
    update_ratio: float | None


@dataclass(slots=True, eq=False)
class StepRow:
    """One step of all ranks. What no rank reported is None or empty. Figures logged after it are added later."""

    # A long run has many rows: what ranks reported is kept packed, and merged on access.

    step: int
    t: float  # unix seconds at which the last rank finished it
    ranks: tuple[int, ...]  # those that reported it: all, unless some had ended or died
    closure_loss: float | None
    root: float | None  # mean of the roots of its backwards
    norm: float | None
    distance: float | None  # of the ranks from their consensus, just before they exchanged parameters
    lr: tuple[float | None, ...]
    samples: int | None
    skipped: bool
    spent: ByRank  # seconds
    sent: ByRank  # bytes
    held: ByRank  # memory
    touched: ByRank  # resident memory
    hosts: Sequence[Host]
    tokens: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    layers: Mapping[str, LayerFigures] = field(default_factory=lambda: _NO_LAYERS)

    @property
    def reported_loss(self) -> float | None:
        """The loss passed to `sherd.log`, before or after the step; else what its closure returned."""
        return self.figures.get(LOSS, self.closure_loss)

    @property
    def loss(self) -> float | None:
        """The reported loss, else the mean root of its backwards."""
        told = self.reported_loss
        return self.root if told is None else told

    @property
    def seconds(self) -> dict[str, float]:
        """Mean over ranks, by phase."""
        return self.spent.means()

    @property
    def seconds_by_rank(self) -> dict[int, dict[str, float]]:
        """By rank, then by phase."""
        return self.spent.floats()

    @property
    def bytes(self) -> dict[str, int]:
        """What all ranks sent, by kind."""
        return self.sent.sums()

    @property
    def memory(self) -> dict[int, dict[str, int]]:
        """By rank, then by kind."""
        return self.held.integers()

    @property
    def host_memory(self) -> dict[str, dict[str, int]]:
        """By host, then by kind."""
        return _by_host(self.hosts, self.memory)

    @property
    def resident(self) -> dict[int, dict[str, int]]:
        """By rank: private and shared bytes of the process."""
        return self.touched.integers()

    @property
    def host_resident(self) -> dict[str, int]:
        """Bytes of the processes of each host."""
        resident = self.resident
        found = {host.name: _host_resident(host, resident) for host in self.hosts}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def duration(self) -> float | None:
        """Seconds that the step took on the slowest rank."""
        return self.spent.largest()

    @property
    def samples_per_second(self) -> float | None:
        """Of all ranks together; None where samples or times are unknown."""
        return _rate(self.samples, self.duration)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together; None where tokens or times are unknown."""
        return _rate(self.tokens, self.duration)

    @property
    def communication_share(self) -> float | None:
        """The fraction of the ranks' time spent in exposed communication, from 0 to 1."""
        seconds = self.seconds
        total = sum(seconds.values())
        return seconds.get("communication", 0.0) / total if total > 0 else None

    @property
    def waiting(self) -> dict[int, float]:
        """Seconds that each rank spent waiting for others: its communication above that of the rank with the least.

        The last rank to reach a collective waits for nobody, so what it spends is the cost of the exchange itself.
        """
        spent = {rank: each.get("communication", 0.0) for rank, each in self.seconds_by_rank.items()}
        least = min(spent.values(), default=0.0)
        return {rank: each - least for rank, each in spent.items()}


class StepTable(Sequence[StepRow]):
    """The complete steps of a run, in order."""

    def __init__(self, rows: Iterable[StepRow] = ()) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> StepRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRow]: ...
    def __getitem__(self, index: int | slice) -> StepRow | list[StepRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StepRow]:
        return iter(self._rows)

    def append(self, row: StepRow) -> None:
        """Add the next complete step."""
        self._rows.append(row)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of an attribute of the rows such as "norm"; rows without it are left out."""
        return _known((row.step, getattr(row, name)) for row in self._rows)

    def figure(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a figure of `sherd.log`; rows without it are left out."""
        return _known((row.step, row.figures.get(name)) for row in self._rows)

    @property
    def reports_loss(self) -> bool:
        """Whether the run reported a loss in any step. The roots of backwards may then be something else."""
        return any(row.reported_loss is not None for row in self._rows)

    @property
    def loss_name(self) -> str:
        """The name of what `losses` returns."""
        return LOSS if self.reports_loss or all(row.root is None for row in self._rows) else BACKWARD_LOSS

    def losses(self) -> tuple[list[int], list[float]]:
        """Steps and their losses. Only reported ones, if there are any: roots in between would mix two curves."""
        return self.column("reported_loss" if self.reports_loss else "root")

    @property
    def figure_names(self) -> list[str]:
        """The names of figures of `sherd.log`, in the order of first use, without the loss."""
        return list(dict.fromkeys(name for row in self._rows for name in row.figures if name != LOSS))


def merge(
    step: int,
    t: float,
    reports: Mapping[int, Mapping[str, Any]],
    world: int,
    hosts: Sequence[Host],
) -> StepRow:
    """One row from the `step` events of ranks, without what was logged."""
    ranks = sorted(reports)
    each = {rank: reports[rank] for rank in ranks}
    whole = len(ranks) >= world
    layers = [fields["layers"] for fields in each.values() if fields.get("layers")] if whole else []
    return StepRow(
        step=step,
        t=t,
        ranks=shared(tuple(ranks)),
        closure_loss=_mean_over_ranks("loss", list(each.values())),
        root=_mean_over_ranks("root", list(each.values())),
        norm=_root_of_sum([fields.get("norm_squared") for fields in each.values()]) if whole else None,
        distance=_root_of_sum([fields.get("distance_squared") for fields in each.values()]) if whole else None,
        lr=next((tuple(fields["lr"]) for fields in each.values() if fields.get("lr")), ()),
        samples=total(fields.get("samples") for fields in each.values()),
        skipped=any(bool(fields.get("skipped")) for fields in each.values()),
        spent=_packed("seconds", each),
        sent=_packed("bytes", each),
        held=_packed("memory", each),
        touched=_packed("resident", each),
        hosts=hosts,
        layers=_layers(layers) if layers else _NO_LAYERS,
    )


def _mean_over_ranks(name: str, reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Weighted by samples, over the ranks that reported it."""
    told = [(each[name], each.get("samples")) for each in reports if each.get(name) is not None]
    return weighted_mean([value for value, _ in told], [weight for _, weight in told]) if told else None


def _packed(name: str, reports: Mapping[int, Mapping[str, Any]]) -> ByRank:
    return ByRank({rank: fields[name] for rank, fields in reports.items() if fields.get(name)})


def _by_host(hosts: Iterable[Host], memory: Mapping[int, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    sums = {host.name: sum_by_key(memory[rank] for rank in host.ranks if rank in memory) for host in hosts}
    return {name: kinds for name, kinds in sums.items() if kinds}


def _host_resident(host: Host, resident: Mapping[int, Mapping[str, int]]) -> int | None:
    """Private bytes add up. Ranks touch the same shared pages, so the largest count is the best estimate."""
    there = [resident[rank] for rank in host.ranks if rank in resident]
    if not there:
        return None
    return sum(each.get("private", 0) for each in there) + max(each.get("shared", 0) for each in there)


def _layers(reports: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, LayerFigures]:
    found = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        shares = [report[name] for report in reports if name in report]
        norm, update, value = (
            _root_of_sum([share.get(key) for share in shares])
            for key in ("norm_squared", "update_squared", "value_squared")
        )
        found[name] = LayerFigures(norm, update / value if update is not None and value else None)
    return found


def _root_of_sum(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    if not known:
        return None
    total = sum(known)
    return math.sqrt(total) if total >= 0 else math.nan


def _rate(count: float | None, seconds: float | None) -> float | None:
    return count / seconds if count is not None and seconds else None


def _known(pairs: Iterable[tuple[int, Any]]) -> tuple[list[int], list[float]]:
    known = [(step, value) for step, value in pairs if isinstance(value, (int, float))]
    return [step for step, _ in known], [value for _, value in known]
