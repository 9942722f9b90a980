"""Where the ranks of a group are, and how they find each other."""

from __future__ import annotations

import itertools
import socket
from typing import Protocol

from sherd.testing import Host, Hosts, _namespaces
from sherd.testing.hosts import CABLE


class Place(Protocol):
    """What torchrun would know."""

    def meeting_point(self, world: int) -> list[dict[str, str]]:
        """The variables of each rank of a new group."""

    def host_of(self, rank: int) -> Host | None:
        """Where a rank has to move to."""

    def sent(self) -> list[int]:
        """Bytes that have left each host so far."""


class ThisMachine:
    """All ranks on one host: this one."""

    def meeting_point(self, world: int) -> list[dict[str, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [_variables(rank, world, world) | _master("127.0.0.1", port) for rank in range(world)]

    def host_of(self, rank: int) -> None:
        return None

    def sent(self) -> list[int]:
        return []


class OnHosts:
    """As many ranks on each of some hosts, which all groups share: they take turns."""

    def __init__(self, hosts: Hosts, count: int, ranks_per_host: int) -> None:
        self._hosts = [hosts[number] for number in range(count)]
        self._ranks_per_host = ranks_per_host
        self._ports = itertools.count(29500)  # nobody else is on these hosts

    def meeting_point(self, world: int) -> list[dict[str, str]]:
        shared = _master(self._hosts[0].address, next(self._ports)) | {"GLOO_SOCKET_IFNAME": CABLE}
        return [_variables(rank, world, self._ranks_per_host) | shared for rank in range(world)]

    def host_of(self, rank: int) -> Host:
        return self._hosts[rank // self._ranks_per_host]

    def sent(self) -> list[int]:
        return [host.sent() for host in self._hosts]


def move_to(host: Host) -> None:
    """Put the calling process on a host, before it starts threads."""
    _namespaces.enter(host.namespace)
    _namespaces.rename_this_machine(host.name)


def _variables(rank: int, world: int, ranks_per_host: int) -> dict[str, str]:
    host, local = divmod(rank, ranks_per_host)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": world // ranks_per_host,
    }
    return {name: str(number) for name, number in numbers.items()}


def _master(address: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
