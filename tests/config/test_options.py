"""Options are checked when built, and an unknown name is answered with the nearest valid one."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from dataclasses import dataclass
from typing import Any

import pytest

from sherd.config import CommOptions, Options, at_least, multiple_of, one_of, positive
from sherd.errors import ConfigError, SherdError

pytestmark = pytest.mark.pure


@dataclass(frozen=True, kw_only=True)
class Sample(Options):
    depth: int
    scale: float = 1.0
    label: str | None = None
    sizes: tuple[int, ...] = ()
    anything: Any = None

    def validate(self) -> None:
        positive(self, "scale")
        at_least(self, "depth", 1)


def test_a_built_object_keeps_what_it_was_given():
    options = Sample(depth=3, sizes=(1, 2), anything=object)
    assert (options.depth, options.scale, options.label, options.sizes) == (3, 1.0, None, (1, 2))


def test_an_int_becomes_a_float_where_a_float_is_declared():
    scale = Sample(depth=1, scale=2).scale
    assert scale == 2.0
    assert type(scale) is float


def test_options_are_frozen_comparable_and_hashable():
    options = Sample(depth=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.depth = 4  # type: ignore[misc]
    assert options == Sample(depth=3)
    assert hash(options) == hash(Sample(depth=3))
    assert options != Sample(depth=4)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_options_survive_copy_and_pickle(clone):
    options = CommOptions(timeout=60, warn_after=2, host="a")
    assert clone(options) == options


@pytest.mark.parametrize(
    ("options", "found", "wanted"),
    [
        ({"depth": "3"}, "depth='3'", "int, not str"),
        ({"depth": 3.0}, "depth=3.0", "int, not float"),
        ({"depth": True}, "depth=True", "int, not bool"),
        ({"depth": None}, "depth=None", "int, not NoneType"),
        ({"depth": 1, "scale": "1"}, "scale='1'", "float, not str"),
        ({"depth": 1, "scale": False}, "scale=False", "float, not bool"),
        ({"depth": 1, "label": 5}, "label=5", "str or None, not int"),
        ({"depth": 1, "sizes": [1]}, "sizes=[1]", "tuple, not list"),
    ],
)
def test_a_wrong_type_is_refused_with_found_and_expected(options, found, wanted):
    with pytest.raises(ConfigError, match=re.escape(f"Sample: {found} must be of type {wanted}")):
        Sample(**options)


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf])
def test_a_number_out_of_range_is_refused(scale):
    with pytest.raises(ConfigError, match=r"Sample: scale=.* must be a finite number above 0"):
        Sample(depth=1, scale=scale)


def test_every_way_in_refuses_an_unknown_name_and_suggests_the_nearest():
    built = CommOptions()
    ways = [
        lambda: CommOptions(timout=5),  # type: ignore[call-arg]
        lambda: CommOptions.from_dict({"timout": 5}),
        lambda: CommOptions.from_env(timout=5),
        lambda: built.replace(timout=5),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match="CommOptions has no option 'timout'; did you mean 'timeout'"):
            way()


def test_positional_values_are_refused():
    with pytest.raises(ConfigError, match="takes its options by keyword; found the positional value 'host'"):
        CommOptions("host")  # type: ignore[misc]


def test_replace_changes_a_copy_and_validates_it():
    options = Sample(depth=3)
    assert options.replace(depth=5).depth == 5
    assert options.depth == 3
    with pytest.raises(ConfigError, match="depth=0 must be at least 1"):
        options.replace(depth=0)


def test_to_dict_and_from_dict_are_inverse():
    options = CommOptions(transport="c10d", group=2, check=False, chunk_bytes=8192)
    assert list(options.to_dict()) == [field.name for field in dataclasses.fields(CommOptions)]
    assert CommOptions.from_dict(options.to_dict()) == options
    assert CommOptions.from_dict({}) == CommOptions()


def test_one_of_and_multiple_of_say_what_to_write():
    @dataclass(frozen=True, kw_only=True)
    class Local(Options):
        kind: str = "red"
        size: int = 8

        def validate(self) -> None:
            one_of(self, "kind", ("red", "green"))
            multiple_of(self, "size", 8)

    with pytest.raises(ConfigError, match="unknown kind='gren'; did you mean 'green'"):
        Local(kind="gren")
    with pytest.raises(ConfigError, match="size=9 must be a positive multiple of 8; write size=16"):
        Local(size=9)
    with pytest.raises(ConfigError, match="write size=8"):
        Local(size=-3)


def test_comm_defaults():
    assert CommOptions().to_dict() == {
        "transport": "auto",
        "group": None,
        "timeout": 1800.0,
        "warn_after": None,
        "check": True,
        "host": None,
        "order": "tree",
        "chunk_bytes": 1 << 20,
        "chunks": 2,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "hosts"}, "unknown transport='hosts'; did you mean 'host'"),
        ({"order": "tre"}, "unknown order='tre'; did you mean 'tree'"),
        ({"group": 0}, "group=0 must be at least 1"),
        ({"timeout": 0}, "timeout=0.0 must be a finite number above 0"),
        ({"timeout": math.inf}, "timeout=inf must be a finite number above 0"),
        ({"timeout": 5, "warn_after": 30}, "warn_after=30.0 must be less than timeout=5.0.*write warn_after=0.5"),
        ({"warn_after": -1}, "warn_after=-1.0 must be"),
        ({"check": 1}, "check=1 must be of type bool, not int"),
        ({"host": " "}, "host=' ' must be a non-empty label"),
        ({"chunk_bytes": 5000}, "write chunk_bytes=8192"),
        ({"chunks": 0}, "chunks=0 must be at least 1"),
    ],
)
def test_comm_options_refuse(options, message):
    with pytest.raises(ConfigError, match=message):
        CommOptions(**options)


@pytest.fixture
def environment(monkeypatch):
    """Sets SHERD_* variables, after removing any that are there."""
    for name in ("TRANSPORT", "TIMEOUT", "WARN_AFTER", "HOST", "CHECK"):
        monkeypatch.delenv(f"SHERD_{name}", raising=False)

    def put(**variables: str) -> None:
        for name, text in variables.items():
            monkeypatch.setenv(f"SHERD_{name}", text)

    return put


def test_from_env_reads_every_variable(environment):
    assert CommOptions.from_env() == CommOptions()
    environment(TRANSPORT="c10d", TIMEOUT="90", WARN_AFTER="1.5", HOST="left", CHECK="0")
    expected = CommOptions(transport="c10d", timeout=90, warn_after=1.5, host="left", check=False)
    assert CommOptions.from_env() == expected


def test_an_argument_wins_over_the_environment_and_an_empty_variable_is_not_set(environment):
    environment(TIMEOUT="nonsense", HOST="")
    options = CommOptions.from_env(timeout=77, group=4)
    assert (options.timeout, options.group, options.host) == (77.0, 4, None)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TIMEOUT": "soon"}, "SHERD_TIMEOUT='soon' must be a number of seconds"),
        ({"WARN_AFTER": "1m"}, "SHERD_WARN_AFTER='1m' must be a number of seconds"),
        ({"CHECK": "yes"}, "SHERD_CHECK='yes' must be 0 or 1"),
        ({"TIMEOUT": "-3"}, r"timeout=-3.0 must be.*\(from the environment: SHERD_TIMEOUT='-3'\)"),
        ({"TIMEOUT": "nan"}, r"SHERD_TIMEOUT='nan'"),
        ({"TRANSPORT": "c10"}, "did you mean 'c10d'.*SHERD_TRANSPORT='c10'"),
        ({"TIMEOUT": "20", "WARN_AFTER": "30"}, "warn_after=30.0 must be less than timeout=20.0.*SHERD_TIMEOUT='20'"),
    ],
)
def test_a_bad_variable_is_named(environment, variables, message):
    environment(**variables)
    with pytest.raises(ConfigError, match=message):
        CommOptions.from_env()


def test_an_error_without_variables_does_not_blame_the_environment(environment):
    with pytest.raises(ConfigError, match="chunks=0") as caught:
        CommOptions.from_env(chunks=0)
    assert "environment" not in str(caught.value)
    assert isinstance(caught.value, SherdError)
    assert isinstance(caught.value, ValueError)


def test_the_default_warning_comes_well_before_the_error():
    assert CommOptions().warn_seconds == 30
    assert CommOptions(timeout=6).warn_seconds == 2
    assert CommOptions(timeout=6, warn_after=5).warn_seconds == 5
