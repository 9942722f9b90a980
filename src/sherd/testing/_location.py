"""Where the ranks of a pool run, and how they find each other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from sherd.ranks import call
from sherd.ranks.process import Process
from sherd.testing import _fork


class Location:
    """This machine. Subclasses put ranks elsewhere."""

    def start(self, rank: int, control: socket.socket) -> tuple[Process, tuple[()]]:
        """The process of a rank."""
        return _fork.start(rank, control)

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[tuple[int, dict[str, str]]]:
        """The port of a store for one run, and the variables that ranks need to reach it and each other."""
        with call.rendezvous() as port:
            yield port, {}

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What ranks call for `fn(*args)`."""
        return fn, args
