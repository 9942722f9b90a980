"""Steps of a run as a reader shows them: what every rank reported of one step, merged into one row. Pure arithmetic.

Losses are averaged over ranks by samples, and figures by their own weights. Norms come as shares that are added up
before the root is taken. A host's memory is the sum over its ranks by kind: each accounts for what it allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from sherd.observe.hosts import Host

PHASES = ("data", "forward", "backward", "communication", "update", "rest")
"""What a step's time goes into, in the order of a step."""


@dataclass(frozen=True)
class LayerFigures:
    """One layer in one step. `update_ratio` is the length of the update over that of the values."""

    norm: float | None
    update_ratio: float | None


@dataclass(frozen=True, eq=False)
class StepRow:
    """One step of all ranks. What no rank told is None or empty. Figures that are logged after it are added later."""

    step: int
    t: float  # unix seconds at which the last rank finished it
    ranks: tuple[int, ...]  # those that reported it: all, unless some had ended or died
    told_loss: float | None
    root: float | None  # mean of the roots of its backwards
    norm: float | None
    lr: tuple[float | None, ...]
    samples: int | None
    tokens: int | None
    seconds: dict[str, float]  # mean over ranks, by phase
    seconds_by_rank: dict[int, dict[str, float]]
    bytes: dict[str, int]  # sum over ranks
    bytes_by_rank: dict[int, dict[str, int]]
    memory: dict[int, dict[str, int]]  # by rank, then by kind
    host_memory: dict[str, dict[str, int]]  # by host, then by kind
    resident: dict[int, dict[str, int]]  # by rank: private and shared bytes of the process
    host_resident: dict[str, int]
    skipped: bool
    figures: dict[str, float] = field(default_factory=dict)
    layers: dict[str, LayerFigures] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The loss that was told before the step, or after it; else that of the roots of its backwards."""
        told = self.told_loss if self.told_loss is not None else self.figures.get("loss")
        return self.root if told is None else told

    @property
    def duration(self) -> float | None:
        """Seconds that the step took: those of the slowest rank."""
        return max((sum(each.values()) for each in self.seconds_by_rank.values()), default=None)

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
        """The share of the ranks' time that went into exposed communication, from 0 to 1."""
        total = sum(self.seconds.values())
        return self.seconds.get("communication", 0.0) / total if total > 0 else None

    @property
    def waiting(self) -> dict[int, float]:
        """Seconds by rank spent on waiting for others: its communication above that of the rank with the least.

        The rank that comes last to a collective waits for nobody, so what it spends is the cost of the exchange itself.
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
        """Steps and values of a figure, or of an attribute of the rows such as "loss"; rows without it are left out."""
        pairs = [(row.step, _value(row, name)) for row in self._rows]
        known = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    @property
    def figure_names(self) -> list[str]:
        """The names that `sherd.log` was given, in the order of their first use, without the loss."""
        return list(dict.fromkeys(name for row in self._rows for name in row.figures if name != "loss"))


@dataclass(frozen=True)
class LogEntry:
    """One call of `sherd.log` on one rank."""

    figures: Mapping[str, float]
    n: float


def merge(
    step: int,
    t: float,
    reports: Mapping[int, Mapping[str, Any]],
    figures: dict[str, float],
    world: int,
    hosts: Sequence[Host],
) -> StepRow:
    """One row out of the `step` events of ranks, by rank. `figures` are those of all ranks."""
    ranks = sorted(reports)
    each = {rank: reports[rank] for rank in ranks}
    memory = {rank: dict(fields["memory"]) for rank, fields in each.items() if fields.get("memory")}
    resident = {rank: dict(fields["resident"]) for rank, fields in each.items() if fields.get("resident")}
    seconds = {rank: dict(fields["seconds"]) for rank, fields in each.items() if fields.get("seconds")}
    sent = {rank: dict(fields["bytes"]) for rank, fields in each.items() if fields.get("bytes")}
    whole = len(ranks) >= world
    return StepRow(
        step=step,
        t=t,
        ranks=tuple(ranks),
        told_loss=_mean_over_ranks("loss", list(each.values())),
        root=_mean_over_ranks("root", list(each.values())),
        norm=_root_of_sum([fields.get("norm_squared") for fields in each.values()]) if whole else None,
        lr=next((tuple(fields["lr"]) for fields in each.values() if fields.get("lr")), ()),
        samples=_total(fields.get("samples") for fields in each.values()),
        tokens=_total(fields.get("tokens") for fields in each.values()),
        seconds=_mean_by_key(seconds.values()),
        seconds_by_rank=seconds,
        bytes=sum_by_key(sent.values()),
        bytes_by_rank=sent,
        memory=memory,
        host_memory=_by_host(hosts, memory),
        resident=resident,
        host_resident={host.name: found for host in hosts if (found := _host_resident(host, resident)) is not None},
        skipped=any(bool(fields.get("skipped")) for fields in each.values()),
        figures=figures,
        layers=_layers([fields["layers"] for fields in each.values() if fields.get("layers")]) if whole else {},
    )


def weighted_mean(values: Sequence[float], weights: Sequence[float | None]) -> float:
    """The mean by weights. Where one of them is unknown, or all are zero, every value weighs the same."""
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(values) or not sum(known) > 0:
        known = [1] * len(values)
    # A weight of zero takes its value out, even one that is not a number: that rank had no samples.
    total = math.fsum(known)
    parts = [value * (weight / total) for value, weight in zip(values, known, strict=True) if weight]
    return sum(parts) if any(not math.isfinite(part) for part in parts) else math.fsum(parts)


def averaged(logs: Iterable[LogEntry]) -> dict[str, float]:
    """Every figure's mean over calls and ranks, by their weights. Tokens are left out: those of a step are a sum."""
    found: dict[str, tuple[list[float], list[float | None]]] = {}
    for entry in logs:
        for name, value in entry.figures.items():
            if name == "tokens":
                continue
            values, weights = found.setdefault(name, ([], []))
            values.append(value)
            weights.append(entry.n)
    return {name: weighted_mean(values, weights) for name, (values, weights) in found.items()}


def sum_by_key(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums of what has the same name, in the order of first appearance."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def _mean_over_ranks(name: str, reports: Sequence[Mapping[str, Any]]) -> float | None:
    """By samples, over the ranks that told it."""
    told = [(each[name], each.get("samples")) for each in reports if each.get(name) is not None]
    return weighted_mean([value for value, _ in told], [weight for _, weight in told]) if told else None


def _mean_by_key(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    listed = list(parts)
    names = dict.fromkeys(name for part in listed for name in part)
    return {name: math.fsum(part.get(name, 0.0) for part in listed) / len(listed) for name in names}


def _by_host(hosts: Iterable[Host], memory: Mapping[int, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    sums = {host.name: sum_by_key(memory[rank] for rank in host.ranks if rank in memory) for host in hosts}
    return {name: kinds for name, kinds in sums.items() if kinds}


def _host_resident(host: Host, resident: Mapping[int, Mapping[str, int]]) -> int | None:
    """Private bytes add up. Ranks that touch shared pages touch the same ones, so the largest count is the nearest."""
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


def _total(parts: Iterable[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _rate(count: int | None, seconds: float | None) -> float | None:
    return count / seconds if count is not None and seconds else None


def _value(row: StepRow, name: str) -> float | None:
    value = row.figures.get(name)
    value = getattr(row, name, None) if value is None else value
    return value if isinstance(value, (int, float)) else None
