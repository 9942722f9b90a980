"""One rank, seen from its parent: start it, talk to it, ask for its stack, end it. Nothing here can block for long."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sherd.testing import _worker

STACK_WAIT = 1.0  # seconds for all ranks together to write their stacks: a live one needs a millisecond
TERM_WAIT = 0.5  # seconds between SIGTERM and SIGKILL
KILL_WAIT = 5.0  # seconds for the kernel to end a killed process; one in uninterruptible sleep is given up


class Rank:
    """A rank's process and the files it shares with its parent. `task` is the memory file that all ranks read."""

    def __init__(self, rank: int, task: int) -> None:
        self.rank = rank
        self.started = False  # it has answered at least once
        self.listens = True  # its end of the socket is open
        self.exitcode: int | None = None  # as of the last `look`
        self.control, theirs = socket.socketpair()
        self._result = os.memfd_create(f"sherd-result-{rank}")
        self._stacks = os.memfd_create(f"sherd-stacks-{rank}")
        self.process = _context().Process(target=_worker.main, args=(rank, theirs), name=f"rank {rank}")
        try:
            with theirs:
                self.process.start()
            socket.send_fds(self.control, [b"f"], [task, self._result, self._stacks])
            self.control.setblocking(False)
        except BaseException:
            self.close()
            raise

    def say(self, command: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead rank is found by its exit code, not by its socket
            self.control.send(command)

    def look(self) -> int | None:
        """The exit code, None while the process lives.

        Only this looks, so that an exit is never seen by one who wants to know what to wait for, and then waited for
        in vain by the one who wants to write it down.
        """
        self.exitcode = self.process.exitcode
        return self.exitcode

    def hear(self) -> bytes | None:
        """The rank's answer, b"" once it can give none any more, None while there is none."""
        try:
            answer = self.control.recv(1)
        except BlockingIOError:
            return None
        except OSError:
            answer = b""
        self.started = self.started or answer != b""
        self.listens = self.listens and answer != b""
        return answer

    def result(self) -> Any:
        """What the function returned (after RETURNED)."""
        with open(self._result, "rb", closefd=False) as stream:
            stream.seek(0)
            value = pickle.load(stream)
        os.ftruncate(self._result, 0)  # an idle rank should not hold on to a large result
        return value

    def story(self) -> tuple[float, str]:
        """When and why the function did not return (after RAISED)."""
        when, words = self.result()
        return float(when), str(words)

    def ask_stack(self) -> None:
        os.ftruncate(self._stacks, 0)
        os.lseek(self._stacks, 0, os.SEEK_SET)
        self._signal(signal.SIGUSR1)

    def stack(self) -> str:
        """The stacks it was asked for, or those that it left when it crashed; "" if there are none."""
        data = os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)
        blocks = data.decode(errors="replace").strip().split("\n\n")
        # A crash ends with a list of all extension modules, longer than the stacks and never the news.
        return "\n\n".join(_trimmed(block) for block in blocks if not block.startswith("Extension modules:"))

    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP or a debugger), so that no signal but SIGKILL reaches it."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def _signal(self, number: int) -> None:
        if self.process.pid is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """Let go of the process, which has ended, and of its files.

        If the fork server died, the exit code was a guess; then this ends the process, as it loses its parent's pipe.
        """
        self.control.close()
        os.close(self._result)
        os.close(self._stacks)
        with contextlib.suppress(ValueError):  # still running after SIGKILL: nothing more can be done from here
            self.process.close()


def read_stacks(ranks: Sequence[Rank]) -> dict[int, str]:
    """The Python stacks of all threads of these ranks, or a sentence that says why there is none."""
    asked = [rank for rank in ranks if rank.started and not rank.stopped()]
    for rank in asked:
        rank.ask_stack()
    deadline = time.monotonic() + STACK_WAIT
    before: list[str] | None = None
    while time.monotonic() < deadline:
        now = [rank.stack() for rank in asked]
        if all(now) and now == before:  # nobody says where a stack ends; it has when it no longer grows
            break
        before = now
        time.sleep(0.02)
    return {rank.rank: rank.stack() or _no_stack(rank) for rank in ranks}


def _no_stack(rank: Rank) -> str:
    if not rank.started:
        return "(no stack: the process had not finished starting)"
    if rank.stopped():
        return "(no stack: the process is stopped, as by SIGSTOP)"
    return "(no stack: the process did not react to SIGUSR1)"


def end(ranks: Sequence[Rank]) -> None:
    """End these ranks, politely first, and let go of their files."""
    for number, patience in ((signal.SIGTERM, TERM_WAIT), (signal.SIGKILL, KILL_WAIT)):
        for rank in ranks:
            rank._signal(number)
        _await_exit(ranks, patience)
    for rank in ranks:
        rank.close()


def _await_exit(ranks: Sequence[Rank], patience: float) -> None:
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        alive = [rank.process.sentinel for rank in ranks if rank.process.exitcode is None]
        if not alive:
            return
        wait(alive, left)


def _trimmed(thread: str) -> str:
    """A thread's stack, innermost frame first, without the frames that led to the function: they never differ."""
    lines = thread.split("\n")
    ours = [index for index, line in enumerate(lines) if f'File "{_worker.__file__}"' in line]
    return "\n".join(lines[: ours[0]] if ours and ours[0] > 1 else lines)


def _context() -> multiprocessing.context.ForkServerContext:
    """The fork server's context. The server only imports: an operation would start threads, and a fork loses them."""
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "torch.distributed", "sherd.testing._worker"]
    if "pytest" in sys.modules:
        modules.append("pytest")  # every rank imports the caller's main module and fn's: under pytest, both need it
    context.set_forkserver_preload(modules)  # only the first rank's matters: later the server is running already
    return context
