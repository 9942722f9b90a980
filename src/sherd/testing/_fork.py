"""Ranks forked by multiprocessing's fork server, which has imported torch and sherd: they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable
from typing import Any

from sherd.ranks import worker
from sherd.ranks.process import Process


def start(rank: int, control: socket.socket) -> tuple[Process, tuple[()]]:
    """The process of a rank. What it prints goes where the caller's own output goes."""
    return start_with(None, (), rank, control)


def start_with(
    prepare: Callable[..., None] | None, args: tuple[Any, ...], rank: int, control: socket.socket
) -> tuple[Process, tuple[()]]:
    """The process of a rank that calls `prepare(*args)` before anything else."""
    process = _context().Process(target=_main, args=(rank, control, prepare, args), name=f"rank {rank}")
    process.start()
    return process, ()


def _main(rank: int, control: socket.socket, prepare: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is always started by multiprocessing"
    if prepare is not None:
        prepare(*args)
    worker.main(rank, control, parent.sentinel)


def _context() -> multiprocessing.context.ForkServerContext:
    """The fork server's context. The server only imports: an operation would start threads, and a fork loses them."""
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "torch.distributed", "sherd.api", "sherd.testing._fork"]
    if "pytest" in sys.modules:
        modules.append("pytest")  # every rank imports the caller's main module and fn's: under pytest, both need it
    context.set_forkserver_preload(modules)  # only the first rank's matters: later the server is running already
    return context
