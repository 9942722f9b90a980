"""Whether the process of a rank on another host has ended: a connection over which nothing is said but goodbye.

The backend does not always tell: gloo forgets messages that it was about to send when a connection breaks, and waits
for them until its own timeout. So each rank listens, and the *next* rank connects to it, if it is on another host.
Nobody accepts the connection, which the kernel holds for as long as the process lives, and resets when it ends. One
connection per host is enough: who sees a process end tells everyone else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import weakref
from datetime import timedelta

from torch.distributed import Store, TCPStore

log = logging.getLogger("sherd")
CONNECT_WITHIN = 2.0  # seconds
GOODBYE = b"goodbye"


class Guard:
    """Watches the process of rank `watched`, and lets this one be watched if it `listens`; they meet in `store`.

    A rank of the same host needs none of this. A firewall between the hosts costs no more than the early notice.
    """

    def __init__(self, store: Store, rank: int, watched: int | None, listens: bool, timeout: float) -> None:
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._watched = watched
        self._ended = False
        if listens:
            self._listener = _listen(_address_towards(_server_of(store)))
            store.set(f"guard/{rank}", json.dumps(self._listener and self._listener.getsockname()[:2]))
        if watched is not None:
            self._connection = _connect(store, watched, timeout)

    def dead(self) -> list[int]:
        """The watched rank, if its process has ended without a goodbye."""
        if self._connection is not None:
            try:
                self._ended = not self._connection.recv(len(GOODBYE))
            except BlockingIOError:
                return []
            except OSError:
                self._ended = True
            self._hang_up()
        return [self._watched] if self._ended and self._watched is not None else []

    def close(self) -> None:
        self._hang_up()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                caller, _ = self._listener.accept()
                with caller:
                    caller.send(GOODBYE)
            self._listener.close()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _listen(address: str | None) -> socket.socket | None:
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1)
    listener.setblocking(False)
    _listeners.add(listener)
    return listener


def _connect(store: Store, rank: int, timeout: float) -> socket.socket | None:
    try:
        store.wait([f"guard/{rank}"], timedelta(seconds=timeout))
        address = json.loads(store.get(f"guard/{rank}"))
        connection = socket.create_connection(tuple(address), CONNECT_WITHIN) if address else None
    except (RuntimeError, OSError) as error:
        log.debug("the end of rank %d may be noticed late: %s", rank, error)
        return None
    if connection is not None:
        connection.setblocking(False)
    return connection


def _server_of(store: Store) -> str | None:
    """Where the store is served, which every host can reach."""
    while not isinstance(store, TCPStore):
        if not hasattr(store, "underlying_store"):
            return None
        store = store.underlying_store
    host: str = store.host
    return host


def _address_towards(server: str | None) -> str | None:
    """This host's own address on the way to `server`."""
    if server is None:
        return None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)  # sends nothing
            mine: str = way.getsockname()[0]
            return mine
    except OSError:
        return None


# A forked process must not hold the connection of the rank that it comes from.
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_listeners() -> None:
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_listeners)
