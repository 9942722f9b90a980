"""One rank, seen from its parent: start it, command it, ask for its stack, end it. Nothing here can block for long."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from sherd.ranks import worker
from sherd.ranks.output import Output

STACK_WAIT = 1.0  # seconds for all ranks together to write their stacks: a live one needs a millisecond
TERM_WAIT = 0.5  # seconds between SIGTERM and SIGKILL
KILL_WAIT = 5.0  # seconds for the kernel to end a killed process; after that, as in uninterruptible sleep, give up


class Process(Protocol):
    """What a rank needs of its process. As in multiprocessing, negative exit codes are signals."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int:
        """A file that becomes readable when the process ends."""

    @property
    def exitcode(self) -> int | None: ...

    def close(self) -> None: ...


# Starts a rank's process, which calls `worker.main` with its end of the socket, and gives the streams to forward, if
# any.
Start = Callable[[int, socket.socket], tuple[Process, Sequence[Output]]]


class Rank:
    """A rank's process and the files it shares with its parent. `task` is the memory file that all ranks read."""

    def __init__(self, rank: int, start: Start, task: int) -> None:
        self.rank = rank
        self.started = False  # it has answered at least once
        self.listens = True  # its end of the socket is open
        self.exitcode: int | None = None  # as of the last `look`
        self.control, theirs = socket.socketpair()
        self._result = os.memfd_create(f"sherd-result-{rank}")
        self._stacks = os.memfd_create(f"sherd-stacks-{rank}")
        self._files = contextlib.ExitStack()
        self._files.enter_context(self.control)
        self._files.callback(os.close, self._result)
        self._files.callback(os.close, self._stacks)
        try:
            with theirs:
                self.process, self.outputs = start(rank, theirs)
            for output in self.outputs:
                self._files.callback(output.close)
            socket.send_fds(self.control, [b"f"], [task, self._result, self._stacks])
            self.control.setblocking(False)
        except BaseException:
            self._files.close()  # a process that was started sees the socket close, and ends
            raise

    def say(self, command: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead rank is found by its exit code, not by its socket
            self.control.send(command)

    def look(self) -> int | None:
        """The exit code, None while the process lives.

        Nothing else asks for it, so that an exit is never noticed while deciding what to wait for, and then missed by
        the code that records it.
        """
        self.exitcode = self.process.exitcode
        return self.exitcode

    def hear(self) -> bytes | None:
        """The rank's answer; None if there is none yet, b"" if there will be none."""
        try:
            answer = self.control.recv(1)
        except BlockingIOError:
            return None
        except OSError:
            answer = b""
        self.started = self.started or answer != b""
        self.listens = self.listens and answer != b""
        return answer

    def wakers(self) -> list[Any]:
        """The files that become readable when there is something to look at."""
        ended = [self.process.sentinel] if self.exitcode is None else []
        answers = [self.control] if self.listens else []
        return [*ended, *answers, *(output for output in self.outputs if output.open)]

    def forward(self) -> None:
        """Forward what it has printed since the last time."""
        for output in self.outputs:
            output.forward()

    def result(self) -> Any:
        """What the function returned (after RETURNED), or when and why it did not (after RAISED)."""
        with open(self._result, "rb", closefd=False) as stream:
            stream.seek(0)
            value = pickle.load(stream)
        os.ftruncate(self._result, 0)  # an idle rank should not hold on to a large result
        return value

    def ask_stack(self) -> None:
        os.ftruncate(self._stacks, 0)
        os.lseek(self._stacks, 0, os.SEEK_SET)
        self._signal(signal.SIGUSR1)

    def stack(self) -> str:
        """The stacks it was asked for, or those that it left when it crashed; "" if there are none."""
        data = os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)
        blocks = data.decode(errors="replace").strip().split("\n\n")
        # A crash ends with a list of all extension modules, longer than the stacks and of no use.
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
        """Release the process, which has ended, and its files.

        If the fork server died, the exit code was a guess; then closing its parent's pipe ends the process.
        """
        self._files.close()
        with contextlib.suppress(ValueError):  # still running after SIGKILL: nothing more can be done from here
            self.process.close()


def read_stacks(ranks: Sequence[Rank]) -> dict[int, str]:
    """The Python stacks of all threads of these ranks, or a note that says why there is none."""
    asked = [rank for rank in ranks if rank.started and not rank.stopped()]
    for rank in asked:
        rank.ask_stack()
    deadline = time.monotonic() + STACK_WAIT
    before: list[str] | None = None
    while time.monotonic() < deadline:
        now = [rank.stack() for rank in asked]
        if all(now) and now == before:  # there is no end marker: a stack is complete when it stops growing
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
    """End these ranks, with SIGTERM first, and release their files. ^C in the meantime only hurries it."""
    try:
        for rank in ranks:
            rank._signal(signal.SIGTERM)
        _await_exit(ranks, TERM_WAIT)
    finally:
        for rank in ranks:
            rank._signal(signal.SIGKILL)
        _await_exit(ranks, KILL_WAIT)
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
    """A thread's stack, innermost frame first, without those that called the function: they never differ."""
    lines = thread.split("\n")
    ours = [index for index, line in enumerate(lines) if f'File "{worker.HERE}' in line]
    return "\n".join(lines[: ours[0]] if ours and ours[0] > 1 else lines)
