"""The sockets between the ranks of a host, and what is handed out over them.

The leader creates every block of shared memory and sends its descriptor to the others. Nothing is on disk, and nothing
is left behind however a rank ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sherd.comm.host.joining.reception import Card, credentials
from sherd.comm.host.memory import SharedBlock, new_memory
from sherd.comm.meeting.peers import Peers
from sherd.comm.waiting.patience import Stopwatch
from sherd.errors import CommError, PeerLost, TimedOut, Unsupported

Check = Callable[[], None]
"""Raises once waiting for the other ranks has become pointless."""

_MAX_FDS = 250  # the kernel's limit for one message is 253
_MESSAGE = 1 << 16
_LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Link:
    """The sockets between a leader and the other ranks of its host, used to hand out descriptors."""

    rank: int
    members: list[int]
    cards: list[Card]
    sockets: dict[int, socket.socket]
    reads_remote: bool
    """whether all of them can read each other's private memory"""

    @property
    def is_leader(self) -> bool:
        return self.rank == self.members[0]

    def share(
        self, label: str, nbytes: int, timeout: float, check: Check = lambda: None, keep: bool = False
    ) -> SharedBlock:
        """A new block, mapped by every member. Collective. With `keep` the block keeps its descriptor."""
        created = [new_memory(label, nbytes)] if self.is_leader else []
        fds = self._distribute(created, label, timeout, check)
        try:
            block = SharedBlock(fds[0])
            if keep:
                block.keep(fds[0])
            return block
        finally:
            os.close(fds[0])

    def secret(self, timeout: float, check: Check = lambda: None) -> bytes:
        """Some bytes that only the members know. Collective."""
        mine = [_memory_file(secrets.token_bytes(32))] if self.is_leader else []
        (fd,) = self._distribute(mine, "secret", timeout, check)
        try:
            return os.pread(fd, 32, 0)
        finally:
            os.close(fd)

    def watch(self, timeout: float, numbers: Sequence[int], check: Check = lambda: None) -> Peers:
        """Process handles of the other members, by their `numbers`. Collective.

        The leader opens them while each socket still proves who is at its other end, so no pid can have been reused.
        """
        fds = []
        if self.is_leader:
            fds = [os.pidfd_open(os.getpid()), *map(self._handle, self.members[1:])]
        fds = self._distribute(fds, "pidfds", timeout, check)
        peers = Peers()
        for member, number, card, fd in zip(self.members, numbers, self.cards, fds, strict=True):
            if member == self.rank:
                os.close(fd)
            else:
                peers.add(number, card.pid, fd)
        return peers

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()

    def _handle(self, member: int) -> int:
        try:
            return os.pidfd_open(credentials(self.sockets[member])[0])
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
                socket.send_fds(self.sockets[member], [header], batch)
        except OSError as error:
            check()  # it may know why
            lost = self.cards[self.members.index(member)].name
            raise PeerLost(f"{lost} was gone when {label!r} was handed out: {error}", (member,)) from error

    def _receive(self, label: str, timeout: float, check: Check) -> list[int]:
        leader = self.cards[0].name
        sock = self.sockets[self.members[0]]
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
                check()  # it may know how the leader ended
                raise PeerLost(f"{leader} was gone before it shared {label!r}: {error}", (self.members[0],)) from error
            if not data:
                check()
                raise PeerLost(f"{leader} left before it shared {label!r}", (self.members[0],))
            fds += batch
            header = json.loads(data)
            if header["label"] != label:
                raise CommError(f"rank {self.rank} expected {label!r} from {leader}, got {header['label']!r}")
            if header["fds"] != len(batch):  # the kernel drops those that do not fit
                raise Unsupported(f"rank {self.rank} cannot open more files; run `ulimit -n 4096` first")
            if header["last"]:
                return fds


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("sherd-secret", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd
