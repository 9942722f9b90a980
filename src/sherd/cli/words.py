"""Small helpers of the launcher that do not need torch."""

from __future__ import annotations

from collections.abc import Iterable

TOKEN = "SHERD_TOKEN"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges: 0-2, 5."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def ranks_in_words(numbers: Iterable[int]) -> str:
    """rank 3; ranks 0-2, 5."""
    all_of_them = set(numbers)
    return f"rank{'s' * (len(all_of_them) != 1)} {ranges(all_of_them)}"
