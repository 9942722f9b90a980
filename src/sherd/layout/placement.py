"""Which elements of one parameter each owner holds.

A *placement* says how a parameter is divided among its owners; a *region* is what one owner holds of it, as runs of
consecutive elements of the row-major flattened parameter. Four placements exist:

    flat      a run of the flattened parameter, cut only between blocks; the bucket decides where (see `slicing`)
    row       whole rows: indices of dimension 0; a parameter with no dimension counts as one row
    column    whole columns: indices of dimension 1 with all later dimensions; needs two dimensions
    layer     the whole parameter on one owner

Rows and columns are divided evenly: when their number is not a multiple of the owners, the first owners hold one more,
and an owner beyond the last row holds nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

from sherd.errors import ConfigError, nearest

BLOCK = 256
"""Elements in a block: the unit of alignment, of cuts and of norms. Checkpoints record it: changing it breaks them."""


class Placement(str, enum.Enum):
    """How a parameter is divided among its owners."""

    FLAT = "flat"
    ROW = "row"
    COLUMN = "column"
    LAYER = "layer"

    @classmethod
    def parse(cls, name: object) -> Placement:
        """The placement of that name."""
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"unknown placement {name!r}; {nearest(name, [kind.value for kind in cls])}") from None


def padded(numel: int) -> int:
    """`numel` rounded up to whole blocks."""
    return -(-numel // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Region:
    """`count` runs of `length` consecutive elements, their starts `stride` apart, the first at `start`.

    Build it with `Region.of`, which gives equal sets of elements equal fields.
    """

    start: int
    length: int
    stride: int
    count: int

    @classmethod
    def of(cls, start: int, length: int, stride: int = 0, count: int = 1) -> Region:
        """The region in canonical form: adjacent runs are joined, and an empty region is all zeros."""
        if length == 0 or count == 0:
            return cls(0, 0, 0, 0)
        if count == 1 or stride == length:
            return cls(start, length * count, length * count, 1)
        return cls(start, length, stride, count)

    @property
    def numel(self) -> int:
        """How many elements it holds."""
        return self.length * self.count

    def runs(self) -> Iterator[tuple[int, int]]:
        """`(start, length)` of each run, in element order."""
        for start in range(self.start, self.start + self.count * self.stride, self.stride or 1):
            yield start, self.length


def share(total: int, owners: int, owner: int) -> tuple[int, int]:
    """The even share `[low, high)` of `total` items that `owner` holds; the first `total % owners` hold one more."""
    base, more = divmod(total, owners)
    low = owner * base + min(owner, more)
    return low, low + base + (owner < more)


def sharer(total: int, owners: int, item: int) -> int:
    """The owner whose `share` holds `item`."""
    base, more = divmod(total, owners)
    longer = more * (base + 1)
    return item // (base + 1) if item < longer else more + (item - longer) // base


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter seen as `(outer, extent, inner)`, whose middle dimension is divided: rows or columns."""

    outer: int
    extent: int
    inner: int

    @classmethod
    def of(cls, shape: tuple[int, ...], placement: Placement) -> Split:
        """The view of `shape` that a row or column placement divides."""
        if placement is Placement.ROW:
            return cls(1, shape[0] if shape else 1, math.prod(shape[1:]))
        if len(shape) < 2:
            raise ConfigError(
                f"a column placement needs two dimensions, found shape {shape}; "
                f"write placement 'row' to divide its elements or 'flat' to divide it between blocks"
            )
        return cls(shape[0], shape[1], math.prod(shape[2:]))

    def region(self, owners: int, owner: int) -> Region:
        """What `owner` of `owners` holds."""
        low, high = share(self.extent, owners, owner)
        return Region.of(low * self.inner, (high - low) * self.inner, self.extent * self.inner, self.outer)


def flat_region(numel: int, begin: int, low: int, high: int) -> Region:
    """The part inside `[low, high)` of a bucket of a parameter of `numel` elements that begins at `begin`."""
    start, stop = max(low - begin, 0), min(high - begin, numel)
    return Region.of(start, max(stop - start, 0))


def regions(shape: tuple[int, ...], placement: Placement, owners: int, *, holder: int = 0) -> tuple[Region, ...]:
    """What each of `owners` holds of a parameter alone in its bucket; `holder` is the owner of a whole layer."""
    numel = math.prod(shape)
    if placement is Placement.FLAT:
        size = slice_size(numel, owners)
        return tuple(flat_region(numel, 0, owner * size, (owner + 1) * size) for owner in range(owners))
    if placement is Placement.LAYER:
        return tuple(Region.of(0, numel if owner == holder else 0) for owner in range(owners))
    split = Split.of(shape, placement)
    return tuple(split.region(owners, owner) for owner in range(owners))


def slice_size(numel: int, owners: int) -> int:
    """Elements of each of `owners` equal slices, in whole blocks, that together hold `numel`."""
    return padded(-(-numel // owners))
