"""Whether the processes of ranks still run.

A process of the same machine and namespaces is watched through a handle (pidfd), which becomes readable when it ends:
`Peers`. Before ranks have a communicator, `Presence` watches those that have arrived so far. Of the ranks elsewhere,
each rank watches one, the rank before its own, through the connection of a `Guard`; a rank that sees one end tells the
rest.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import signal
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sherd.comm.meeting import network
from sherd.comm.meeting.guard import Guard
from sherd.errors import CommError

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE = 60  # offset of exit_code in struct pidfd_info


class Peers:
    """The processes of some ranks."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._fds: dict[int, int] = {}
        self._rank_of: dict[int, int] = {}
        self._poll = select.poll()

    def add(self, rank: int, pid: int, pidfd: int) -> None:
        """Watch a process; takes over its pidfd."""
        self._pids[rank] = pid
        self._fds[rank] = pidfd
        self._rank_of[pidfd] = rank
        self._poll.register(pidfd, select.POLLIN)

    def __contains__(self, rank: int) -> bool:
        return rank in self._pids

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        return sorted(self._rank_of[fd] for fd, _ in self._poll.poll(0) if fd in self._rank_of)

    def how_it_ended(self, rank: int) -> str:
        """ "was killed by SIGKILL", "exited with code 3" or "ended", as far as it can still be found out."""
        status = _status_from_pidfd(self._fds[rank]) if rank in self._fds else None
        if status is None:
            status = _status_from_proc(self._pids[rank])
        return "ended" if status is None else describe_exit(os.waitstatus_to_exitcode(status))

    def renumbered(self, numbers: dict[int, int]) -> Peers:
        """Some of these processes under other numbers, with handles of their own."""
        some = Peers()
        for rank in numbers.keys() & self._fds.keys():
            some.add(numbers[rank], self._pids[rank], os.dup(self._fds[rank]))
        return some

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._rank_of.clear()
        self._poll = select.poll()


def describe_exit(code: int) -> str:
    """An exit code in words; as in multiprocessing, negative numbers are signals."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def _status_from_pidfd(fd: int) -> int | None:
    """The wait status of a process that its parent has already reaped (Linux 6.15 and later)."""
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    status: int = struct.unpack_from("<i", info, _EXIT_CODE)[0]
    return status


def _status_from_proc(pid: int) -> int | None:
    """The wait status of a process that has ended and is not reaped yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] in "ZX" else None


# ---------------------------------------------------------------- before there is a communicator


def _namespaces() -> list[str]:
    """What two processes have in common if each can see the other's pid, and reach it over loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))]
    except OSError:
        return [secrets.token_hex(16)]  # nobody else's


@dataclass(frozen=True)
class Hello:
    """The first thing that a rank tells the others. `rank` is its number in the world, for messages."""

    rank: int
    door: Any  # of its guard
    way: dict[str, str] | None  # the route to the store's server, if that is on the network
    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: started(os.getpid()))
    machine: str = field(default_factory=socket.gethostname)
    namespaces: list[str] = field(default_factory=_namespaces)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    @classmethod
    def read(cls, fields: Any) -> Hello:
        """From a note, which another version of sherd may have left, or without a token anyone."""
        kinds = {"rank": int, "pid": int, "machine": str, "namespaces": list, "nonce": str}
        try:
            hello = cls(**fields)
            if all(isinstance(getattr(hello, name), kind) for name, kind in kinds.items()):
                return hello
        except TypeError:
            pass
        raise CommError(f"a rank's hello cannot be read: {fields!r}; install the same sherd on every machine")

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.machine} (pid {self.pid})"


class Presence:
    """The processes of the ranks that have arrived so far, seen from rank `rank` of `world`."""

    def __init__(self, rank: int, world: int, guard: Guard) -> None:
        self._rank = rank
        self._before = (rank - 1) % world
        self._guard = guard
        self._namespaces = _namespaces()
        self.peers = Peers()
        self._ended: dict[int, str] = {}

    def add(self, rank: int, hello: Hello) -> None:
        """Start watching a rank that has arrived."""
        if rank == self._rank:
            return
        if hello.namespaces != self._namespaces:
            # Its loopback is not this one.
            if rank == self._before and hello.door and not network.is_loopback(hello.door[0]):
                self._guard.watch(hello.door)
            return
        try:
            handle = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            self._ended[rank] = "ended"
            return
        except OSError:  # a kernel without pidfds, or a sandbox: it cannot be watched
            return
        if started(hello.pid) not in (hello.started, None):  # the pid now belongs to another process
            os.close(handle)
            self._ended[rank] = "ended"
            return
        self.peers.add(rank, hello.pid, handle)

    def doubtful(self) -> int | None:
        """A rank that has arrived, but no longer accepts connections: it has to be asked whether it is still there."""
        if self._before in self._ended or not self._guard.refused:
            return None
        return self._before

    def give_up(self, rank: int) -> None:
        """Count a rank as ended: it was asked, and has not answered."""
        self._ended.setdefault(rank, "ended")

    def gone(self) -> dict[int, str]:
        """The ranks that have arrived and whose process has ended since, and how."""
        for rank in self.peers.dead():
            self._ended.setdefault(rank, self.peers.how_it_ended(rank))
        for rank in self._guard.dead():
            self._ended.setdefault(rank, "ended")
        return self._ended


def started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks: with the pid, this identifies it."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
