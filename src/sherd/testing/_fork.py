"""Ranks forked by multiprocessing's fork server, which has already imported torch and sherd: they start in
milliseconds."""

from __future__ import annotations

import gc
import multiprocessing
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

from sherd.ranks import worker
from sherd.ranks.process import Process

_asking = threading.RLock()


def start(rank: int, control: socket.socket) -> tuple[Process, tuple[()]]:
    """The process of a rank. What it prints goes where the caller's own output goes."""
    return start_with(None, (), rank, control)


def start_with(
    prepare: Callable[..., None] | None, args: tuple[Any, ...], rank: int, control: socket.socket
) -> tuple[Process, tuple[()]]:
    """The process of a rank that calls `prepare(*args)` before anything else."""
    _set_up_server()
    process = _Forked(target=_main, args=(rank, control, prepare, args), name=f"rank {rank}")
    process.start()
    return process, ()


class _Forked(ForkServerProcess):
    """A process whose exit code no other thread can take: starting a process polls all others, and an exit code can be
    fetched only once."""

    def start(self) -> None:
        with _asking:
            super().start()

    @property
    def exitcode(self) -> int | None:
        with _asking:
            return super().exitcode


def _main(rank: int, control: socket.socket, prepare: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server imported stays: collecting it took 6% of the time of ranks in parity tests
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is always started by multiprocessing"
    if prepare is not None:
        prepare(*args)
    worker.main(rank, control, parent.sentinel)


def _set_up_server() -> None:
    """The server only imports: an operation would start threads, and a fork loses them."""
    modules = ["torch", "torch.distributed", "sherd.api", "sherd.testing._fork"]
    if "pytest" in sys.modules:
        modules.append("pytest")  # every rank imports the modules of the caller and of fn, which need it under pytest
    # Only the first call matters: afterwards the server is already running.
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
