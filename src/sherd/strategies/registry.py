"""Names of strategies: a new strategy is one file that registers itself, and nothing else asks which strategy it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from sherd.errors import ConfigError, nearest
from sherd.strategies.base import Strategy

Builder = TypeVar("Builder", bound=Callable[[], Strategy])

VARIABLE, DEFAULT = "SHERD_STRATEGY", "zero2"

log = logging.getLogger("sherd")

_overruled: set[str] = set()  # values of the variable that were already warned about
_BUILDERS: dict[str, Callable[[], Strategy]] = {}
_ELSEWHERE: dict[str, list[str]] = {}
"""Other libraries' names for strategies, as `_bare` words; one of them may stand for several of ours."""


def register(name: str, elsewhere: Iterable[str] = ()) -> Callable[[Builder], Builder]:
    """Decorate a `Strategy` class, or a function that builds one, so that users can write `name`.

    A function gives a class a second name with other defaults. A class that has no `name` yet gets this one.
    `elsewhere` lists other libraries' names for it: an error then tells users our name, since defaults may differ.
    """

    def add(builder: Builder) -> Builder:
        if not name:
            raise ConfigError(f"a strategy needs a name; found {name!r} for {builder!r}")
        if name in _BUILDERS:
            raise ConfigError(f"the strategy {name!r} is already {_BUILDERS[name]!r}; give {builder!r} another name")
        if isinstance(builder, type) and "name" not in vars(builder):
            builder.name = name  # type: ignore[attr-defined]
        _BUILDERS[name] = builder
        for word in elsewhere:
            _ELSEWHERE.setdefault(_bare(word), []).append(name)
        return builder

    return add


def resolve(spec: str | Strategy) -> Strategy:
    """The strategy for a name, built with its defaults, or for an object, which is used as it is."""
    if isinstance(spec, Strategy):
        return spec
    if isinstance(spec, str):
        return _named(spec)
    raise ConfigError(_not_a_strategy(spec))


def chosen(spec: str | Strategy | None, *, speak: bool) -> Strategy:
    """The strategy that the user named, else the default. With `speak`, warns if SHERD_STRATEGY names another one."""
    if spec is None:
        return default()
    found, wanted = resolve(spec), os.environ.get(VARIABLE)
    name = getattr(found, "name", type(found).__name__)  # one that is not registered has none
    if speak and wanted and wanted != name and wanted not in _overruled:
        _overruled.add(wanted)
        log.warning(
            "%s=%s (or sherd run --strategy) has no effect here: distribute names %s; leave strategy= out to choose it "
            "from outside the script",
            VARIABLE,
            wanted,
            name,
        )
    return found


def default() -> Strategy:
    """The one that SHERD_STRATEGY names (`sherd run --strategy` sets it), else zero2."""
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in _BUILDERS:
        raise ConfigError(f"{VARIABLE}={name!r} is not a strategy; {nearest(name, _BUILDERS)}")
    return resolve(name)


def names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_BUILDERS))


def _named(name: str) -> Strategy:
    builder = _BUILDERS.get(name)
    if builder is None:
        raise ConfigError(f"unknown strategy {name!r}; {_meant(name)}")
    return builder()


def _meant(name: str) -> str:
    """Which strategies an unknown name may mean."""
    if not _BUILDERS:
        return "none is registered"
    spelled = [ours for ours in _BUILDERS if _bare(ours) == _bare(name)]
    if spelled:
        return f"write strategy={spelled[0]!r}"
    ours = [each for each in _ELSEWHERE.get(_bare(name), ()) if each in _BUILDERS]
    if len(ours) == 1:
        return f"here it is called {ours[0]!r}: write strategy={ours[0]!r}"
    if ours:
        choice = f"{', '.join(map(repr, ours[:-1]))} or {ours[-1]!r}"
        return f"here it is {choice}: write strategy={ours[-1]!r}, or another of these"
    return nearest(name, _BUILDERS)


def _bare(name: str) -> str:
    """A name without case, hyphens and blanks, which people write in different ways."""
    return "".join(filter(str.isalnum, name.lower()))


def _not_a_strategy(spec: object) -> str:
    if isinstance(spec, type) and issubclass(spec, Strategy):
        return f"strategy={spec.__name__} is a class; write an object of it: strategy={spec.__name__}()"
    example = min(_BUILDERS, default="ddp")
    expected = f"write a name such as strategy={example!r}, or a Strategy object with options"
    return f"strategy={spec!r} is of type {type(spec).__name__}; {expected}"
