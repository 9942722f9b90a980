"""Whether the process of a rank on another host has ended: a connection over which nothing is sent but a goodbye.

The backend does not always tell: gloo forgets messages that it was about to send when a connection breaks, and waits
for them until its own timeout. So each rank listens, and the *next* rank connects to it, if it is on another host. The
connection is never accepted: the kernel keeps it open while the process lives, and resets it when the process ends. One
connection per host is enough: the rank that sees a process end tells the others.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import weakref
from typing import Any

from torch.distributed import Store, TCPStore

from sherd.comm.meeting import network
from sherd.errors import ConfigError

GOODBYE = b"goodbye"
BACKLOG = 128  # connections


class Guard:
    """Watches the process of rank `watched` once it knows its door, and lets this one be watched if it `listens`.

    Nothing here waits. With a firewall between the hosts, only the early notice is lost.
    """

    def __init__(self, store: Store, watched: int | None, listens: bool) -> None:
        self._server = server_of(store)
        self._listener = _listen(self._server) if listens and self._server else None
        self.door = None if self._listener is None else _door(self._listener)
        """Where this rank can be watched: an address ("" for that of the store) and a port."""
        self._watched = watched
        self._address: Any = None  # of the watched rank, as the socket module wants it, and its family
        self._connection: socket.socket | None = None
        self._met = False  # whether the watched rank was ever reached
        self._ended = False
        self.refused = False
        """Whether the watched rank could not be reached: it ended before, or something on the way refuses."""
        self.seeks = watched  # the rank whose door it still has to learn

    def watch(self, door: tuple[str, int] | None) -> None:
        """Start watching the process behind `door`, if it has one."""
        self.seeks = None
        if door is not None:
            with contextlib.suppress(OSError, UnicodeError, TypeError, LookupError):  # the door may hold anything
                where = door[0] or self._server, door[1]
                family, _, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
                self._address = family, address
                self._call()

    def dead(self) -> list[int]:
        """The watched rank, if its process has ended without a goodbye."""
        if self._connection is not None:
            self._look(self._connection)
        return [self._watched] if self._ended and self._watched is not None else []

    def _look(self, connection: socket.socket) -> None:
        try:
            said = connection.recv(len(GOODBYE))
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, error.errno)
        else:
            self._lose(connection, 0 if said else errno.ECONNRESET)

    def _lose(self, connection: socket.socket, why: int | None) -> None:
        if self._connection is not connection:
            return  # closed on this side meanwhile
        self._hang_up()
        if why == errno.ECONNRESET:
            # Something on the way may close idle connections. A process that has ended cannot be reached again.
            self._met = True
            self._call()
        elif why == errno.ECONNREFUSED:
            self._ended, self.refused = self._met, not self._met

    def _call(self) -> None:
        family, address = self._address
        self._connection = connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        why = connection.connect_ex(address)
        if why not in (0, errno.EINPROGRESS):
            self._lose(connection, why)

    def close(self) -> None:
        self._hang_up()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = self._listener.accept()
                    with caller:
                        caller.send(GOODBYE)
            self._listener.close()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _door(listener: socket.socket) -> tuple[str, int]:
    address, port = listener.getsockname()[:2]
    return "" if ipaddress.ip_address(address).is_unspecified else address, port


def _listen(server: str) -> socket.socket | None:
    """At this host's address on the interface that was chosen, or else on the route to `server`, where other hosts can
    reach it too."""
    try:
        chosen = network.chosen()
        mine = chosen.address if chosen else network.way_to(server)["address"]
        if not chosen and network.is_loopback(mine):  # the server is on this host, and the others know its address
            mine = ""
        family = socket.AF_INET6 if ":" in mine else socket.AF_INET
        listener = socket.create_server((mine, 0), family=family, backlog=BACKLOG)
    except (OSError, ConfigError):
        return None
    listener.setblocking(False)
    _listeners.add(listener)
    return listener


def root_of(store: Store) -> Store:
    """The store that another one is a prefix of."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def server_of(store: Store) -> str | None:
    """The host that serves a store, which every rank can reach."""
    root = root_of(store)
    host: str | None = root.host if isinstance(root, TCPStore) else None
    return host


# A forked process must not keep the connections of its parent open.
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_listeners() -> None:
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_listeners)
