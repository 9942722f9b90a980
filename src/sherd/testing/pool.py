"""Ranks that are started once and used for many runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, TypeVar, overload

from sherd.errors import ConfigError
from sherd.testing import _call, _worker
from sherd.testing._process import Rank, end
from sherd.testing._report import failure
from sherd.testing._watch import Died, Outcome, describe_exit, watch

T = TypeVar("T")

START_TIMEOUT = 120.0  # seconds for ranks to start: the first ones wait until the fork server has imported torch


class RankPool:
    """`world_size` ranks that run one function after another.

    They start with the first `run` and sleep between runs, at no cost. Every run has a rendezvous, an environment, a
    working directory, a sys.path and a torch seed of its own; whatever else a function changes in its process stays
    changed for the next one (use `run_ranks` where that matters). When a run fails, its ranks are ended and the next
    run starts new ones. Not for use by two threads at a time.

    `timeout` bounds a run, in seconds. After the first failure the other ranks have `grace` seconds to fail too.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0, grace: float = 2.0) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size must be a whole number of at least 1, got {world_size!r}")
        for name, seconds in (("timeout", timeout), ("grace", grace)):
            _check_seconds(name, seconds)
        self.world_size = world_size
        self.timeout = timeout
        self.grace = grace
        self._closed = False
        self._ranks: list[Rank] = []
        self._task = os.memfd_create("sherd-task")
        # A pool that nobody closes: multiprocessing's own finalizers run before it waits for its children at exit (for
        # ever, as idle ranks do not end by themselves), in processes that it started too, and not in forks of ours.
        self._finalizer = Finalize(self, _let_go, (self._ranks, self._task), exitpriority=0)

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
        `RanksTimedOut` if ranks are still at work after `timeout` seconds (default: the pool's).
        """
        if self._closed:
            raise ConfigError("this RankPool is closed; build a new one")
        limit = self.timeout if timeout is None else _check_seconds("timeout", timeout)
        expected = self._check_expected(expected_exits)
        with _call.rendezvous() as port:
            _worker.write_file(_call.task(fn, args, self.world_size, port, env), self._task)
            try:
                return self._run(limit, expected)
            except BaseException:  # KeyboardInterrupt too: whatever the ranks are doing, nobody waits for it any more
                _end(self._ranks)
                raise
            finally:
                os.ftruncate(self._task, 0)  # an idle pool should not hold on to large arguments

    def _run(self, timeout: float, expected: Mapping[int, int]) -> list[Any]:
        """Have the task run, from the start of the ranks to the end of their process group."""
        self._start()
        outcome = self._command(_worker.RUN, "running the function", timeout, expected)
        results = outcome.results(self._ranks)
        self._check(outcome, "handing over the result", timeout)
        if expected:
            self._stop(expected)
        else:  # only now: a rank that left the group earlier could have failed those still in it
            self._command(_worker.CLEAN, "destroying the process group", timeout, {})
        return results

    def close(self) -> None:
        """End the ranks. Raises `RankFailed` if one of them does not exit with code 0."""
        self._closed = True
        try:
            self._stop({})
        finally:
            self._finalizer()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # an error is on its way already: do not put another one in front of it
            self._closed = True
            self._finalizer()

    def _start(self) -> None:
        """New ranks if there are none; otherwise make sure that the ones from the last run still live."""
        if self._ranks:
            codes = {rank.rank: rank.look() for rank in self._ranks}
            outcome = Outcome(answered=set(codes))
            for number, code in codes.items():
                if code is not None:
                    outcome.fail(number, describe_exit(code))
            self._check(outcome, "waiting for the next run", self.timeout)
            return
        for number in range(self.world_size):
            self._ranks.append(Rank(number, self._task))
        self._check(
            watch(self._ranks, START_TIMEOUT, self.grace, {}), "starting (see what they printed)", START_TIMEOUT
        )

    def _command(self, command: bytes, doing: str, timeout: float, expected: Mapping[int, int]) -> Outcome:
        """Give all ranks a command and see it through."""
        for rank in self._ranks:
            rank.say(command)
        outcome = watch(self._ranks, timeout, self.grace, expected)
        self._check(outcome, doing, timeout)
        return outcome

    def _stop(self, dead: Mapping[int, int]) -> None:
        """Have the ranks exit by themselves and check their exit codes; `dead` are those that have exited already."""
        try:
            self._command(_worker.STOP, "exiting", self.timeout, dict.fromkeys(range(len(self._ranks)), 0) | dict(dead))
        finally:
            _end(self._ranks)

    def _check(self, outcome: Outcome, doing: str, timeout: float) -> None:
        if error := failure(self._ranks, outcome, doing=doing, timeout=timeout, grace=self.grace):
            raise error

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


def _end(ranks: list[Rank]) -> None:
    end(ranks)
    ranks.clear()


def _let_go(ranks: list[Rank], task: int) -> None:
    _end(ranks)
    os.close(task)
