"""What is mapped over: anything with a length and numbers for items, or a loader, whose items are its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader

from sherd.data.iterable import rows
from sherd.data.scheme import length
from sherd.data.whole import Agreed, Read, whole
from sherd.errors import ConfigError


class Source(Protocol):
    """The items, by number."""

    count: int | None
    """How many there are; None for a stream that nobody has read to its end."""
    kind: str
    """in words, the same on every rank"""
    checksum: int
    """of what is known of its contents"""

    def agree(self, agreed: Agreed) -> None:
        """Let rank 0 decide what ranks might see differently. Collective, if there is anything."""

    def read(self, wanted: Iterator[range]) -> Read:
        """The items of each range, in that order."""

    def samples(self, number: int, item: Any) -> int:
        """How many samples an item has, if it is a batch."""


class Indexed:
    """Items that can be asked for by number."""

    def __init__(self, data: Any) -> None:
        self.count: int | None = len(data)
        self.kind = f"a {type(data).__name__}"
        self.checksum = 0
        self._data = data

    def agree(self, agreed: Agreed) -> None:
        pass

    def read(self, wanted: Iterator[range]) -> Read:
        for part in wanted:
            yield part, (self._data[number] for number in part)  # a generator: StopIteration is an error in it

    def samples(self, number: int, item: Any) -> int:
        return rows(item)


def source_of(data: Any) -> Source:
    """What to read `data` by. A sampler draws its order here."""
    if isinstance(data, DataLoader):
        return whole(data)
    kind = type(data).__name__
    if isinstance(data, Mapping):
        raise ConfigError(f"got a {kind} as data; write list(data.items()), whose items are pairs")
    if length(data) < 0 or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"got a {kind} as data, which cannot be cut into chunks; write a list, a dataset with a length, a range, "
            f"or a DataLoader. A generator can be made a list: list(data)"
        )
    return Indexed(data)
