"""Ranks that wait for each other in a circle: one in a message, another in a collective that the first never reaches.

A rank that has waited for a while takes a *stance*: what it waits for, and how many calls it has made. It makes no
other call before that wait is over. So rank a *needs* rank b if b has made fewer calls than a waits for; and if a needs
b, b needs c and so on back to a, none of them can ever go on. The stances need not be from the same moment. The first
rank of a circle to go on would have needed a call of the next one, which had not made it when it took its stance, and
can only have gone on later. So there is no first, and old stances may be left where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLLECTIVE, RECV, SEND = "collective", "recv", "send"


@dataclass(frozen=True)
class Stance:
    """What a rank waits for, and the calls it has made. Messages are counted for each peer, from 1."""

    kind: str
    peer: int  # of a message
    count: int  # which collective, or which of the messages from or to the peer
    text: str  # the call and where it was made
    collectives: int
    sends: Mapping[int, int]
    recvs: Mapping[int, int]

    def needs(self, me: int, other: int, theirs: Stance) -> bool:
        """Whether `me`, whose stance this is, cannot go on before `other` makes one more call."""
        if self.kind == COLLECTIVE:
            return other != me and theirs.collectives < self.count
        made = theirs.sends if self.kind == RECV else theirs.recvs
        return other == self.peer and made.get(me, 0) < self.count

    def words(self, name: str, needed: str) -> str:
        """`name` waits for a call of `needed`."""
        what = {COLLECTIVE: f"(call {self.count}), which {needed} has not made"}
        what |= {RECV: f"for a message that {needed} has not sent", SEND: f"for {needed}, which has not received it"}
        return f"{name} waits in {self.text} {what[self.kind]}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Stance:
        """From the JSON form of `to_dict`."""
        counts = {name: {int(r): n for r, n in fields[name].items()} for name in ("sends", "recvs")}
        return cls(**{**fields, **counts})


def circle(start: int, stances: Mapping[int, Stance]) -> list[int]:
    """The shortest circle through `start`, each rank followed by one that it needs; empty if there is none."""
    ways = {start: [start]} if start in stances else {}
    ahead = list(ways)
    while ahead:
        rank = ahead.pop(0)
        for other, theirs in stances.items():
            if stances[rank].needs(rank, other, theirs):
                if other == start:
                    return ways[rank]
                if other not in ways:
                    ways[other] = [*ways[rank], other]
                    ahead.append(other)
    return []


def sides(ranks: list[int], stances: Mapping[int, Stance], names: Sequence[str]) -> list[str]:
    """Who waits for whom in a circle, by rank: every rank that finds it says the same."""
    after = dict(zip(ranks, [*ranks[1:], *ranks[:1]], strict=True))
    return [stances[r].words(names[r], names[after[r]]) for r in sorted(ranks)]
