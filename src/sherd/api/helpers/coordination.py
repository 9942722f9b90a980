"""Coordinating ranks in a script: barrier, broadcast, main_first and print.

They work before `distribute`, and without a launcher, where there is one rank. `barrier`, `broadcast` and `main_first`
are collective, like `mean` and `gather`: every rank calls them, in the same order.
"""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from sherd.api.helpers.process import communicator, is_main, rank
from sherd.comm.base import Communicator
from sherd.comm.waiting.patience import without_limit
from sherd.errors import CommError, ConfigError, SherdError

T = TypeVar("T")
Failure = tuple[bool, str]
"""Whether an error is a `ConfigError`, and its message: what ranks tell each other of it."""


def barrier() -> None:
    """Wait until every rank has reached this call. Collective."""
    comm = communicator()
    with comm.counters.agreeing():
        comm.agree("barrier(sherd.barrier)").wait()


def broadcast(value: T, root: int = 0) -> T:
    """The value of rank `root`, on every rank; what the others pass is ignored. Collective.

    For small values: numbers, strings, bytes, CPU tensors, and lists, tuples, sets and dicts of those are sent as plain
    data. Other objects are pickled, between ranks of one host or with a SHERD_TOKEN.
    """
    comm = communicator()
    comm.check_rank(root, "sherd.broadcast", "root")
    with comm.counters.agreeing():
        comm.agree(f"broadcast(sherd.broadcast from rank {root})").wait()
        received: T = comm.broadcast_object(value, root)
    return received


def main_first() -> AbstractContextManager[None]:
    """Run the block on the first rank of each host first, then on the other ranks. Collective.

        with sherd.main_first():
            data = download_unless_there(folder)

    The others wait as long as it takes: there is no timeout, and a rank that dies is detected at once. An error on a
    first rank is raised on all ranks, with its message. Ranks run the block at different times, so it must not contain
    collective calls. A nested `main_first` is allowed and adds nothing: the first ranks have finished it before the
    others begin.
    """
    return _MainFirst()


def print(*values: object, sep: str | None = " ", end: str | None = "\n", all: bool = False, **options: Any) -> None:
    """Like Python's own, but on rank 0 only; with `all=True` on every rank, each line prefixed with the rank.

    Not collective. Takes `sep`, `end`, `file` and `flush` as `print` does.
    """
    if not all:
        if is_main():
            builtins.print(*values, sep=sep, end=end, **options)
        return
    file, flush = options.pop("file", None) or sys.stdout, options.pop("flush", False)
    text = io.StringIO()
    builtins.print(*values, sep=sep, end=end, file=text, **options)
    lines = text.getvalue().splitlines(keepends=True)
    file.write("".join(f"[rank {rank()}] {line}" for line in lines))  # one write, or lines of ranks would mix
    if flush:
        file.flush()


class _MainFirst:
    """A class, not a generator, so that errors name the line of the `with` statement."""

    _depth = 0  # for the whole process

    def __enter__(self) -> None:
        self._comm = communicator()
        self._first = any(host[0] == self._comm.rank for host in self._comm.hosts)
        if not self._first and not _MainFirst._depth:
            self._agree()
        _MainFirst._depth += 1

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _MainFirst._depth -= 1
        if not self._first or _MainFirst._depth:
            return
        if error is None:
            self._agree()
        elif isinstance(error, Exception):  # an interrupt concerns this rank alone; the others notice when it exits
            # Other first ranks may take long. If the others are in another call, they fail there.
            with without_limit(), suppress(CommError):
                self._tell(failure_of(error))

    def _agree(self) -> None:
        """Find out whether the first ranks succeeded."""
        with without_limit():
            everybody = self._tell(None)
        raise_any(self._comm, "sherd.main_first", everybody)

    def _tell(self, mine: Failure | None) -> list[Failure | None]:
        return exchange(self._comm, "sherd.main_first", mine)


def failure_of(error: Exception) -> Failure:
    return isinstance(error, ConfigError), f"{type(error).__name__}: {error}"


def raise_any(comm: Communicator, what: str, failures: Sequence[Failure | None]) -> None:
    """Raise the first failure of any rank here too, if there is one."""
    for other, failure in enumerate(failures):
        if failure is not None:
            kind = ConfigError if failure[0] else SherdError
            raise kind(f"rank {comm.rank}: {what} failed on rank {other}, and therefore on all ranks: {failure[1]}")


def exchange(comm: Communicator, what: str, mine: Any) -> list[Any]:
    """What every rank passes to the call named `what`. Collective; counted as control traffic, not as training."""
    with comm.counters.agreeing():
        return comm.all_gather_object(mine, what=what)
