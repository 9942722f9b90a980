"""How ranks find out who shares their host, and come to share memory.

Every rank listens on an abstract Unix socket with a random name and tells the others that name. A rank's *leader* is
the lowest rank it can reach that way: abstract names reach exactly as far as one network namespace on one machine, so
the handshake finds the truth instead of trusting LOCAL_RANK. Ranks with one leader are a *host*. A label overrides it:
ranks with different labels are on different hosts, so one machine can play several.

The leader creates every segment and hands out the descriptors over those sockets; both ends check by the kernel's word
that the other runs as the same user. Nothing is on disk, and nothing is left behind however a rank ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sherd.comm.host import peek
from sherd.comm.host.memory import Keeper, MemfdKeeper, Segment
from sherd.comm.host.peers import Peers
from sherd.comm.host.support import unsupported_reason
from sherd.config import CommOptions
from sherd.errors import CommError, ConfigError, PeerLost, TimedOut

Exchange = Callable[[str, Any], list[Any]]
"""exchange(key, value): every rank's JSON value, in rank order."""

_MAX_FDS = 250  # the kernel's limit for one message is 253
_MESSAGE = 1 << 16
_LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself. `rank` is its number in the world, for messages."""

    rank: int
    machine: str
    label: str | None
    user: int
    pid: int
    address: str
    word: tuple[int, int]
    refusal: str | None
    options: dict[str, Any]

    @property
    def name(self) -> str:
        host = f"{self.machine} as {self.label}" if self.label else self.machine
        return f"rank {self.rank} on {host} (pid {self.pid})"


@dataclass
class Meeting:
    """Who is where. `hosts` lists the ranks of each host; `link` joins this rank to its own host's ranks."""

    cards: list[Card]
    hosts: list[list[int]]
    link: Link


def meet(rank: int, world_rank: int, exchange: Exchange, options: CommOptions, group: str = "") -> Meeting:
    """Find out who shares this rank's host. All ranks of `exchange` must call it, with the same options.

    Only ranks with the same `group` meet.
    """
    listener = _listen() if unsupported_reason() is None else None
    card = Card(
        rank=world_rank,
        machine=socket.gethostname(),
        label=options.host,
        user=os.geteuid(),
        pid=os.getpid(),
        address=listener.getsockname().decode()[1:] if listener else "",
        word=peek.MINE,
        refusal=unsupported_reason(),
        options={**options.to_dict(), "host": None},
    )
    try:
        cards = [Card(**fields) for fields in exchange("card", vars(card))]
        _check_options(rank, cards)
        groups: list[str] = exchange("group", group)
        leader, to_leader = _find_leader(rank, cards, groups)
        leaders: list[int] = exchange("leader", leader)
        hosts = [[r for r in range(len(cards)) if leaders[r] == who] for who in sorted(set(leaders))]
        members = [r for r in range(len(cards)) if leaders[r] == leader]
        read = [r for r in members if r == rank or peek.can_read(cards[r].pid, *cards[r].word)]
        everybody_reads: list[bool] = exchange("reads", read == members)
        sockets = {leader: to_leader} if to_leader else _accept(listener, members[1:], cards)
    finally:
        if listener:
            listener.close()
    peeks = all(everybody_reads[r] for r in members)
    return Meeting(cards, hosts, Link(rank, members, [cards[r] for r in members], sockets, peeks))


class Link:
    """The sockets between a leader and the other ranks of its host, used to hand out descriptors.

    `peeks` if all of them can read each other's private memory.
    """

    def __init__(
        self, rank: int, members: list[int], cards: list[Card], sockets: dict[int, socket.socket], peeks: bool
    ) -> None:
        self.rank = rank
        self.members = members
        self.cards = cards
        self.peeks = peeks
        self.is_leader = rank == members[0]
        self._sockets = sockets
        self._keeper: Keeper = MemfdKeeper()

    def share(
        self, label: str, nbytes: int, timeout: float, check: Callable[[], None] = lambda: None, keep: bool = False
    ) -> Segment:
        """A new segment, mapped by every member. Collective. `check` raises if waiting has become pointless; with
        `keep` the segment has a descriptor, too."""
        created = [self._keeper.create(label, nbytes)] if self.is_leader else []
        fds = self._distribute(created, label, timeout, check)
        try:
            segment = Segment(fds[0])
            if keep:
                segment.keep(fds[0])
            return segment
        finally:
            os.close(fds[0])

    def watch(self, timeout: float, numbers: Sequence[int]) -> Peers:
        """Process handles of the other members; `numbers` are the ranks by which they go. Collective.

        The leader opens them while each socket still proves who is at its other end, so no pid can have been reused.
        """
        fds = []
        if self.is_leader:
            fds = [os.pidfd_open(_credentials(self._sockets[m])[0]) for m in self.members[1:]]
            fds.insert(0, os.pidfd_open(os.getpid()))
        fds = self._distribute(fds, "pidfds", timeout, lambda: None)
        index = self.members.index(self.rank)
        os.close(fds[index])
        others = [i for i in range(len(self.members)) if i != index]
        return Peers({numbers[i]: self.cards[i].pid for i in others}, {numbers[i]: fds[i] for i in others})

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _distribute(self, fds: list[int], label: str, timeout: float, check: Callable[[], None]) -> list[int]:
        """The leader's descriptors, on every member; duplicates that the receiver owns."""
        if self.is_leader:
            for member in self.members[1:]:
                self._send(member, fds, label)
            return fds
        return self._receive(label, timeout, check)

    def _send(self, member: int, fds: list[int], label: str) -> None:
        try:
            for start in range(0, len(fds), _MAX_FDS):
                batch = fds[start : start + _MAX_FDS]
                header = json.dumps({"label": label, "last": start + _MAX_FDS >= len(fds)}).encode()
                socket.send_fds(self._sockets[member], [header], batch)
        except OSError as error:
            lost = self.cards[self.members.index(member)].name
            raise PeerLost(f"{lost} was gone when {label!r} was handed out: {error}", (member,)) from error

    def _receive(self, label: str, timeout: float, check: Callable[[], None]) -> list[int]:
        leader = self.cards[0].name
        sock = self._sockets[self.members[0]]
        sock.settimeout(min(timeout, _LOOK_EVERY))
        deadline = time.monotonic() + timeout
        fds: list[int] = []
        while True:
            try:
                data, batch, _, _ = socket.recv_fds(sock, _MESSAGE, _MAX_FDS)
            except TimeoutError as error:
                check()
                if time.monotonic() < deadline:
                    continue
                message = f"rank {self.rank} waited {timeout:g} s for {leader} to share {label!r}"
                raise TimedOut(message, (self.members[0],)) from error
            except OSError as error:
                raise PeerLost(f"{leader} was gone before it shared {label!r}: {error}", (self.members[0],)) from error
            if not data:
                raise PeerLost(f"{leader} left before it shared {label!r}", (self.members[0],))
            fds += batch
            header = json.loads(data)
            if header["label"] != label:
                raise CommError(f"rank {self.rank} expected {label!r} from {leader}, got {header['label']!r}")
            if header["last"]:
                return fds


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0sherd-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


def _check_options(rank: int, cards: list[Card]) -> None:
    """Ranks with other options would wait for each other in vain. All of them see the same first difference."""
    for card in cards:
        for name, value in card.options.items():
            if value != cards[0].options[name]:
                raise ConfigError(
                    f"rank {rank}: all ranks must connect with the same options, but {name} is "
                    f"{cards[0].options[name]!r} on rank {cards[0].rank} and {value!r} on rank {card.rank}"
                )


def _find_leader(rank: int, cards: list[Card], groups: list[str]) -> tuple[int, socket.socket | None]:
    """The lowest rank this one can reach, itself included, and the socket to it."""
    mine = cards[rank]
    for other in range(rank):
        card = cards[other]
        if mine.refusal or card.refusal or (card.label, card.user) != (mine.label, mine.user):
            continue
        if groups[other] != groups[rank]:
            continue
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect("\0" + card.address)
            # Another pid than its own means another PID namespace: no handle of its process could be had here.
            if _credentials(sock) == (card.pid, mine.user):
                sock.send(json.dumps({"rank": rank}).encode())
                return other, sock
        except OSError:
            pass  # not on this machine, or in another network namespace
        sock.close()
    return rank, None


def _accept(listener: socket.socket | None, members: list[int], cards: list[Card]) -> dict[int, socket.socket]:
    """The leader's end. Members connected before they named their leader, so nobody is waited for."""
    sockets: dict[int, socket.socket] = {}
    while listener and len(sockets) < len(members):
        listener.settimeout(10.0)
        sock, _ = listener.accept()
        if _credentials(sock)[1] != os.geteuid():
            sock.close()
            continue
        sock.settimeout(10.0)
        who = json.loads(sock.recv(_MESSAGE))["rank"]
        if who not in members:
            sock.close()
            raise CommError(f"{cards[who].name} came to a host it does not belong to; members: {members}")
        sockets[who] = sock
    return sockets


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, by the kernel's word."""
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user
