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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sherd.comm.host import remote_reader as peek
from sherd.comm.host.joining.reception import Reception, credentials
from sherd.comm.host.joining.support import unsupported_reason
from sherd.comm.host.memory import Keeper, MemfdKeeper, Segment
from sherd.comm.meeting.peers import Peers
from sherd.comm.waiting.patience import Stopwatch
from sherd.config import CommOptions
from sherd.errors import CommError, ConfigError, PeerLost, TimedOut, Unsupported

Check = Callable[[], None]
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


def meet(
    rank: int,
    world_rank: int,
    exchange: Exchange,
    options: CommOptions,
    group: str = "",
    check: Check = lambda: None,
) -> Meeting:
    """Find out who shares this rank's host. All ranks of `exchange` must call it, with the same options.

    Only ranks with the same `group` meet. `check` raises if waiting for the others has become pointless.
    """
    reception = Reception() if unsupported_reason() is None else None
    card = Card(
        rank=world_rank,
        machine=socket.gethostname(),
        label=options.host,
        user=os.geteuid(),
        pid=os.getpid(),
        address=reception.address if reception else "",
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
        if to_leader is not None:
            sockets = {leader: to_leader}
        else:
            sockets = reception.await_members(members[1:], cards, check) if reception else {}
    finally:
        if reception:
            reception.close()
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
        self, label: str, nbytes: int, timeout: float, check: Check = lambda: None, keep: bool = False
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

    def secret(self, timeout: float, check: Check = lambda: None) -> bytes:
        """Some bytes that the members know and nobody else. Collective."""
        mine = [_memory_file(secrets.token_bytes(32))] if self.is_leader else []
        (fd,) = self._distribute(mine, "secret", timeout, check)
        try:
            return os.pread(fd, 32, 0)
        finally:
            os.close(fd)

    def watch(self, timeout: float, numbers: Sequence[int], check: Check = lambda: None) -> Peers:
        """Process handles of the other members; `numbers` are the ranks by which they go. Collective.

        The leader opens them while each socket still proves who is at its other end, so no pid can have been reused.
        """
        fds = []
        if self.is_leader:
            fds = [os.pidfd_open(os.getpid()), *map(self._handle, self.members[1:])]
        fds = self._distribute(fds, "pidfds", timeout, check)
        index = self.members.index(self.rank)
        os.close(fds[index])
        others = [i for i in range(len(self.members)) if i != index]
        return Peers({numbers[i]: self.cards[i].pid for i in others}, {numbers[i]: fds[i] for i in others})

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _handle(self, member: int) -> int:
        try:
            return os.pidfd_open(credentials(self._sockets[member])[0])
        except ProcessLookupError as error:
            lost = self.cards[self.members.index(member)].name
            raise PeerLost(f"{lost} ended before the ranks were connected", (member,)) from error

    def _distribute(self, fds: list[int], label: str, timeout: float, check: Check) -> list[int]:
        """The leader's descriptors, on every member; duplicates that the receiver owns."""
        if self.is_leader:
            for member in self.members[1:]:
                self._send(member, fds, label, check)
            return fds
        return self._receive(label, timeout, check)

    def _send(self, member: int, fds: list[int], label: str, check: Check) -> None:
        try:
            for start in range(0, len(fds), _MAX_FDS):
                batch = fds[start : start + _MAX_FDS]
                header = json.dumps({"label": label, "fds": len(batch), "last": start + _MAX_FDS >= len(fds)}).encode()
                socket.send_fds(self._sockets[member], [header], batch)
        except OSError as error:
            check()  # which may know why
            lost = self.cards[self.members.index(member)].name
            raise PeerLost(f"{lost} was gone when {label!r} was handed out: {error}", (member,)) from error

    def _receive(self, label: str, timeout: float, check: Check) -> list[int]:
        leader = self.cards[0].name
        sock = self._sockets[self.members[0]]
        sock.settimeout(min(timeout, _LOOK_EVERY))
        watch = Stopwatch()
        fds: list[int] = []
        while True:
            try:
                data, batch, _, _ = socket.recv_fds(sock, _MESSAGE, _MAX_FDS)
            except TimeoutError as error:
                check()
                if watch.seconds() < timeout:
                    continue
                message = f"rank {self.rank} waited {timeout:g} s for {leader} to share {label!r}"
                raise TimedOut(message, (self.members[0],)) from error
            except OSError as error:
                check()  # which may know how it ended
                raise PeerLost(f"{leader} was gone before it shared {label!r}: {error}", (self.members[0],)) from error
            if not data:
                check()
                raise PeerLost(f"{leader} left before it shared {label!r}", (self.members[0],))
            fds += batch
            header = json.loads(data)
            if header["label"] != label:
                raise CommError(f"rank {self.rank} expected {label!r} from {leader}, got {header['label']!r}")
            if header["fds"] != len(batch):  # the kernel drops those for which there is no room
                raise Unsupported(f"rank {self.rank} has no room for more open files; write `ulimit -n 4096` before")
            if header["last"]:
                return fds


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
            if credentials(sock) == (card.pid, mine.user):
                sock.send(json.dumps({"rank": rank}).encode())
                return other, sock
        except OSError:
            pass  # not on this machine, or in another network namespace
        sock.close()
    return rank, None


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("sherd-secret", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd
