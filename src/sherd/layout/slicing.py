"""How one bucket is cut into slices, and where each of its parameters is stored.

All entries of a bucket share dtype and placement, and each placement is cut in its own way:

    FlatBucket    entries end to end, each from a block boundary, cut into slices between blocks. Where an entry begins
                  does not depend on the world: only the padding at the tail does.
    SplitBucket   owner by owner: the slice of an owner holds its rows (or columns) of every entry, each from a block
                  boundary
    LayerBucket   whole entries of one owner, its *holder*: end to end, each from a block boundary, and not cut

Slices of a bucket are equal in size: they are padded to the largest. Only where entries are whole does the holder have
all of it and the others nothing. Members are numbered here by their *position* in the bucket. Everything is computed on
demand, owner by owner, since a layout of 1,024 owners has a thousand times more segments than any one rank needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from sherd.layout.entry import Dtypes, Entry
from sherd.layout.placement import BLOCK, Placement, Region, Split, flat_region, padded, share, sharer, slice_size


class Segment(NamedTuple):
    """The part of one parameter inside one slice. Never empty."""

    entry: int
    """index of the parameter among the layout's entries"""
    bucket: int
    owner: int
    """among the ranks of its bucket; in what a layout returns, the rank itself"""
    offset: int
    """where it begins in the slice: a block boundary; its elements are contiguous there"""
    region: Region
    """which elements of the parameter, in the order of the slice"""
    first_block: int
    """the index of its first block in the parameter; the others follow"""

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.region.numel

    @property
    def blocks(self) -> int:
        """How many blocks it fills; the last one may end in padding."""
        return -(-self.region.numel // BLOCK)


class Place(NamedTuple):
    """Where one element is stored, and how many elements from there on are certainly contiguous, itself included."""

    bucket: int
    owner: int
    offset: int
    length: int


@dataclass(frozen=True)
class Bucket(ABC):
    """Parameters that are communicated together: `members` are indices among the layout's entries.

    It is cut for `world` owners, which are `ranks`, or all ranks in order. Where members are kept whole, `holder` is
    the owner of all of it.
    """

    index: int
    members: tuple[int, ...]
    entries: tuple[Entry, ...]
    world: int
    ranks: tuple[int, ...] | None = field(default=None, kw_only=True)
    holder: int | None = field(default=None, kw_only=True)

    def rank_of(self, owner: int) -> int:
        """The rank that is this owner."""
        return owner if self.ranks is None else self.ranks[owner]

    def owner_of(self, rank: int) -> int | None:
        """Which owner this rank is; None if it has nothing of the bucket."""
        if self.ranks is None:
            return rank
        return self.ranks.index(rank) if rank in self.ranks else None

    @property
    def dtype(self) -> str:
        return self.entries[0].dtype

    @property
    def dtypes(self) -> Dtypes:
        """By role; `dtype` is that of the parameters."""
        return self.entries[0].roles

    @property
    def placement(self) -> Placement:
        return self.entries[0].placement

    @property
    def numel(self) -> int:
        """Elements of all slices, padding included."""
        return self.slice_numel * self.world

    @property
    @abstractmethod
    def slice_numel(self) -> int:
        """Elements of each slice that is not empty, padding included: whole blocks."""

    def span(self, owner: int) -> tuple[int, int]:
        """Where the slice of `owner` begins and ends, all slices laid end to end."""
        return owner * self.slice_numel, (owner + 1) * self.slice_numel

    def owned_numel(self, owner: int) -> int:
        """Elements of the slice of `owner`, padding included."""
        low, high = self.span(owner)
        return high - low

    @abstractmethod
    def place(self, position: int, element: int) -> Place:
        """Where an element of the flattened member is stored."""

    def blocks(self, position: int) -> int:
        """How many blocks the member has, over all owners."""
        return padded(self.entries[position].numel) // BLOCK

    def segments(self, owner: int) -> Iterator[Segment]:
        """What the slice of `owner` holds, in slice order."""
        cut = (self._segment(position, owner) for position in self._positions(owner))
        return (segment for segment in cut if segment.region.numel)

    def segments_of(self, position: int) -> Iterator[Segment]:
        """The segments of a member, in owner order."""
        cut = (self._segment(position, owner) for owner in self._owners(position))
        return (segment for segment in cut if segment.region.numel)

    @abstractmethod
    def _positions(self, owner: int) -> Sequence[int]:
        """The members that may have elements in the slice of `owner`: all that do, and a few more."""

    @abstractmethod
    def _owners(self, position: int) -> Sequence[int]:
        """The owners that may hold elements of the member: all that do, and a few more."""

    @abstractmethod
    def _segment(self, position: int, owner: int) -> Segment:
        """The segment of the member in the slice of `owner`, with an empty region if there is none."""


class FlatBucket(Bucket):
    """Members end to end, cut between blocks wherever a slice ends."""

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where each member begins in the bucket, then where the padding at the tail begins."""
        return tuple(accumulate((padded(entry.numel) for entry in self.entries), initial=0))

    @cached_property
    def slice_numel(self) -> int:
        return slice_size(self.begins[-1], self.world)

    def place(self, position: int, element: int) -> Place:
        owner, offset = divmod(self.begins[position] + element, self.slice_numel)
        return Place(self.index, owner, offset, min(self.entries[position].numel - element, self.slice_numel - offset))

    def _positions(self, owner: int) -> range:
        low, high = self.span(owner)
        return range(max(bisect_right(self.begins, low) - 1, 0), bisect_left(self.begins, high, hi=len(self.members)))

    def _owners(self, position: int) -> range:
        if not self.entries[position].numel:
            return range(0)
        return range(self.place(position, 0).owner, self.place(position, self.entries[position].numel - 1).owner + 1)

    def _segment(self, position: int, owner: int) -> Segment:
        begin, (low, high) = self.begins[position], self.span(owner)
        region = flat_region(self.entries[position].numel, begin, low, high)
        offset = max(begin - low, 0)
        return Segment(self.members[position], self.index, owner, offset, region, region.start // BLOCK)


class SplitBucket(Bucket):
    """Rows or columns. Blocks start over in each owner's region, so unlike those of others they depend on the world."""

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        return tuple(Split.of(entry.shape, entry.placement) for entry in self.entries)

    @cached_property
    def _begins(self) -> dict[int, tuple[int, ...]]:
        return {}

    def begins(self, owner: int) -> tuple[int, ...]:
        """Where each member's region begins in the slice of `owner`, then where the padding at the tail begins."""
        if owner not in self._begins:
            sizes = (padded(split.region(self.world, owner).numel) for split in self._splits)
            self._begins[owner] = tuple(accumulate(sizes, initial=0))
        return self._begins[owner]

    @property
    def slice_numel(self) -> int:
        return self.begins(0)[-1]  # `share` gives the first owner no less than any other

    def place(self, position: int, element: int) -> Place:
        split = self._splits[position]
        outer, within = divmod(element, split.extent * split.inner)
        owner = sharer(split.extent, self.world, within // split.inner)
        low, high = share(split.extent, self.world, owner)
        offset = self.begins(owner)[position] + outer * (high - low) * split.inner + within - low * split.inner
        return Place(self.index, owner, offset, high * split.inner - within)

    def blocks(self, position: int) -> int:
        return self._first_block(position, self.world)

    def _positions(self, owner: int) -> range:
        return range(len(self.members))

    def _owners(self, position: int) -> range:
        return range(min(self.world, self._splits[position].extent))

    def _segment(self, position: int, owner: int) -> Segment:
        region = self._splits[position].region(self.world, owner)
        first = self._first_block(position, owner)
        return Segment(self.members[position], self.index, owner, self.begins(owner)[position], region, first)

    def _first_block(self, position: int, owner: int) -> int:
        # The owners before this one hold regions of two sizes only: `more` longer ones, then the others.
        split = self._splits[position]
        base, more = divmod(split.extent, self.world)
        run = split.outer * split.inner
        longer, shorter = padded((base + 1) * run), padded(base * run)
        return (min(owner, more) * longer + max(owner - more, 0) * shorter) // BLOCK


class LayerBucket(FlatBucket):
    """Whole parameters of one owner, the `holder`."""

    @property
    def numel(self) -> int:
        return self.slice_numel

    @property
    def slice_numel(self) -> int:
        return self.begins[-1]

    def span(self, owner: int) -> tuple[int, int]:
        return (0, self.slice_numel) if owner == self.holder else (0, 0)

    def place(self, position: int, element: int) -> Place:
        assert self.holder is not None, "whole parameters have one"
        left = self.entries[position].numel - element
        return Place(self.index, self.holder, self.begins[position] + element, left)
