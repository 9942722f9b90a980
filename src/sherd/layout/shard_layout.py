"""The shard layout: where every element of every parameter is stored, for any number of owners. Pure arithmetic.

The nouns, used in this sense everywhere:

    entry       one parameter, by name, global shape, dtype and placement
    placement   how an entry is divided among its owners: flat, row, column or layer (`placement`)
    owner       the rank that keeps, reduces and updates a part of the state: a number below `world`
    block       `BLOCK` elements. Every entry starts on a block boundary and slices are cut between blocks only, so that
                a norm can be a sum over the same blocks, added in block order, whatever the number of owners. (Rows and
                columns divide elsewhere: their blocks start over in each owner's region and depend on the world.)
    bucket      entries of one dtype and one placement that are communicated together
    ranks       the owners of a bucket that not all ranks have; its slices are over these only
    slice       what one owner holds of a bucket; the slices of a bucket are equal in size, unless it is of whole layers
    holder      the owner of a bucket of whole layers: it has all of it, and the slices of the others are empty
    region      which elements of an entry an owner holds
    segment     the part of one entry inside one slice: a region and its offset
    padded      rounded up to whole blocks, or to equal slices; `numel` alone never counts padding in an entry, a region
                or a segment, and always does in a bucket or a slice, which are memory
    position    the index of an entry among its bucket's members; everywhere else entries have the layout's indices
    tree        the order in which the owners' contributions are added, a part of the layout since it affects bits

`packing` chooses the buckets, `slicing` cuts one, `description` records the layout, `reslice` converts one layout to
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from sherd.errors import ConfigError, nearest
from sherd.layout.description import Description, describe, read
from sherd.layout.entry import ITEMSIZE, Entry
from sherd.layout.packing import Holders, Packed, pack
from sherd.layout.placement import BLOCK, Placement
from sherd.layout.slicing import Bucket, FlatBucket, LayerBucket, Place, Segment, SplitBucket
from sherd.layout.tree import SummationTree

BUCKET_NUMEL = 4 * 1024 * 1024


class Block(NamedTuple):
    """One block of an entry, and its offset in its owner's slice. `block` counts within the entry."""

    entry: int
    block: int
    bucket: int
    offset: int


@dataclass(frozen=True)
class ShardLayout:
    """Entries, packed into buckets and cut for `world` owners. Make one with `build` or `from_json`."""

    entries: tuple[Entry, ...]
    world: int
    group: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def build(
        cls,
        entries: Iterable[Entry],
        world: int,
        *,
        bucket_numel: int = BUCKET_NUMEL,
        group: int | None = None,
        order: Sequence[int] | None = None,
        keys: Sequence[object] | None = None,
        ranks: Sequence[tuple[int, ...] | None] | None = None,
        holders: Sequence[int | None] | None = None,
    ) -> ShardLayout:
        """Pack `entries` into buckets of at most `bucket_numel` elements; sum in groups of `group`.

        They are packed in their own order, or in `order`, which lists their indices: gradients do not arrive in the
        order of the parameters. Entries with different `keys` do not share a bucket. Nor do those with different
        `ranks`, which are the owners of an entry; all are if it has None. `holders` are the ranks that own whole
        layers, which are balanced unless they are given. Without `group` all owners are one group: plain rank order.
        """
        entries = tuple(entries)
        order = range(len(entries)) if order is None else order
        if sorted(order) != list(range(len(entries))):
            raise ConfigError(f"order must list each of the {len(entries)} entries once, found {list(order)[:8]}...")
        tree = SummationTree(world=world, group=world if group is None else group)
        if bucket_numel < 1:
            raise ConfigError(f"bucket_numel={bucket_numel} holds nothing; write a positive number of elements")
        having = ranks or [None] * len(entries)
        holding = holders or Holders(world).choose(entries, ranks=having)
        kinds = [(having[index], holding[index], None if keys is None else keys[index]) for index in order]
        packed = []
        for positions in pack([entries[index] for index in order], kinds, bucket_numel):
            members = tuple(order[position] for position in positions)
            packed.append(_packed(members, entries[members[0]], holding[members[0]], having[members[0]]))
        return cls._cut(entries, tree, packed)

    @classmethod
    def _cut(cls, entries: tuple[Entry, ...], tree: SummationTree, packed: Sequence[Packed]) -> ShardLayout:
        if twice := sorted(name for name, times in Counter(entry.name for entry in entries).items() if times > 1):
            raise ConfigError(f"a layout needs one entry per name, found more than one of {twice}; pass each once")
        buckets = tuple(_cut_bucket(index, entries, tree.world, chosen) for index, chosen in enumerate(packed))
        return cls(entries, tree.world, tree.group, buckets)

    def sorted_by(self, keys: Sequence[int]) -> ShardLayout:
        """The same buckets with their members sorted by `keys`, one per entry; equal ones stay in their order."""
        packed = [replace(each, members=tuple(sorted(each.members, key=keys.__getitem__))) for each in self._packed]
        return self._cut(self.entries, self.tree, packed)

    def grown(
        self,
        entries: Iterable[Entry],
        ranks: Sequence[tuple[int, ...] | None] | None = None,
        holders: Sequence[int | None] | None = None,
    ) -> ShardLayout:
        """The same layout with more entries at the end, each in its own bucket, on these `ranks` or on all; whole
        layers on their `holders`."""
        entries = tuple(entries)
        having, holding = ranks or [None] * len(entries), holders or [None] * len(entries)
        each = enumerate(zip(entries, holding, having, strict=True), start=len(self.entries))
        more = [_packed((index,), entry, holder, its) for index, (entry, holder, its) in each]
        return self._cut(self.entries + entries, self.tree, [*self._packed, *more])

    @property
    def tree(self) -> SummationTree:
        """The order in which contributions are added."""
        return SummationTree(world=self.world, group=self.group)

    @property
    def numel(self) -> int:
        """Elements of all entries, without padding."""
        return sum(entry.numel for entry in self.entries)

    @property
    def padded_numel(self) -> int:
        """Elements of all buckets, padding included: the P of the formulas for bytes and memory."""
        return sum(bucket.numel for bucket in self.buckets)

    def owner_bytes(self, owner: int = 0) -> dict[str, int]:
        """Bytes of one owner's slices, by dtype, padding included; without whole layers, the same for every owner that
        has all entries."""
        total: dict[str, int] = {}
        for bucket in self.buckets:
            if (place := bucket.owner_of(owner)) is not None:
                total[bucket.dtype] = total.get(bucket.dtype, 0) + bucket.owned_numel(place) * ITEMSIZE[bucket.dtype]
        return total

    def index(self, name: str) -> int:
        """The index of the entry of that name."""
        if name not in self._names:
            raise ConfigError(f"the layout has no parameter {name!r}; {nearest(name, self._names)}")
        return self._names[name]

    def bucket_of(self, entry: int) -> Bucket:
        """The bucket that an entry is in."""
        return self._home(entry)[0]

    def bucket_offset(self, entry: int) -> int:
        """Where an entry begins in its bucket, all slices laid end to end; rows and columns have no single offset."""
        bucket, position = self._home(entry)
        if isinstance(bucket, FlatBucket):
            return bucket.begins[position]
        raise ConfigError(
            f"parameter {self.entries[entry].name!r} has placement {bucket.placement.value!r} and so no single offset "
            f"in its bucket; use segments_of({entry}), which has the offset of each owner's part"
        )

    def segments(self, owner: int, bucket: int | None = None) -> tuple[Segment, ...]:
        """What `owner` holds, in bucket and slice order; only of `bucket`, if given."""
        _within("owner", owner, self.world)
        chosen = self.buckets if bucket is None else (self.buckets[_within("bucket", bucket, len(self.buckets))],)
        mine = ((each, place) for each in chosen if (place := each.owner_of(owner)) is not None)
        return tuple(_by_rank(each, segment) for each, place in mine for segment in each.segments(place))

    def segments_of(self, entry: int) -> tuple[Segment, ...]:
        """The segments of one entry, in owner order."""
        bucket, position = self._home(entry)
        return tuple(_by_rank(bucket, segment) for segment in bucket.segments_of(position))

    def locate(self, entry: int, element: int) -> Place:
        """Where an element of the flattened entry is stored."""
        bucket, position = self._home(entry)
        return _by_rank(bucket, bucket.place(position, _within("element", element, self.entries[entry].numel)))

    def places(self, entry: int, start: int, stop: int) -> Iterator[Place]:
        """Where the elements `[start, stop)` of the flattened entry are stored: runs, in element order."""
        bucket, position = self._home(entry)
        numel = self.entries[entry].numel
        if not 0 <= start <= stop <= numel:
            raise ConfigError(f"there are no elements {start} to {stop}: {self.entries[entry].name!r} has {numel}")
        while start < stop:
            index, owner, offset, length = _by_rank(bucket, bucket.place(position, start))
            length = min(length, stop - start)
            yield Place(index, owner, offset, length)
            start += length

    def blocks(self, owner: int, bucket: int | None = None) -> Iterator[Block]:
        """The blocks that `owner` holds, in bucket and slice order; only of `bucket`, if given."""
        for segment in self.segments(owner, bucket):
            for block in range(segment.blocks):
                offset = segment.offset + block * BLOCK
                yield Block(segment.entry, segment.first_block + block, segment.bucket, offset)

    def first_block(self, entry: int) -> int:
        """The number of the entry's first block among all `total_blocks`, entry by entry: the order of a norm's sum."""
        return self._first_blocks[_within("entry", entry, len(self.entries))]

    @property
    def total_blocks(self) -> int:
        """How many blocks all entries have."""
        return self._first_blocks[-1]

    def to_json(self) -> dict[str, Any]:
        """A description of plain dicts, lists, strings and numbers, from which the layout can be rebuilt."""
        slices = [bucket.slice_numel for bucket in self.buckets]
        return describe(Description(self.entries, self.tree, self._packed, slices))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardLayout:
        """The layout that `to_json` described, checked field by field."""
        found = read(data)
        layout = cls._cut(found.entries, found.tree, found.packed)
        for bucket, slice_numel in zip(layout.buckets, found.slices, strict=True):
            if bucket.slice_numel != slice_numel:
                raise ConfigError(
                    f"bucket {bucket.index} of the layout is described with slices of {slice_numel} elements, its "
                    f"entries give {bucket.slice_numel}; the description was changed or damaged"
                )
        return layout

    @property
    def _packed(self) -> list[Packed]:
        return [Packed(bucket.members, bucket.holder, bucket.ranks) for bucket in self.buckets]

    @cached_property
    def _names(self) -> dict[str, int]:
        return {entry.name: index for index, entry in enumerate(self.entries)}

    @cached_property
    def _homes(self) -> dict[int, tuple[Bucket, int]]:
        return {m: (bucket, position) for bucket in self.buckets for position, m in enumerate(bucket.members)}

    def _home(self, entry: int) -> tuple[Bucket, int]:
        return self._homes[_within("entry", entry, len(self.entries))]

    @cached_property
    def _first_blocks(self) -> tuple[int, ...]:
        homes = (self._home(entry) for entry in range(len(self.entries)))
        return tuple(accumulate((bucket.blocks(position) for bucket, position in homes), initial=0))


def _cut_bucket(index: int, entries: Sequence[Entry], world: int, packed: Packed) -> Bucket:
    members = tuple(entries[m] for m in packed.members)
    kinds: dict[Placement, type[Bucket]] = {Placement.FLAT: FlatBucket, Placement.LAYER: LayerBucket}
    owners = world if packed.ranks is None else len(packed.ranks)
    kind = kinds.get(members[0].placement, SplitBucket)
    return kind(index, packed.members, members, owners, ranks=packed.ranks, holder=packed.holder)


def _packed(members: tuple[int, ...], first: Entry, holder: int | None, ranks: tuple[int, ...] | None) -> Packed:
    """A bucket whose first entry this is; `holder` is a rank."""
    if (holder is not None) != (first.placement is Placement.LAYER):
        raise ConfigError(f"parameter {first.name!r} has placement {first.placement.value!r} and holder {holder}")
    return Packed(members, holder if holder is None or ranks is None else ranks.index(holder), ranks)


_Owned = TypeVar("_Owned", Segment, Place)


def _by_rank(bucket: Bucket, owned: _Owned) -> _Owned:
    """The same with the number of the rank that owns it."""
    return owned if bucket.ranks is None else owned._replace(owner=bucket.ranks[owned.owner])


def _within(what: str, number: int, count: int) -> int:
    # Python would silently take -1 for the last one.
    if not 0 <= number < count:
        raise ConfigError(f"there is no {what} {number}: the layout has {count}, counted from 0")
    return number
