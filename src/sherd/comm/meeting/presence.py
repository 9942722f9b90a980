"""Whether the processes of ranks still run, before these ranks have a communicator.

A process of the same machine and namespaces is watched through a handle (pidfd). Of the others, each rank watches one,
the rank before its own, through the connection of a `Guard`; a rank that sees one end tells the rest.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sherd.comm.meeting import network
from sherd.comm.meeting.guard import Guard
from sherd.comm.meeting.peers import Peers
from sherd.errors import CommError


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
