"""What every script needs around its loop: who does what, and what all ranks know.

All of it works before `distribute`, and without a launcher, where there is one rank. `barrier`, `broadcast` and
`main_first` are collective, as `mean` and `gather` are: every rank calls them, in the same order.
"""

from __future__ import annotations

import builtins
import io
import sys
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, TypeVar

from sherd.api.helpers.process import communicator, is_main, rank
from sherd.comm.base import Communicator
from sherd.comm.waiting.patience import without_limit
from sherd.errors import CommError, ConfigError, SherdError

T = TypeVar("T")


def barrier() -> None:
    """Wait until every rank is here. Collective."""
    comm = communicator()
    with comm.counters.agreeing():
        comm.agree("barrier(sherd.barrier)").wait()


def broadcast(value: T, root: int = 0) -> T:
    """Rank `root`'s value, on every rank; what the others pass is ignored. Collective.

    For small things: numbers, strings, bytes, tensors on the CPU, and lists, tuples, sets and dicts of those travel as
    plain data. Other objects travel as pickles, among ranks of one host or with a SHERD_TOKEN.
    """
    comm = communicator()
    comm.check_rank(root, "sherd.broadcast", "root")
    with comm.counters.agreeing():
        comm.agree(f"broadcast(sherd.broadcast from rank {root})").wait()
        received: T = comm.broadcast_object(value, root)
    return received


def main_first() -> AbstractContextManager[None]:
    """The first rank of each host does what is inside first, then the others of all hosts do. Collective.

        with sherd.main_first():
            data = download_unless_there(folder)

    The others wait as long as it takes: there is no timeout, and a rank that dies is found at once. What a first rank
    raises all ranks raise, with its words. Inside, ranks are not together: no collective call belongs there. Only
    another `main_first` may be inside, in a function that has its own: it adds nothing, as the first ranks have
    finished it before the others begin.
    """
    return _MainFirst()


def print(*values: object, sep: str | None = " ", end: str | None = "\n", all: bool = False, **options: Any) -> None:
    """As Python's own, on the main rank only; with `all=True` on every rank, and every line begins with the rank.

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
    file.write("".join(f"[rank {rank()}] {line}" for line in lines))  # at once, or lines of several ranks would mix
    if flush:
        file.flush()


class _MainFirst:
    """A class, and no generator: errors then name the line of the `with` statement."""

    _depth = 0  # of the process

    def __enter__(self) -> None:
        self._comm = communicator()
        self._first = any(host[0] == self._comm.rank for host in self._comm.hosts)
        if not self._first and not _MainFirst._depth:
            self._agree()
        _MainFirst._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _MainFirst._depth -= 1
        if not self._first or _MainFirst._depth:
            return
        if error is None:
            self._agree()
        elif isinstance(error, Exception):  # an interrupt is nobody else's; others hear of it when this rank leaves
            # Other first ranks may take long. Or the others are elsewhere, and hear of it now.
            with without_limit(), suppress(CommError):
                self._tell((isinstance(error, ConfigError), f"{type(error).__name__}: {error}"))

    def _agree(self) -> None:
        """Hear what has become of the first ranks."""
        with without_limit():
            everybody = self._tell(None)
        for other, why in enumerate(everybody):
            if why is not None:
                refused = ConfigError if why[0] else SherdError
                here = self._comm.rank
                raise refused(f"rank {here}: sherd.main_first failed on rank {other}, so on all ranks: {why[1]}")

    def _tell(self, mine: tuple[bool, str] | None) -> list[tuple[bool, str] | None]:
        return exchange(self._comm, "sherd.main_first", mine)


def exchange(comm: Communicator, what: str, mine: Any) -> list[Any]:
    """What every rank has, where all of them call `what`. Collective; it counts as control, not as training."""
    with comm.counters.agreeing():
        return comm.all_gather_object(mine, what=what)
