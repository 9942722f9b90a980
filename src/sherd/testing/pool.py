"""Ranks that are started once and used for many runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, TypeVar, overload

from sherd.errors import ConfigError
from sherd.ranks import call
from sherd.ranks.team import Team
from sherd.ranks.watch import Died
from sherd.testing import _call
from sherd.testing._location import Location

T = TypeVar("T")

START_TIMEOUT = 120.0  # seconds for ranks to start: the first ones wait until the fork server has imported torch


class RankPool:
    """`world_size` ranks that run one function after another.

    They start with the first `run` and sleep between runs, at no cost. Every run has a rendezvous, an environment, a
    working directory, a sys.path and a torch seed of its own; other changes that a function makes to its process remain
    for the next one (use `run_ranks` where that matters). When a run fails, its ranks are ended and the next run starts
    new ones. Not thread-safe.

    `timeout` bounds a run, in seconds. After the first failure the other ranks have `grace` seconds to fail as well.
    `location` is where they run: this machine, or simulated hosts (see `Hosts`).
    """

    def __init__(
        self, world_size: int, *, timeout: float = 60.0, grace: float = 2.0, location: Location | None = None
    ) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size must be a whole number of at least 1, got {world_size!r}")
        for name, seconds in (("timeout", timeout), ("grace", grace)):
            _check_seconds(name, seconds)
        self.world_size = world_size
        self.timeout = timeout
        self.grace = grace
        self._closed = False
        self._location = location or Location()
        self._team = Team(self._location.start, world_size, grace=grace, start_timeout=START_TIMEOUT)
        # For a pool that is never closed: multiprocessing runs its finalizers before it waits for its children at exit
        # (for ever, since idle ranks do not end by themselves), also in processes it started, but not in other forks.
        self._finalizer = Finalize(self, self._team.close, exitpriority=0)

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        expected_exits: None = None,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        expected_exits: Mapping[int, int],
    ) -> list[T | Died]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        expected_exits: Mapping[int, int] | None = None,
    ) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order.

        `fn` must be importable: a function at the top level of a module, or a `functools.partial` of one. `env` is
        added to the ranks' environment for this run. `expected_exits` maps ranks that must not return but die to their
        exit codes (-9: killed by SIGKILL); the result of such a rank is a `Died`. Raises `RankFailed`, or
        `RanksTimedOut` if ranks are still busy after `timeout` seconds (default: the pool's).
        """
        if self._closed:
            raise ConfigError("this RankPool is closed; build a new one")
        limit = self.timeout if timeout is None else _check_seconds("timeout", timeout)
        expected = self._check_expected(expected_exits)
        pickled, extra = _call.pickled(*self._location.call(fn, args)), _call.checked_env(env)
        threads = call.fair_threads(self.world_size)
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with self._location.rendezvous() as (port, variables):
            try:
                extra = variables | extra
                task = call.task(pickled, self.world_size, port, environ=environ, extra=extra, threads=threads)
                results = self._team.run(task, limit, expected)
                if expected:
                    self._team.stop(self.timeout, expected)
                else:
                    self._team.clean(limit)
            except BaseException:  # KeyboardInterrupt too: nobody waits for the ranks any more
                self._team.end()
                raise
        return results

    def close(self) -> None:
        """End the ranks. Raises `RankFailed` if one of them does not exit with code 0."""
        self._closed = True
        try:
            self._team.stop(self.timeout)
        finally:
            self._finalizer()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # an error is already being raised: do not replace it
            self._closed = True
            self._finalizer()

    def _check_expected(self, exits: Mapping[int, int] | None) -> dict[int, int]:
        expected = dict(exits or {})
        if strangers := expected.keys() - set(range(self.world_size)):
            raise ConfigError(
                f"expected_exits names rank {min(strangers)}, but the ranks are 0 to {self.world_size - 1}"
            )
        return expected


def _check_seconds(name: str, seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} must be a positive number of seconds, got {seconds!r}")
    return seconds
