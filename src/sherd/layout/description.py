"""The layout as plain data, and back: what checkpoints record.

    {"version": 1, "block": 256, "world": 4, "group": 2,
     "entries": [{"name": "net.weight", "shape": [7, 15], "dtype": "float32", "placement": "flat"}, ...],
     "buckets": [{"entries": [0, 1], "slice_numel": 256}, {"entries": [2], "slice_numel": 512, "holder": 3}, ...]}

Choices (the buckets, the holders of whole layers) are recorded, and never made again when read. The size of a slice
follows from the rest; it is recorded to detect a damaged description. Only buckets of whole layers have a `holder`, and
only those that not all ranks have name their `ranks`; the holder is then counted among these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sherd.errors import ConfigError, nearest
from sherd.layout.entry import Entry
from sherd.layout.packing import Packed
from sherd.layout.placement import BLOCK, Placement
from sherd.layout.tree import SummationTree

VERSION = 1


@dataclass(frozen=True)
class Description:
    """The contents of a description; `packed` and `slices` have one item per bucket."""

    entries: tuple[Entry, ...]
    tree: SummationTree
    packed: Sequence[Packed]
    slices: Sequence[int]


def describe(layout: Description) -> dict[str, Any]:
    """Plain data for `layout`."""
    entries = [
        {"name": entry.name, "shape": list(entry.shape), "dtype": entry.dtype, "placement": entry.placement.value}
        | ({} if entry.order is None else {"order": list(entry.order)})
        for entry in layout.entries
    ]
    buckets: list[dict[str, Any]] = []
    for packed, slice_numel in zip(layout.packed, layout.slices, strict=True):
        buckets.append({"entries": list(packed.members), "slice_numel": slice_numel})
        if packed.holder is not None:
            buckets[-1]["holder"] = packed.holder
        if packed.ranks is not None:
            buckets[-1]["ranks"] = list(packed.ranks)
    tree = layout.tree
    return {
        "version": VERSION,
        "block": BLOCK,
        "world": tree.world,
        "group": tree.group,
        "entries": entries,
        "buckets": buckets,
    }


def read(data: Mapping[str, Any]) -> Description:
    """Read `data`, or raise a `ConfigError` that says what is wrong with it."""
    # The version first: another version may have other fields, and its number explains more than their names.
    if not isinstance(data, Mapping) or "version" not in data:
        raise ConfigError(f"a layout is described by a dict with a 'version', found {_short(data)}")
    if data["version"] != VERSION:
        raise ConfigError(
            f"the layout is described in version {data['version']!r}, this sherd reads version {VERSION}; "
            f"read it with the sherd that wrote it"
        )
    _fields("the layout", data, ("version", "block", "world", "group", "entries", "buckets"))
    if data["block"] != BLOCK:
        raise ConfigError(f"the layout is described in blocks of {data['block']!r} elements, expected {BLOCK}")
    tree = SummationTree(world=_count("world", data["world"]), group=_count("group", data["group"]))
    entries = tuple(_entry(index, item) for index, item in enumerate(_list("entries", data["entries"])))
    packed, slices = [], []
    for index, item in enumerate(_list("buckets", data["buckets"])):
        packed.append(_bucket(index, item, entries, tree.world))
        slices.append(_count(f"bucket {index}: slice_numel", item["slice_numel"]))
    found = sorted(member for each in packed for member in each.members)
    if found != list(range(len(entries))):
        times = Counter(found)
        wrong = [index for index in range(len(entries)) if times[index] != 1]
        raise ConfigError(f"every entry must be in one bucket; entries {_short(wrong)} are in none or in several")
    return Description(entries, tree, packed, slices)


def _entry(index: int, item: Any) -> Entry:
    where = f"entry {index}"
    _fields(where, item, ("name", "shape", "dtype", "placement"), optional=("order",))
    for key in ("name", "dtype"):
        if not isinstance(item[key], str):
            raise ConfigError(f"{where}: {key} must be a string, found {_short(item[key])}")
    shape = tuple(_count(f"{where}: shape", size) for size in _list(f"{where}: shape", item["shape"]))
    order = _indices(f"{where}: order", item["order"], len(shape)) if "order" in item else None
    return Entry(item["name"], shape, item["dtype"], Placement.parse(item["placement"]), order)


def _bucket(index: int, item: Any, entries: Sequence[Entry], world: int) -> Packed:
    where = f"bucket {index}"
    _fields(where, item, ("entries", "slice_numel"), optional=("holder", "ranks"))
    members = _indices(f"{where}: entries", item["entries"], len(entries))
    kinds = {(entries[m].dtype, entries[m].placement.value) for m in members}
    if len(kinds) != 1:
        raise ConfigError(f"{where}: entries must share one dtype and one placement, found {sorted(kinds) or 'none'}")
    whole = entries[members[0]].placement is Placement.LAYER
    if whole != ("holder" in item):
        raise ConfigError(f"{where}: 'holder' belongs to buckets of whole layers, and to each of them")
    ranks = _indices(f"{where}: ranks", item["ranks"], world) if "ranks" in item else None
    if ranks is not None and (not ranks or list(ranks) != sorted(set(ranks))):
        raise ConfigError(f"{where}: ranks must ascend without repeats, found {_short(item['ranks'])}")
    owners = world if ranks is None else len(ranks)
    (holder,) = _indices(f"{where}: holder", [item["holder"]], owners) if whole else (None,)
    return Packed(members, holder, ranks)


def _fields(where: str, item: Any, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} must be a dict with {', '.join(required)}; found {_short(item)}")
    allowed = [*required, *optional]
    for key in item:
        if key not in allowed:
            raise ConfigError(f"{where} has an unknown field {key!r}; {nearest(key, allowed)}")
    if missing := [key for key in required if key not in item]:
        raise ConfigError(f"{where} lacks {', '.join(map(repr, missing))}; found {', '.join(map(repr, item))}")


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, found {_short(value)}")
    return value


def _count(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{where} must be a whole number, not negative; found {_short(value)}")
    return value


def _indices(where: str, value: Any, count: int) -> tuple[int, ...]:
    indices = tuple(_count(where, item) for item in _list(where, value))
    if beyond := [index for index in indices if index >= count]:
        raise ConfigError(f"{where} must be less than {count}, found {_short(beyond)}")
    return indices


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
