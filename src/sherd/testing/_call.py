"""Pickling the call for the ranks of a test; what cannot be sent is refused before anything is started."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from sherd.errors import ConfigError


def pickled(fn: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    """The call by value: plain pickle leaves no shared-memory handles of torch.multiprocessing behind."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not callable(inner):
        raise ConfigError(f"the first argument must be a function for every rank to call, not {inner!r}")
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if "<lambda>" in name or "<locals>" in name:
        raise ConfigError(
            f"{name} cannot be sent to the ranks: they import the function by its name, and a lambda or a function "
            "inside a function has none. Write it as a `def` at the top level of a module, and pass what it closed "
            "over as arguments: run_ranks(fn, world_size, a, b) or functools.partial(fn, a, b)"
        )
    try:
        return pickle.dumps((fn, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kinds = ", ".join(type(arg).__name__ for arg in args) or "none"
        raise ConfigError(
            f"{name} and its arguments (types: {kinds}) cannot be sent to the ranks: {type(error).__name__}: {error}. "
            "Use a function at the top level of a module and arguments that pickle"
        ) from error


def checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    extra = dict(env or {})
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"env must map strings to strings, got {name!r}: {value!r}; write {str(name)!r}: {str(value)!r}"
            )
    return extra
