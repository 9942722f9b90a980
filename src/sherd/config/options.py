"""The base of every option class, and what checks options.

An option class is a frozen, keyword-only dataclass derived from `Options`. Building one checks the names, then the
types (from the annotations), then the ranges (in its `validate()`), so that every existing object is valid:

    @dataclass(frozen=True, kw_only=True)
    class ExampleOptions(Options):
        depth: int = 2

        def validate(self) -> None:
            positive(self, "depth")
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from sherd.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing_extensions import Self


class Options:
    """The base of frozen option classes: unknown names, wrong types and bad values raise `ConfigError`."""

    def __new__(cls, *args: object, **options: object) -> Self:
        # Checked here because the dataclass's own __init__ would raise a bare TypeError for a misspelt name.
        if args:
            raise ConfigError(f"{cls.__name__} takes its options by keyword; found the positional value {args[0]!r}")
        refuse_unknown(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            _check_type(self, name, hint)
        self.validate()

    def validate(self) -> None:
        """Check ranges and combinations; the types are already checked. Subclasses override it."""

    def replace(self, **changes: Any) -> Self:
        """The same options with some changed, validated again."""
        return type(self)(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Option names and values in declaration order, as `from_dict` takes them."""
        return {name: getattr(self, name) for name in _names(type(self))}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from names and values; missing names keep their defaults."""
        refuse_unknown(cls, options)
        return cls(**options)


# Validators: each takes the options and the name of one, so that its message can show both.


def refuse(options: Options, name: str, expected: str, write: str | None = None) -> NoReturn:
    """Raise a `ConfigError` about an option: what was found, what was expected, what to write instead."""
    advice = f"; write {write}" if write else ""
    raise ConfigError(f"{type(options).__name__}: {name}={getattr(options, name)!r} must be {expected}{advice}")


def positive(options: Options, name: str) -> None:
    """The option is a finite number above zero, or None."""
    value = getattr(options, name)
    if value is not None and not (math.isfinite(value) and value > 0):
        refuse(options, name, "a finite number above 0")


def at_least(options: Options, name: str, least: float) -> None:
    """The option is a finite number of at least `least`, or None."""
    value = getattr(options, name)
    if value is not None and not (math.isfinite(value) and value >= least):
        refuse(options, name, f"at least {least}")


def power_of_two(options: Options, name: str) -> None:
    """The option is a power of two, such as 0.5 or 65536."""
    value = getattr(options, name)
    if not math.isfinite(value) or value <= 0 or math.frexp(value)[0] != 0.5:
        up = 2.0 ** round(math.log2(value)) if math.isfinite(value) and value > 0 else 1.0
        refuse(options, name, "a power of two, so that scaling rounds nothing", f"{name}={up:g}")


def multiple_of(options: Options, name: str, unit: int) -> None:
    """The option is a positive multiple of `unit`."""
    value = getattr(options, name)
    if value <= 0 or value % unit:
        up = max(unit, -(-value // unit) * unit)
        refuse(options, name, f"a positive multiple of {unit}", f"{name}={up}")


_NONE: Mapping[str, str] = types.MappingProxyType({})


def one_of(options: Options, name: str, valid: Collection[str], elsewhere: Mapping[str, str] = _NONE) -> None:
    """The option is one of the valid names; `elsewhere` has those that other libraries have for them."""
    value = getattr(options, name)
    if value not in valid:
        likely = elsewhere.get(value, value)
        raise ConfigError(f"{type(options).__name__}: unknown {name}={value!r}; {nearest(likely, valid)}")


# Names and types, read from the dataclass.


def _names(cls: type[Options]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(typing.cast(Any, cls)) if field.init)


def _hints(cls: type[Options]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _names(cls)}


def refuse_unknown(cls: type[Options], names: Iterable[object]) -> None:
    for name in names:
        if name not in _names(cls):
            raise ConfigError(f"{cls.__name__} has no option {name!r}; {nearest(name, _names(cls))}")


def _check_type(options: Options, name: str, hint: Any) -> None:
    """Refuse a value that its annotation does not allow; an int where a float belongs is converted."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = tuple(typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if union else (hint,)))
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return  # Any, Literal and the like: left to validate()
    value = getattr(options, name)
    if type(value) is int and float in kinds and int not in kinds:
        object.__setattr__(options, name, float(value))
        return
    # bool is a subclass of int, but True is not a count; it is probably meant for another option.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        refuse(options, name, f"of type {wanted}, not {type(value).__name__}")
