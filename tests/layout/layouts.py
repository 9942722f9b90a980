"""What the tests of the layout share: random models and layouts, and real arrays cut by them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from sherd.layout import Entry, Placement, Region, Segment, ShardLayout

Slices = dict[tuple[int, int], np.ndarray]
"""The slice of each (bucket, owner)."""

PADDING = -1
WORLDS = st.integers(1, 9)
BUCKET_NUMELS = st.sampled_from([1, 256, 1000, 4096, 1 << 22])

# Sizes from nothing to several blocks, with the primes that never divide.
SHAPES = st.one_of(
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
    st.sampled_from(
        [(), (0,), (3, 0, 5), (1,), (255,), (256,), (257,), (7, 15), (1, 600), (600, 1), (23, 129), (4, 5, 67)]
    ),
)


def allowed(shape: tuple[int, ...]) -> list[Placement]:
    return [kind for kind in Placement if kind is not Placement.COLUMN or len(shape) >= 2]


@st.composite
def models(draw: st.DrawFn, kinds: tuple[Placement, ...] = tuple(Placement)) -> tuple[Entry, ...]:
    """Up to eight parameters of mixed shapes, dtypes and placements."""
    entries = []
    for number, shape in enumerate(draw(st.lists(SHAPES, max_size=8))):
        placement = draw(st.sampled_from([kind for kind in allowed(shape) if kind in kinds]))
        entries.append(Entry(f"p{number}", shape, draw(st.sampled_from(["float32", "bfloat16"])), placement))
    return tuple(entries)


@st.composite
def relayouts(draw: st.DrawFn, entries: tuple[Entry, ...]) -> ShardLayout:
    """Any layout of these parameters: any order, placements, world, buckets and tree, on all ranks or on some."""
    placed = [
        Entry(entry.name, entry.shape, entry.dtype, draw(st.sampled_from(allowed(entry.shape))))
        for entry in draw(st.permutations(entries))
    ]
    world = draw(WORLDS)
    group = draw(st.integers(1, world))
    some = st.none() | st.sets(st.integers(0, world - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    ranks = [draw(some) for _ in placed]
    return ShardLayout.build(placed, world, bucket_numel=draw(BUCKET_NUMELS), group=group, ranks=ranks)


layouts = models().flatmap(relayouts)


def arrays(entries: tuple[Entry, ...]) -> dict[str, np.ndarray]:
    """A flattened array for each parameter, in which no two elements of the model are equal."""
    values, first = {}, 0
    for entry in sorted(entries, key=lambda entry: entry.name):
        values[entry.name] = np.arange(first, first + entry.numel)
        first += entry.numel
    return values


def elements(region: Region) -> np.ndarray:
    """The elements of a region, by its definition."""
    runs = [np.arange(region.length) + region.start + run * region.stride for run in range(region.count)]
    return np.concatenate(runs) if runs else np.arange(0)


def span(segment: Segment) -> slice:
    """Where a segment lies in its slice."""
    return slice(segment.offset, segment.offset + segment.region.numel)


def empty_slices(layout: ShardLayout) -> Slices:
    return {
        (bucket.index, owner): np.full(bucket.owned_numel(place), PADDING)
        for bucket in layout.buckets
        for owner in range(layout.world)
        if (place := bucket.owner_of(owner)) is not None
    }


def cut(layout: ShardLayout, values: dict[str, np.ndarray]) -> Slices:
    """The slices of these arrays."""
    slices = empty_slices(layout)
    for owner in range(layout.world):
        for segment in layout.segments(owner):
            part = values[layout.entries[segment.entry].name][elements(segment.region)]
            slices[segment.bucket, owner][span(segment)] = part
    return slices
