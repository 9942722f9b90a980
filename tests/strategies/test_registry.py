"""Strategies by name: what resolves, and what a user is told when it does not."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import pytest

from sherd.config import positive
from sherd.errors import ConfigError
from sherd.strategies import Strategy, names, register, registry, resolve

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    """Every test starts with a registry of its own."""
    monkeypatch.setattr(registry, "_BUILDERS", {})
    monkeypatch.setattr(registry, "_ELSEWHERE", {})


class Choosing(Strategy):
    """What every strategy must say, and these tests do not ask."""

    def policy(self, comm, device):
        raise AssertionError("not asked")


@pytest.fixture
def mean():
    @register("mean")
    @dataclass(frozen=True, kw_only=True)
    class Mean(Choosing):
        every: int = 4

        def validate(self) -> None:
            positive(self, "every")

    return Mean


def test_a_name_builds_with_defaults_and_an_object_passes_through(mean):
    assert resolve("mean") == mean(every=4)
    assert resolve("mean").name == mean.name == "mean"
    built = mean(every=9)
    assert resolve(built) is built


def test_options_are_frozen_and_validated_like_all_options(mean):
    with pytest.raises(dataclasses.FrozenInstanceError):
        mean().every = 2
    with pytest.raises(ConfigError, match="Mean: every=0 must be a finite number above 0"):
        mean(every=0)
    with pytest.raises(ConfigError, match="Mean has no option 'evry'; did you mean 'every'"):
        mean(evry=2)
    assert mean().replace(every=2).to_dict() == {"every": 2}


def test_a_function_gives_a_class_another_name_with_other_defaults(mean):
    @register("mean-often")
    def often() -> Strategy:
        return mean(every=1)

    assert resolve("mean-often") == mean(every=1)
    assert names() == ("mean", "mean-often")


def test_a_name_of_the_classs_own_is_kept():
    @register("first")
    class Two(Choosing):
        name = "two"

    assert resolve("first").name == "two"


def test_a_strategy_without_options_needs_no_dataclass():
    @register("plain")
    class Plain(Choosing):
        pass

    assert resolve("plain") == Plain()


def test_an_unknown_name_gets_the_nearest(mean):
    with pytest.raises(ConfigError, match="unknown strategy 'maen'; did you mean 'mean'"):
        resolve("maen")


def test_an_empty_registry_says_so():
    assert names() == ()
    with pytest.raises(ConfigError, match="unknown strategy 'ddp'; none is registered"):
        resolve("ddp")


def test_a_wrong_type_is_told_what_to_write(mean):
    with pytest.raises(ConfigError, match=r"strategy=Mean is a class; write an object of it: strategy=Mean\(\)"):
        resolve(mean)
    with pytest.raises(ConfigError, match="strategy=3 is of type int; write a name such as strategy='mean'"):
        resolve(3)  # type: ignore[arg-type]


def test_a_name_is_registered_once_and_is_not_empty(mean):
    with pytest.raises(ConfigError, match=r"the strategy 'mean' is already .*Mean"):
        register("mean")(mean)
    with pytest.raises(ConfigError, match="a strategy needs a name"):
        register("")(mean)


def test_the_base_is_abstract():
    with pytest.raises(ConfigError, match="Strategy is abstract"):
        Strategy()


def test_what_others_call_it_is_told_apart(mean):
    register("mode", elsewhere=("Most Often", "either"))(lambda: mean())
    register("median", elsewhere=("the middle", "either"))(lambda: mean())
    for name, message in (
        ("Mean", "unknown strategy 'Mean'; write strategy='mean'$"),
        ("MODE", "unknown strategy 'MODE'; write strategy='mode'$"),
        ("mo-de", "write strategy='mode'$"),
        ("most_often", "unknown strategy 'most_often'; here it is called 'mode': write strategy='mode'$"),
        ("THE-MIDDLE", "here it is called 'median': write strategy='median'$"),
        ("either", "here it is 'mode' or 'median': write strategy='median', or another of these$"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(name)


def test_a_strategy_that_overrules_the_environment_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv(registry.VARIABLE, "zero1")
    monkeypatch.setattr(registry, "_overruled", set())
    for name in ("ddp", "zero1"):
        register(name)(type(name, (Choosing,), {}))
    with caplog.at_level(logging.WARNING, "sherd"):
        assert registry.chosen(None, speak=True).name == "zero1"
        assert registry.chosen("zero1", speak=True).name == "zero1"
        assert registry.chosen("ddp", speak=False).name == "ddp"
        assert caplog.messages == []
        for _ in range(2):
            assert registry.chosen("ddp", speak=True).name == "ddp"
    (said,) = caplog.messages
    assert said.startswith("SHERD_STRATEGY=zero1 (or sherd run --strategy) has no effect here: distribute names ddp")
