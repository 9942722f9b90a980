"""The ranks of this machine as processes: start them, see which ended and how, end them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sherd.cli.launch import tied
from sherd.cli.machines.rendezvous import Meeting
from sherd.cli.output.forwarding import Output
from sherd.comm.meeting.network import IFNAME
from sherd.comm.meeting.peers import describe_exit
from sherd.errors import SherdError
from sherd.observe import EventStream

# The launcher reports the first failure it sees. When a rank dies its peers fail within tenths of a second, so it has
# to look more often than that to see the cause before the consequences.
POLL_SECONDS = 0.02
GRACE_SECONDS = 10


@dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    rank: int
    pid: int
    code: int  # as in subprocess: negative numbers are signals
    traceback: str  # what it recorded in torch's error file
    wrote: bool  # whether it is known to have written anything

    @property
    def how(self) -> str:
        return describe_exit(self.code)


class Ranks:
    """All ranks of this machine. Each has its own session, so that the launcher alone handles ^C in a terminal."""

    def __init__(self, command: list[str], meeting: Meeting, output: Output) -> None:
        self.failed: list[Ended] = []  # in the order in which they were seen
        self._command = command
        self._meeting = meeting
        self._output = output
        # torch's `record` writes the traceback of a rank into this file. Files in memory need no writable directory,
        # and nothing is left of them, even after `kill -9`.
        self._errors = [os.memfd_create("sherd-run-error") for _ in range(meeting.ranks)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._endings = _Endings(range(meeting.first_rank, meeting.first_rank + meeting.ranks))

    @property
    def running(self) -> dict[int, int]:
        """The pids of the ranks that have not ended, by rank."""
        return {rank: process.pid for rank, process in self._running.items()}

    @property
    def some(self) -> tuple[int, int]:
        """Some rank of this machine and its pid, a running one if possible."""
        return next(iter(self.running.items()), (self._meeting.first_rank, os.getpid()))

    def start(self) -> None:
        """Start them through `tied`, so that they end with this thread, however it ends."""
        tie = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid())]
        for local in range(self._meeting.ranks):
            rank = self._meeting.first_rank + local
            files = self._output.files(rank)
            self._running[rank] = subprocess.Popen(
                [*tie, *self._command], env=self._environment(local), start_new_session=True, **files
            )
            self._output.started(rank)

    def look(self) -> list[Ended]:
        """Those that have ended since the last look; first those that no other can have caused."""
        ended = [found for rank in list(self._running) if (found := self._look_at(rank))]
        ended.sort(key=lambda one: (one.code >= 0, one.rank))  # a killed rank makes others fail, not vice versa
        self.failed += [one for one in ended if one.code != 0]
        return ended

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End them, with this signal first. An exception in the meantime (^C again) only hurries it."""
        if number == signal.SIGINT:
            self._output.interrupted()
        try:
            self._signal(number)
            self._wait(GRACE_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            self._wait(GRACE_SECONDS)
            self._output.settle_all()

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.look()
        while self._running and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self.look()

    def _look_at(self, rank: int) -> Ended | None:
        process = self._running[rank]
        if (code := _exit_code(process.pid)) is None:
            return None
        if code != 0:
            # End what it started too, while the pid is still its own: nothing else knows of these processes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        del self._running[rank]
        if code != 0:
            self._output.settle(rank, killed=code < 0)
            self._endings.failed(rank, describe_exit(code))
        recorded = _recorded(self._errors[rank - self._meeting.first_rank])
        return Ended(rank, process.pid, code, recorded, self._output.wrote(rank))

    def _environment(self, local: int) -> dict[str, str]:
        """The environment that torchrun would give to this rank."""
        meeting, environ = self._meeting, dict(os.environ)
        rank, world = meeting.first_rank + local, str(meeting.world_size)
        environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": world,
            "ROLE_WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(self._meeting.ranks),
            "GROUP_RANK": str(meeting.machine),
            "GROUP_WORLD_SIZE": str(meeting.machines),
            "ROLE_NAME": "default",
            "MASTER_ADDR": meeting.master_addr,
            "MASTER_PORT": str(meeting.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": str(meeting.board.run),
            "TORCHELASTIC_ERROR_FILE": f"/proc/{os.getpid()}/fd/{self._errors[local]}",
        }
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if meeting.interface:
            environ.setdefault(IFNAME, meeting.interface.name)
        return environ


class _Endings:
    """Adds the end of a failed rank to its events, if it has written any since this was created.

    Only the launcher knows it: a rank cannot record being killed, nor `sys.exit(1)`.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        directory = os.environ.get("SHERD_EVENTS", "")
        files = {rank: Path(directory) / f"events-rank{rank:05d}.jsonl" for rank in ranks} if directory else {}
        self._before = {rank: (file, _size(file)) for rank, file in files.items()}

    def failed(self, rank: int, how: str) -> None:
        """Record that a rank has failed. A full or missing disk is not an error here."""
        file, before = self._before.get(rank, (None, 0))
        if file is None or _size(file) == before:
            return  # the file is from another run
        with contextlib.suppress(SherdError, OSError):
            stream = EventStream(file.parent, rank)
            stream.emit("run.end", ok=False, how=how)
            stream.close()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _exit_code(pid: int) -> int | None:
    """The exit code of a process, without reaping it; None while it lives."""
    try:
        about = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # this process was started with SIGCHLD ignored: the kernel has forgotten the child
        return 255
    if about is None:
        return None
    return about.si_status if about.si_code == os.CLD_EXITED else -about.si_status


def _recorded(file: int) -> str:
    """The traceback that torch's `record`, if used, left in the error file of a rank."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        about: Any = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        return str(about.get("message", {}).get("extraInfo", {}).get("py_callstack", "")).rstrip()
    return ""
