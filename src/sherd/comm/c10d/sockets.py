"""The connections of a gloo group, and how to break them.

Gloo cannot be told to give up: `abort()` does not wake a thread that waits for a peer, and dropping a group waits for
it. A broken connection wakes every thread, except that of a message it interrupts: gloo fails the messages that have
not begun, and forgets the one it was just writing or reading (`Pair::signalException`), whose thread then waits for
ever. But a message that has begun completes by itself, as gloo begins none before the other end is ready for it. So
messages on their way get a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

QUIET = 0.2  # seconds without a byte in either direction: no message is under way
STALLED = 1.0  # seconds without one although some are waiting: the peer is suspended or cut off
AT_MOST = 10.0  # seconds; a very large message is left in the middle
LOOK_EVERY = 0.01
_BYTES = struct.Struct("=QQ")  # acknowledged and received, in the kernel's tcp_info
_BYTES_AT = 120


class Connections:
    """Sockets that gloo owns, known by number and inode: a number may belong to another file later."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int]] = []

    @contextmanager
    def opened_here(self, peers: int) -> Iterator[None]:
        """Remember the connections that are opened inside, if there is one for each of `peers` on every device.

        Other threads may open some meanwhile; then it is not known whose they are, and none is remembered.
        """
        before = _connected()
        yield
        new = _connected() - before
        devices = len([name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]) or 1
        self._known = sorted(new) if len(new) == peers * devices else []

    def shut_down(self) -> None:
        """Break those that still exist, on both ends, once they are quiet."""
        known, self._known = self._known, []
        with contextlib.ExitStack() as held:
            there = [held.enter_context(sock) for sock in map(_own_handle, known) if sock is not None]
            _wait_until_quiet(there)
            for connection in there:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _own_handle(known: tuple[int, int]) -> socket.socket | None:
    """A duplicate of a socket, if the number still belongs to it."""
    number, inode = known
    try:
        mine = os.dup(number)  # first: now it cannot become another file
    except OSError:
        return None
    if os.fstat(mine).st_ino != inode:
        os.close(mine)
        return None
    return socket.socket(fileno=mine)


def _wait_until_quiet(connections: Sequence[socket.socket]) -> None:
    """Wait until no bytes move on them, and none are left to be moved."""
    last: list[_Traffic] = []
    began = moved = time.monotonic()
    while connections and (now := time.monotonic()) - began < AT_MOST:
        traffic = [_traffic(connection) for connection in connections]
        if traffic != last:
            last, moved = traffic, now
        if now - moved > (STALLED if any(waiting for _, waiting in traffic) else QUIET):
            return
        time.sleep(LOOK_EVERY)


_Traffic = tuple[tuple[int, ...], int]


def _traffic(connection: socket.socket) -> _Traffic:
    """The bytes that a connection has moved, and those that wait in the kernel to be sent or read."""
    try:
        moved = _BYTES.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), _BYTES_AT)
        queued = [fcntl.ioctl(connection, which, bytes(4)) for which in (termios.TIOCOUTQ, termios.FIONREAD)]
    except (OSError, struct.error, AttributeError):  # broken already, or not reported by this system
        return (), 0
    return moved, sum(int.from_bytes(each, sys.byteorder) for each in queued)


def _connected() -> set[tuple[int, int]]:
    """The TCP connections of this process: their numbers and inodes. Empty where the system does not list them."""
    found = set()
    folder = Path("/proc/self/fd")
    for number in [int(entry.name) for entry in folder.iterdir()] if folder.exists() else []:
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(number)) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername():
                        found.add((number, status.st_ino))
    return found
