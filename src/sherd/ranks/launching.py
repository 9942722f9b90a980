"""`sherd.launch`: run one function on several ranks, from a notebook, a prompt or a script."""

from __future__ import annotations

import inspect
import linecache
import math
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import cloudpickle

from sherd.errors import ConfigError, RankFailed
from sherd.machine import check_files
from sherd.ranks import call, fresh
from sherd.ranks.team import Team

P = ParamSpec("P")
T = TypeVar("T")

GRACE = 2.0  # seconds for the others to fail as well, once a rank has failed
LEAVE_TIMEOUT = 30.0  # seconds for ranks that have returned to leave their process group, and then to exit


def launch(fn: Callable[P, T], ranks: int, *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Call `fn(*args, **kwargs)` on `ranks` new processes of this machine and return the results in rank order.

    For notebooks and the interactive prompt: `fn` and everything it refers to are sent by value, so it may be defined
    anywhere, even as a lambda or a closure. Inside, ranks find each other as under torchrun. What they print appears
    here line by line, prefixed with the rank except for rank 0. When a rank fails the others are ended, and
    `RankFailed` has its traceback; an interrupt ends all of them.
    """
    _check(fn, ranks)
    check_files(ranks)
    shipped = _shipped(fn, args, kwargs)
    environ = {"OMP_NUM_THREADS": str(call.fair_threads(ranks)), **os.environ}
    team = Team(fresh.starter(environ), ranks, grace=GRACE, start_timeout=math.inf)
    try:
        with call.rendezvous() as port:
            results = team.run(call.task(shipped, ranks, port, environ=environ), math.inf)
            _leave(team)
    except RankFailed as error:
        # A notebook prints every frame, and ours would come before the rank's own traceback.
        raise error.with_traceback(None) from None
    finally:
        team.close()
    return results


def _check(fn: Callable[..., object], ranks: int) -> None:
    if not callable(fn):
        raise ConfigError(f"the first argument must be a function for every rank to call, not {fn!r}")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ConfigError(f"ranks must be a whole number of at least 1, got {ranks!r}; write sherd.launch(fn, 2)")
    if "RANK" in os.environ:
        raise ConfigError(
            f"sherd.launch was called inside rank {os.environ['RANK']}: the variable RANK is set, as by torchrun, "
            "sherd run or sherd.launch. A rank cannot start ranks: call the function itself. If this is not a "
            "rank, write `del os.environ['RANK']` first"
        )


def _leave(team: Team) -> None:
    """Have the ranks exit. An error now must not cost the caller the results."""
    try:
        team.clean(LEAVE_TIMEOUT)
        team.stop(LEAVE_TIMEOUT)
    except RankFailed as problem:
        warnings.warn(f"every rank has returned its result, but then {problem}", stacklevel=3)


def _shipped(fn: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The call, pickled by value, which `_receive` makes on the ranks."""
    try:
        content = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        found = ", ".join(_culprits(fn, args, kwargs)) or f"{name} itself"
        raise ConfigError(
            f"{name} cannot be sent to the ranks: {type(error).__name__}: {error}. Found in: {found}. "
            "Create it inside the function, on every rank"
        ) from error
    return pickle.dumps((_receive, (content, _typed_sources(), list(sys.argv))))


def _culprits(fn: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments and the variables used by the function that cannot be pickled."""
    used = {f"argument {index}": value for index, value in enumerate(args)}
    used |= {f"argument {name}": value for name, value in kwargs.items()}
    if inspect.isfunction(fn):
        outside = inspect.getclosurevars(fn)
        used |= {f"variable {name}": value for name, value in {**outside.globals, **outside.nonlocals}.items()}
    return [name for name, value in used.items() if not _pickles(value)]


def _pickles(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _typed_sources() -> dict[str, Any]:
    """The source lines of notebook cells and prompts, which are in no file: ranks need them for tracebacks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _receive(content: bytes, sources: dict[str, Any], argv: list[str]) -> object:
    """On a rank: unpack the call and make it."""
    linecache.cache.update(sources)
    sys.argv[:] = argv
    fn, args, kwargs = pickle.loads(content)
    _become_main(fn)
    return fn(*args, **kwargs)


def _become_main(fn: Callable[..., object]) -> None:
    """Copy what the function uses of the caller's main module into the rank's, where plain pickle looks for it."""
    used = getattr(inspect.unwrap(fn), "__globals__", {})
    if used.get("__name__") == "__main__":
        vars(sys.modules["__main__"]).update({name: used[name] for name in used if not name.startswith("__")})
