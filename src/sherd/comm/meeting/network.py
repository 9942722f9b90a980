"""Which network interface of this host leads to the other hosts.

gloo listens at the address that the machine's own name resolves to, and on a fresh Debian or Ubuntu that is loopback:
other hosts cannot connect. All hosts know the address of the master, so the route to it decides:

    mine = way_to(master)                       # on every host; nothing is sent
    everybody = ...                             # the `mine` of all hosts, exchanged by the caller; they are plain JSON
    interface = choose(mine, everybody)         # set GLOO_SOCKET_IFNAME to its name

The exchange is for the master itself: its own name may resolve to loopback, and then only the others know at which of
its addresses they reach it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sherd.errors import ConfigError

IFNAME = "GLOO_SOCKET_IFNAME"
_DISCARD = 9  # a port has to be named to find a route; no packet is sent to it


@dataclass(frozen=True)
class Interface:
    """An interface of this host, and its address on the route to the others."""

    name: str
    address: str


def resolve(host: str) -> list[str]:
    """The addresses of a name, loopback last: the others may be known to other hosts too."""
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or overlong part between two dots
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the master's address {host!r} does not resolve on this machine ({reason}); write an address, or a name "
            "that every machine knows"
        ) from error
    addresses = dict.fromkeys(_scoped(*entry[4]) for entry in found)
    return sorted(addresses, key=is_loopback)


def way_to(master: str) -> dict[str, str]:
    """How this host reaches the master: `reached`, the master's address, and `address`, its own on that route."""
    problem: OSError | None = None
    for reached in resolve(master):
        family = socket.AF_INET6 if ":" in reached else socket.AF_INET
        try:
            target = socket.getaddrinfo(reached, _DISCARD, type=socket.SOCK_DGRAM)[0][4]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # a datagram socket: the kernel looks up the route, and sends nothing
                return {"reached": reached, "address": _scoped(*probe.getsockname())}
        except OSError as error:
            problem = error
    raise ConfigError(
        f"there is no route from this machine to the master's address {master!r} ({problem}); "
        "check `ip route`, and whether the interfaces are up"
    )


def choose(mine: Mapping[str, str], everybody: Iterable[Mapping[str, str]]) -> Interface | None:
    """The interface for traffic between hosts, from the routes of all of them; None if these do not tell."""
    if not is_loopback(mine["address"]):
        return interface_of(mine["address"])
    reached = [str(way.get("reached", "")) for way in everybody]
    elsewhere = [address for address in reached if _parsed(address) and not is_loopback(address)]
    for address in elsewhere:  # others may be wrong, or behind NAT: only addresses of this host count
        if found := interface_of(address):
            return found
    return _only_one_up() if elsewhere else loopback()


def chosen() -> Interface | None:
    """The interface that GLOO_SOCKET_IFNAME names, if it has an address."""
    return _with_address(os.environ.get(IFNAME, ""))


@contextlib.contextmanager
def told(interface: Interface | None) -> Iterator[None]:
    """Inside, gloo connects over this interface; None leaves it as it was."""
    if interface is None:
        yield
        return
    before = os.environ.get(IFNAME)
    os.environ[IFNAME] = interface.name
    try:
        yield
    finally:
        os.environ.pop(IFNAME, None)
        if before is not None:
            os.environ[IFNAME] = before


def interface_of(address: str) -> Interface | None:
    """The interface of this host with this address; None if there is none."""
    import psutil  # late: a rank that meets others on its own host only does without

    wanted, scope = _parsed(address), address.partition("%")[2]
    found = [
        Interface(name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if wanted is not None and _parsed(entry.address) == wanted
    ]
    return next((interface for interface in found if interface.name == scope), found[0] if found else None)


def loopback() -> Interface | None:
    """The loopback interface, whatever it is called; None if it is down."""
    import psutil

    for name, about in psutil.net_if_stats().items():
        if about.isup and "loopback" in about.flags.split(","):
            return _with_address(name)
    return interface_of("127.0.0.1") or interface_of("::1")  # where the system does not list flags


def place_to_listen(address: str, others: bool = True) -> str:
    """The address at which to listen for ranks that know this machine as `address`; "" for every address, where it is
    not known at which one `others`, on other machines, connect: the machine's own name may resolve to loopback, as on a
    fresh Debian or Ubuntu, and the address may be that of a proxy."""
    here = [found for found in resolve(address) if is_loopback(found) or interface_of(found)]
    if not here or (others and is_loopback(here[0]) and not means_loopback(address)):
        return ""
    return here[0]


def listen(where: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine, or with "" at every one."""
    if not where and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((where, port), family=socket.AF_INET6 if ":" in where else socket.AF_INET)


def is_loopback(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is not None and parsed.is_loopback


def means_loopback(address: str) -> bool:
    """Whether loopback was asked for, and is not merely what a name resolves to."""
    return address == "localhost" or is_loopback(address)


def _only_one_up() -> Interface | None:
    """The interface that is up and not loopback, if there is just one."""
    import psutil

    up = [name for name, about in psutil.net_if_stats().items() if about.isup and "loopback" not in about.flags]
    found = [interface for interface in map(_with_address, up) if interface]
    return found[0] if len(found) == 1 else None


def _with_address(name: str) -> Interface | None:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)  # IPv4 first, as gloo does
    entries = [entry for entry in psutil.net_if_addrs().get(name, []) if entry.family in families]
    entries.sort(key=lambda entry: families.index(entry.family))
    return Interface(name, entries[0].address) if entries else None


def _scoped(host: str, port: int, flow: int = 0, scope: int = 0) -> str:
    """An address as sockets give it, as one string: a link-local one names its interface."""
    if scope and "%" not in host:
        with contextlib.suppress(OSError):
            return f"{host}%{socket.if_indextoname(scope)}"
    return host


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a hardware address, or what a stranger wrote
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
