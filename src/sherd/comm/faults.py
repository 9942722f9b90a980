"""The words for what goes wrong between ranks: the same on every transport, in errors, warnings and events."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sherd import observe
from sherd.errors import CommError, Diverged, PeerLost, TimedOut

log = logging.getLogger("sherd")


class LinkBroken(RuntimeError):
    """The backend's error about the connection to rank `peer`."""

    def __init__(self, words: str, peer: int) -> None:
        super().__init__(words)
        self.peer = peer


def diverged(number: int, sides: Sequence[str], ranks: Sequence[int]) -> Diverged:
    """`sides` say who called what, and where."""
    return Diverged(
        f"ranks made different calls as call {number}: {'; '.join(sides)}. "
        "All ranks must make the same calls in the same order, with the same shapes, dtypes and options.",
        tuple(ranks),
    )


def lost(ends: Sequence[str], mine: str, ranks: Sequence[int]) -> PeerLost:
    """`ends` say how each lost rank ended, `mine` what this rank was doing."""
    return PeerLost(f"{'; '.join(ends)}. {mine}", tuple(ranks))


def timed_out(late: Sequence[str], seconds: float, deeds: Sequence[str], ranks: Sequence[int]) -> TimedOut:
    """`late` names the missing ranks, `deeds` say what every rank last did."""
    who = ", ".join(late) or "a peer"
    return TimedOut(f"{who} did not come within {seconds:.1f} s. {'; '.join(deeds)}", tuple(ranks))


def warn_late(me: str, late: dict[int, str], seconds: float, call: str, timeout: float) -> None:
    """A warning for each late rank; `late` says who each is and what it last did."""
    for deed in late.values():
        log.warning("%s has waited %.1f s for %s. An error comes after %g s.", me, seconds, deed, timeout)
    observe.emit("comm.late", ranks=list(late), call=call, seconds=round(seconds, 3))


def emit_fault(error: CommError) -> None:
    kind = {PeerLost: "comm.lost", Diverged: "comm.diverged"}.get(type(error), "error")
    observe.emit(kind, ranks=list(error.ranks), text=str(error))
