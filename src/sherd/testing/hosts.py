"""Several hosts on one machine: network namespaces on a bridge, each with a link that can be cut, slowed and measured.

    with Hosts(2, ranks_per_host=2, rate="1gbit") as hosts:
        results = hosts.run(fn)                  # on ranks 0 and 1 of host0, 2 and 3 of host1
        hosts[1].sent()                          # bytes that left host1 so far

Ranks on different hosts reach each other only over their links, and each host has its own name. It needs root, or
raises `Unsupported`. Nothing has a name outside, so nothing is left behind, even after `kill -9`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from sherd.errors import ConfigError
from sherd.ranks.process import Process
from sherd.testing import _fork, _namespaces
from sherd.testing._location import Location
from sherd.testing._namespaces import Namespace
from sherd.testing.pool import RankPool

NETWORK = "10.0.0"
CABLE = "eth0"  # the name of its end on each host


@dataclass(frozen=True)
class Host:
    """One host, for its ranks as well as for their caller: it can be pickled."""

    number: int
    namespace: str
    bridge: str

    @property
    def name(self) -> str:
        return f"host{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number + 2}"

    def link_down(self) -> None:
        """Cut the link. Nobody is notified: packets are lost."""
        _namespaces.run_inside(self.bridge, "ip", "link", "set", self.name, "down")

    def link_up(self) -> None:
        _namespaces.run_inside(self.bridge, "ip", "link", "set", self.name, "up")

    def pause(self) -> None:
        """Stop all of its processes; they keep their connections."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def slow_down(self, rate: str) -> None:
        """Limit what it sends to `rate`, such as "10mbit"."""
        shape = ("rate", rate, "burst", "256kb", "latency", "50ms")
        _namespaces.run_inside(self.namespace, "tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *shape)

    def sent(self) -> int:
        """Bytes that it has sent over its link, headers and acknowledgements included."""
        return self._bytes("tx")

    def received(self) -> int:
        return self._bytes("rx")

    def _bytes(self, direction: str) -> int:
        (link,) = json.loads(_namespaces.run_inside(self.namespace, "ip", "-s", "-j", "link", "show", "dev", CABLE))
        count: int = link["stats64"][direction]["bytes"]
        return count

    def _signal(self, number: int) -> None:
        here = Path(self.namespace).stat().st_ino
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (process / "ns/net").stat().st_ino == here:
                    os.kill(int(process.name), number)


class Hosts(RankPool):
    """`count` hosts with `ranks_per_host` ranks each: a `RankPool` whose hosts are connected only by links.

    `rate` limits what each host sends, such as "1gbit".
    """

    def __init__(
        self, count: int, *, ranks_per_host: int = 1, rate: str | None = None, timeout: float = 60.0, grace: float = 2.0
    ) -> None:
        if not 1 <= count <= 200:
            raise ConfigError(f"count must be a number of hosts from 1 to 200, got {count!r}")
        self._network = _Network(count, ranks_per_host, rate)
        super().__init__(count * ranks_per_host, timeout=timeout, grace=grace, location=self._network)

    def __getitem__(self, number: int) -> Host:
        return self._network.hosts[number]

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._network.close()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._network.close()


class _Network(Location):
    """The namespaces of a bridge and of the hosts on it."""

    def __init__(self, count: int, ranks_per_host: int, rate: str | None) -> None:
        self._ranks_per_host = ranks_per_host
        self._namespaces: list[Namespace] = []
        self.hosts: list[Host] = []
        try:
            bridge = self._new_namespace()
            bridge.run(_set_up_bridge)
            for number in range(count):
                inside = self._new_namespace()
                host = Host(number, inside.path, bridge.path)
                bridge.run(partial(_plug_in, host, inside.task))
                inside.run(partial(_set_up_host, host))
                if rate:
                    host.slow_down(rate)
                self.hosts.append(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self._namespaces:
            self._namespaces.pop().close()

    def _new_namespace(self) -> Namespace:
        self._namespaces.append(Namespace())
        return self._namespaces[-1]

    def start(self, rank: int, control: socket.socket) -> tuple[Process, tuple[()]]:
        host = self.hosts[rank // self._ranks_per_host]
        return _fork.start_with(_move_in, (host.namespace, host.name), rank, control)

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[tuple[int, dict[str, str]]]:
        """A store on the bridge itself: no host can take it down, and a host whose link is cut loses it."""
        address = f"{NETWORK}.1"

        def start() -> tuple[int, TCPStore]:
            listener = socket.create_server((address, 0))
            port = listener.getsockname()[1]
            fd = listener.detach()
            return port, TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)

        port, store = self._namespaces[0].run(start)
        try:
            yield port, {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": CABLE}
        finally:
            del store

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial(_on_host, fn), (self._ranks_per_host, *args)


def _on_host(fn: Callable[..., Any], ranks_per_host: int, *args: Any) -> Any:
    """On a rank: set torchrun's variables for its host, then call the function."""
    host, local = divmod(int(os.environ["RANK"]), ranks_per_host)
    hosts = int(os.environ["WORLD_SIZE"]) // ranks_per_host
    os.environ.update(
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(ranks_per_host),
        GROUP_RANK=str(host),
        GROUP_WORLD_SIZE=str(hosts),
    )
    return fn(*args)


def _move_in(namespace: str, name: str) -> None:
    _namespaces.enter(namespace)
    _namespaces.rename_this_machine(name)


def _set_up_bridge() -> None:
    _namespaces.run("ip", "link", "add", "bridge", "type", "bridge")
    _namespaces.run("ip", "address", "add", f"{NETWORK}.1/24", "dev", "bridge")
    _bring_up("lo")
    _bring_up("bridge")


def _plug_in(host: Host, task: int) -> None:
    """On the bridge: a link, with one end on the host."""
    peer = ("peer", "name", CABLE, "netns", str(task))
    _namespaces.run("ip", "link", "add", host.name, "type", "veth", *peer)
    _namespaces.run("ip", "link", "set", host.name, "master", "bridge")
    _bring_up(host.name)


def _set_up_host(host: Host) -> None:
    _namespaces.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
    _bring_up("lo")
    _bring_up(CABLE)


def _bring_up(device: str) -> None:
    # Without IPv6 addresses, which would announce themselves: only what ranks send should be counted.
    if device != "lo":
        _namespaces.run("ip", "link", "set", device, "addrgenmode", "none")
    _namespaces.run("ip", "link", "set", device, "up")
