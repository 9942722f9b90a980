"""Where a rank receives the others of its host: an abstract Unix socket with a random name.

Every user of the machine can see the name and connect. So a thread accepts every connection, to keep strangers from
filling the queue, and closes those that the kernel says are from another user. Nothing is read from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sherd.errors import CommError, PeerLost

_MESSAGE = 1 << 16
_LOOK_EVERY = 0.05
PATIENCE = 10.0  # seconds that a process of this user has to say which rank it is


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself. `rank` is its number in the world, for messages."""

    rank: int
    label: str | None
    address: str
    word: tuple[int, int]
    refusal: str | None
    options: dict[str, Any]
    machine: str = field(default_factory=socket.gethostname)
    user: int = field(default_factory=os.geteuid)
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        host = f"{self.machine} as {self.label}" if self.label else self.machine
        return f"rank {self.rank} on {host} (pid {self.pid})"


class Reception:
    """Listens from when it is made until it is closed."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0sherd-{secrets.token_hex(16)}")
        self._listener.listen(socket.SOMAXCONN)
        self.address = self._listener.getsockname().decode()[1:]
        self._come: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        threading.Thread(target=_accept, args=(self._listener, self._come), name="sherd-reception", daemon=True).start()

    def await_members(
        self, members: Sequence[int], cards: Sequence[Card], check: Callable[[], None]
    ) -> dict[int, socket.socket]:
        """The sockets of these ranks. They have connected already, so it is quick; `check` raises if one ended."""
        sockets: dict[int, socket.socket] = {}
        while len(sockets) < len(members):
            try:
                sock = self._come.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                check()
                continue
            who = _introduced(sock)
            if who is None:
                pid = credentials(sock)[0]
                sock.close()
                check()
                for member in members:
                    if cards[member].pid == pid:
                        raise PeerLost(f"{cards[member].name} ended before the ranks were connected", (member,))
            elif who not in members:
                sock.close()
                raise CommError(f"{cards[who].name} connected to a host it does not belong to; members: {members}")
            else:
                sockets[who] = sock
        return sockets

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._listener.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._come.get_nowait().close()


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, according to the kernel."""
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user


def _introduced(sock: socket.socket) -> int | None:
    """Which rank a process of this user says it is; None if it has ended instead."""
    sock.settimeout(PATIENCE)
    try:
        said = sock.recv(_MESSAGE)
    except OSError:
        return None
    return int(json.loads(said)["rank"]) if said else None


def _accept(listener: socket.socket, come: queue.SimpleQueue[socket.socket]) -> None:
    me = os.geteuid()
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            if credentials(sock)[1] == me:
                come.put(sock)
            else:
                sock.close()
