"""Numbers and lists as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

KIBI = 1024
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNKNOWN = "\N{EN DASH}"


def of_bytes(count: float) -> str:
    """1536 is "1.5 KiB"."""
    if not math.isfinite(count):
        return UNKNOWN
    power = min(int(math.log2(count)) // 10, len(BYTE_UNITS) - 1) if count >= 1 else 0
    return f"{_three_digits(count / KIBI**power)} {BYTE_UNITS[power]}"


def of_seconds(seconds: float) -> str:
    """0.0123 is "12.3 ms", 75 is "1 min 15 s"."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def of_count(count: float) -> str:
    """33700000 is "33.7 M"."""
    if not math.isfinite(count):
        return UNKNOWN
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(count) >= size:
            return f"{_three_digits(count / (1e3 if size == 1e4 else size))}{unit}"
    return f"{count:,.0f}" if count == int(count) else _three_digits(count)


def of_number(value: float | None) -> str:
    """Four digits, as a loss is read."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def of_share(share: float | None) -> str:
    """0.123 is "12%"."""
    return UNKNOWN if share is None else f"{100 * share:.{0 if share >= 0.1 else 1}f}%"


def of_ranks(ranks: Iterable[int]) -> str:
    """0, 1, 2 and 5 are "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def counted(count: int, thing: str) -> str:
    """ "1 rank", "4 ranks"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
