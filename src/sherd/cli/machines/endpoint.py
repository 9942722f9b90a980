"""Where machine 0 listens, and how the others reach it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import DistError, TCPStore

from sherd.cli.machines.aside import aside
from sherd.cli.machines.board import ANSWER, connected
from sherd.comm.meeting import network
from sherd.errors import ConfigError
from sherd.machine import unreachable

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 3.0  # for one attempt: a host that drops packets does not refuse


@dataclass(frozen=True)
class Listening:
    """The store of machine 0, which lives in this process."""

    store: TCPStore
    where: str  # as text
    port: int
    for_ranks: str  # the address at which ranks of this machine reach it


def listen_alone() -> Listening:
    """For one machine: on loopback, at a free port, so that two runs on a machine do not collide."""
    return _hosted(_bound(LOOPBACK, 0), LOOPBACK, LOOPBACK, f"{LOOPBACK} (loopback)")


def listen(address: str, port: int) -> Listening:
    """On the address by which others know this machine; on all addresses if that is not one of its own."""
    local = aside(lambda: network.place_to_listen(address))
    if local:
        interface = network.interface_of(local)
        where = f"{shown(local, port)} ({interface.name if interface else 'loopback'})"
        return _hosted(_bound(local, port), local, address, where)
    own = any(network.is_loopback(found) for found in _resolved(address))
    where = f"port {port} of all its interfaces"
    if not own:
        where += f" ({address} is not an address of this machine)"
    return _hosted(_bound("", port), LOOPBACK, address if own else LOOPBACK, where)


def reach(address: str, port: int, until: Callable[[str], None]) -> tuple[TCPStore, str]:
    """A connection to the store of machine 0, and the address at which it was reached. `until` is called with the
    reason after every failed attempt."""
    while True:
        reason = ""
        for found in _resolved(address):
            try:
                _probe(found, port)
                return connected(found, port), found
            except OSError as error:
                reason = error.strerror or "no answer"
            except DistError:
                reason = "what answers there is not `sherd run`"
        until(reason)


def shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _resolved(address: str) -> list[str]:
    return aside(lambda: network.resolve(address))


def _bound(address: str, port: int) -> socket.socket:
    try:
        return network.listen(address, port)
    except OSError as error:
        where = f"port {port}" + (f" of {address}" if address else "")
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{where} is in use by another program; write another one with --master-port, the same on every machine"
            ) from error
        raise ConfigError(
            f"this machine cannot listen at {where} ({error.strerror}); write another one with --master-port, the same "
            "on every machine"
        ) from error


def _probe(address: str, port: int) -> None:
    """Raise `OSError` if nothing listens there."""
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        if connection.getsockname() == connection.getpeername():  # on loopback, TCP connects a free port to itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _hosted(listener: socket.socket, own: str, for_ranks: str, where: str) -> Listening:
    """A store on this socket: a `TCPStore` that opens its own listens on every interface."""
    port: int = listener.getsockname()[1]
    try:
        _probe(own, port)
    except OSError as error:
        listener.close()
        raise unreachable(shown(own, port), error) from error
    fd = listener.detach()
    store = aside(
        lambda: TCPStore(own, port, is_master=True, wait_for_workers=False, timeout=ANSWER, master_listen_fd=fd)
    )
    return Listening(store, where, port, for_ranks)
