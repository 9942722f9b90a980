"""The layout as plain data: the round trip, and every way in which a description can be wrong."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings

from sherd.errors import ConfigError
from sherd.layout import Entry, Placement, ShardLayout
from tests.layout.layouts import layouts

pytestmark = pytest.mark.pure


@settings(max_examples=80, deadline=None)
@given(layouts)
def test_json_gives_the_layout_back(layout):
    again = ShardLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    for owner in range(layout.world):
        assert again.segments(owner) == layout.segments(owner)


def test_what_was_chosen_is_read_and_not_chosen_again():
    entries = [Entry(f"p{n}", (300,), "float32", Placement.LAYER) for n in range(2)]
    data = ShardLayout.build(entries, 2).to_json()
    data["buckets"] = [
        {"entries": [1], "slice_numel": 512, "holder": 1},
        {"entries": [0], "slice_numel": 512, "holder": 1},
    ]
    layout = ShardLayout.from_json(data)
    assert [segment.entry for segment in layout.segments(1)] == [1, 0]
    assert layout.to_json() == data


def change(*path, to):
    """A change to a description: the value at `path` replaced, or the field removed."""

    def apply(data):
        for key in path[:-1]:
            data = data[key]
        if to is None:
            del data[path[-1]]
        else:
            data[path[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("version", to=2), "version 2, this sherd reads version 1"),
        (change("version", to=None), "a dict with a 'version'"),
        (change("block", to=128), "blocks of 128 elements, expected 256"),
        (change("world", to=None), "the layout lacks 'world'"),
        (change("wrold", to=3), "unknown field 'wrold'; did you mean 'world'"),
        (change("world", to="2"), "world must be a whole number.*found '2'"),
        (change("world", to=True), "world must be a whole number.*found True"),
        (change("group", to=7), "cannot have groups of 7"),
        (change("entries", to={}), "entries must be a list, found {}"),
        (change("entries", 0, to=5), "entry 0 must be a dict.*found 5"),
        (change("entries", 0, "name", to=5), "entry 0: name must be a string, found 5"),
        (change("entries", 0, "shape", to=[-7, 15]), "entry 0: shape must be a whole number.*found -7"),
        (change("entries", 0, "shape", to=[70, 15]), "bucket 0 .* slices of 256 elements, its entries give 768"),
        (change("entries", 0, "dtype", to="float3"), "dtype 'float3'; did you mean 'float32'"),
        (change("entries", 0, "placement", to="fat"), "unknown placement 'fat'; did you mean 'flat'"),
        (change("entries", 0, "extra", to=1), "entry 0 has an unknown field 'extra'"),
        (change("entries", 1, "name", to="a"), r"more than one of \['a'\]"),
        (change("buckets", 0, "entries", to=[0, 1]), "must share one dtype and one placement"),
        (change("buckets", 0, "entries", to=[]), "must share one dtype and one placement, found none"),
        (change("buckets", 0, "entries", to=[2]), r"must be less than 2, found \[2\]"),
        (change("buckets", 0, to=None), r"every entry must be in one bucket; entries \[0\]"),
        (change("buckets", 0, "slice_numel", to=512), "slices of 512 elements, its entries give 256"),
        (change("buckets", 0, "holder", to=0), "'holder' belongs to buckets of whole layers"),
        (change("buckets", 1, "holder", to=None), "'holder' belongs to buckets of whole layers"),
        (change("buckets", 1, "holder", to="0"), "holder must be a whole number.*found '0'"),
        (change("buckets", 1, "holder", to=2), "holder must be less than 2"),
        (change("buckets", 0, "ranks", to=[2]), "ranks must be less than 2"),
        (change("buckets", 0, "ranks", to=[1, 0]), r"ranks must ascend without repeats, found \[1, 0\]"),
        (change("buckets", 0, "ranks", to=[]), "ranks must ascend without repeats"),
        (change("buckets", 1, to={"entries": [1], "slice_numel": 512, "holder": 1, "ranks": [0]}), "be less than 1"),
    ],
)
def test_a_damaged_description_is_refused(damage, message):
    entries = [Entry("a", (7, 15)), Entry("b", (300,), "float32", Placement.LAYER)]
    data = ShardLayout.build(entries, 2).to_json()
    broken = copy.deepcopy(data)
    damage(broken)
    with pytest.raises(ConfigError, match=message):
        ShardLayout.from_json(broken)
    ShardLayout.from_json(data)


@pytest.mark.parametrize("data", [None, [], "layout"])
def test_a_description_is_a_dict(data):
    with pytest.raises(ConfigError, match="a dict with a 'version'"):
        ShardLayout.from_json(data)
