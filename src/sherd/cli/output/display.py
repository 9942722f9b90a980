"""The state of a run, as a line of text and as a frame for the terminal. Reads a `RunRecord`; draws nothing itself."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sherd.cli.output.curve import curve
from sherd.cli.words import ranges
from sherd.observe.rows import PHASES, StepRow
from sherd.observe.runs import RunRecord

RECENT = 20  # steps that rates and fractions of time are taken over
MOST_RANKS = 8  # whose memory is shown individually
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Figures:
    """What is shown of a run. Unknown values are None or empty."""

    head: str  # strategy, ranks, model
    step: int  # complete ones
    total: int | None
    loss: float | None
    loss_name: str
    norm: float | None
    lr: float | None
    rate: str
    shares: dict[str, float]  # fractions of the time, by phase
    rank_memory: dict[int, int]
    host_memory: dict[str, int]
    elapsed: float
    left: float | None


def figures(record: RunRecord, now: float) -> Figures:
    """The figures of the last steps of a run."""
    rows = record.steps[-RECENT:]
    last = rows[-1] if rows else None
    _, losses = record.steps.losses()
    total = record.total_steps
    speed = _per_second(rows, [1] * len(rows))
    done = last.step + 1 if last else 0
    left = (total - done) / speed if total and speed else None
    return Figures(
        head=_head(record),
        step=done,
        total=total,
        loss=losses[-1] if losses else None,
        loss_name=record.steps.loss_name,
        norm=last.norm if last else None,
        lr=last.lr[0] if last and last.lr else None,
        rate=_rate(rows),
        shares=_shares(rows),
        rank_memory={rank: sum(kinds.values()) for rank, kinds in (last.resident or last.memory).items()}
        if last
        else {},
        host_memory=_host_memory(last) if last else {},
        elapsed=max(0.0, now - (record.start_time or now)),
        left=max(0.0, left) if left is not None else None,
    )


def in_words(found: Figures) -> str:
    """One line."""
    parts = [f"step {_of(found)}"]
    if found.loss is not None:
        parts.append(f"{found.loss_name} {found.loss:.4g}")
    parts.append(found.rate)
    if "communication" in found.shares:
        parts.append(f"communication {found.shares['communication']:.0%}")
    parts += _memory(found)
    if found.left is not None:
        parts.append(f"{_clock(found.left)} left")
    return ", ".join(part for part in parts if part)


def frame(record: RunRecord, columns: int, rows: int, now: float | None = None) -> list[str]:
    """Coloured lines for a terminal of this size."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    found = figures(record, time.time() if now is None else now)
    if columns < 40 or rows < 12:
        return [in_words(found)[: columns - 1]]
    inside = columns - 5
    steps, losses = record.steps.losses()
    texts = [Text(found.head, "dim"), Text.assemble(*_now(found))]
    texts += [Text(line, "cyan") for line in curve(steps, losses, inside, min(10, rows - 12))]
    texts += [Text(" · ".join([found.rate, *_memory(found)]).strip(" ·")), Text.assemble(*_phases(found.shares))]
    for text in texts:
        text.truncate(inside, overflow="ellipsis")
    panel = Panel(Group(*[text for text in texts if text.plain]), title="sherd", title_align="left", border_style="dim")
    buffer = io.StringIO()
    Console(file=buffer, width=columns - 1, force_terminal=True, legacy_windows=False, highlight=False).print(panel)
    return buffer.getvalue().splitlines()


def _head(record: RunRecord) -> str:
    start = record.start or {}
    parts = [str(start.get("strategy", "")), f"{record.world} rank{'s' * (record.world != 1)}" if record.world else ""]
    if len(record.hosts) > 1:
        parts.append(f"{len(record.hosts)} hosts")
    if elements := (start.get("model") or {}).get("elements"):
        parts.append(f"{_short(elements)} parameters")
    return " · ".join(part for part in parts if part) or "waiting for the first step"


def _now(found: Figures) -> Iterable[str | tuple[str, str]]:
    yield (f"step {_of(found)}", "bold")
    known = ((found.loss_name, found.loss, ".4g"), ("norm", found.norm, ".3g"), ("lr", found.lr, ".3g"))
    for name, value, form in known:
        if value is not None:
            yield f"   {name} "
            yield (format(value, form), "bold")
    yield f"   {_clock(found.elapsed)}"
    if found.left is not None:
        yield f", {_clock(found.left)} left"


def _phases(shares: Mapping[str, float]) -> Iterable[str | tuple[str, str]]:
    colours = dict(zip(PHASES, ("yellow", "green", "blue", "red", "magenta", "dim"), strict=True))
    for number, (phase, share) in enumerate(shares.items()):
        yield (f"{'  ' if number else ''}{phase} {share:.0%}", colours.get(phase, ""))


def _of(found: Figures) -> str:
    return f"{found.step}/{found.total}" if found.total else str(found.step)


def _memory(found: Figures) -> list[str]:
    """By rank and by host."""
    parts = []
    ranks = found.rank_memory
    if 1 < len(ranks) <= MOST_RANKS:
        parts.append("memory of ranks " + ", ".join(f"{rank}: {_size(size)}" for rank, size in ranks.items()))
    elif ranks:
        least, most = min(ranks.values()), max(ranks.values())
        size = _size(most) if len(ranks) == 1 else f"{_size(least)} to {_size(most)}"
        parts.append(f"memory of {'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)} {size}")
    parts += [f"host {name} {_size(size)}" for name, size in list(found.host_memory.items())[:MOST_RANKS]]
    return parts


def _host_memory(row: StepRow) -> dict[str, int]:
    return dict(row.host_resident) or {name: sum(kinds.values()) for name, kinds in row.host_memory.items()}


def _shares(rows: list[StepRow]) -> dict[str, float]:
    spent = {phase: sum(row.seconds.get(phase, 0.0) for row in rows) for phase in PHASES}
    total = sum(spent.values())
    return {phase: seconds / total for phase, seconds in spent.items()} if total > 0 else {}


def _rate(rows: list[StepRow]) -> str:
    for name in ("tokens", "samples"):
        counts = [getattr(row, name) for row in rows]
        if counts and None not in counts and (rate := _per_second(rows, counts)):
            return f"{_short(rate)} {name}/s"
    steps = _per_second(rows, [1] * len(rows))
    return f"{steps:.3g} steps/s" if steps else ""


def _per_second(rows: list[StepRow], counts: list[int]) -> float | None:
    """By wall clock from the first of the steps to the last: what users wait for, including pauses between steps."""
    if len(rows) > 1 and (seconds := rows[-1].t - rows[0].t) > 0:
        return sum(counts[1:]) / seconds
    duration = rows[0].duration if len(rows) == 1 else None
    return counts[0] / duration if duration else None


def _short(number: float) -> str:
    """Three digits and a unit; below ten thousand, the number itself."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if number >= least:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
