"""How ranks find out which of them share a host.

Every rank listens on an abstract Unix socket with a random name and tells the others that name. A rank's *leader* is
the lowest rank it can reach that way: abstract names are visible exactly inside one network namespace of one machine,
so this finds the truth instead of trusting LOCAL_RANK. Ranks with the same leader are a *host*. A label overrides it:
ranks with different labels are on different hosts, so one machine can stand for several.

Both ends check with the kernel that the other runs as the same user.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sherd.comm.host import futex, remote_reader
from sherd.comm.host.joining.link import Check, Link
from sherd.comm.host.joining.reception import Card, Reception, credentials
from sherd.comm.host.memory import SharedBlock, new_memory
from sherd.config import CommOptions
from sherd.errors import ConfigError

Exchange = Callable[[str, Any], list[Any]]
"""exchange(key, value): every rank's JSON value, in rank order."""


@dataclass
class Meeting:
    """Who is where. `hosts` lists the ranks of each host; `link` joins this rank to its own host's ranks."""

    cards: list[Card]
    hosts: list[list[int]]
    link: Link


def meet(
    rank: int, world_rank: int, exchange: Exchange, options: CommOptions, group: str = "", check: Check = lambda: None
) -> Meeting:
    """Find out who shares this rank's host. All ranks of `exchange` must call it, with the same options.

    Only ranks with the same `group` meet.
    """
    reception = Reception() if unsupported_reason() is None else None
    address, said = reception.address if reception else "", {**options.to_dict(), "host": None}
    card = Card(world_rank, options.host, address, remote_reader.MINE, unsupported_reason(), said)
    try:
        cards = [Card(**fields) for fields in exchange("card", vars(card))]
        _check_options(rank, cards)
        groups: list[str] = exchange("group", group)
        leader, to_leader = _find_leader(rank, cards, groups)
        leaders: list[int] = exchange("leader", leader)
        hosts = [[r for r in range(len(cards)) if leaders[r] == who] for who in sorted(set(leaders))]
        members = [r for r in range(len(cards)) if leaders[r] == leader]
        read = [r for r in members if r == rank or remote_reader.can_read(cards[r].pid, *cards[r].word)]
        everybody_reads: list[bool] = exchange("reads", read == members)
        if to_leader is not None:
            sockets = {leader: to_leader}
        else:
            sockets = reception.await_members(members[1:], cards, check) if reception else {}
    finally:
        if reception:
            reception.close()
    reads_remote = all(everybody_reads[r] for r in members)
    return Meeting(cards, hosts, Link(rank, members, [cards[r] for r in members], sockets, reads_remote))


def _check_options(rank: int, cards: list[Card]) -> None:
    """Ranks with different options would be out of sync. All of them see the same first difference."""
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
            # A pid other than its own means another PID namespace, where no handle of its process can be opened.
            if credentials(sock) == (card.pid, mine.user):
                sock.send(json.dumps({"rank": rank}).encode())
                return other, sock
        except OSError:
            pass  # not on this machine, or in another network namespace
        sock.close()
    return rank, None


@functools.cache
def unsupported_reason() -> str | None:
    """Why the host transport cannot work here, or None. Tries each thing it needs instead of guessing."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if not futex.available():
        return f"it knows no futex call for {os.uname().machine}"
    try:
        fd = new_memory("probe", 1)
        try:
            block = SharedBlock(fd)
        finally:
            os.close(fd)
        futex.wake(block.address)
        os.close(os.pidfd_open(os.getpid()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0sherd-probe-{os.getpid()}-{os.urandom(8).hex()}")
    except (OSError, AttributeError) as error:
        return f"memfd, pidfd or abstract sockets are not available: {error}"
    return None
