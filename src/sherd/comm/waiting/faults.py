"""The text of errors, warnings and events about what goes wrong between ranks: the same on every transport."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence

from sherd import observe
from sherd.errors import CommError, Diverged, PeerLost, TimedOut

log = logging.getLogger("sherd")

_NOTE = re.compile(r" \[note: ([^\]]*)\]?")  # from `calls.labelled`; a text that was cut off may lack its end
_TOGETHER = "All ranks must go on equally long: give each the same number of batches, and have them decide together "
_TOGETHER += "when to leave a loop."


class LinkBroken(RuntimeError):
    """The backend's error about the connection to rank `peer`."""

    def __init__(self, words: str, peer: int) -> None:
        super().__init__(words)
        self.peer = peer


def diverged(number: int, sides: Sequence[str], ranks: Sequence[int]) -> Diverged:
    """`sides` say who called what, and where."""
    words = f"ranks made different calls as call {number}: {_plain('; '.join(sides))}. "
    words += "All ranks must make the same calls in the same order, with the same shapes, dtypes and options."
    alone = [note for side in sides for note in _NOTE.findall(side) if not all(note in other for other in sides)]
    return Diverged(_begun(alone, f"Here {words}") if alone else words, tuple(ranks))


def deadlocked(sides: Sequence[str], ranks: Sequence[int]) -> Diverged:
    """`sides` say who waits for whom, in which call, and where."""
    words = f"ranks are deadlocked: {_plain('; '.join(sides))}. All ranks must make the same calls in the "
    words += "same order; a recv needs a send on the other rank, and a send needs a recv, before both wait elsewhere."
    return Diverged(_begun([note for side in sides for note in _NOTE.findall(side)], words), tuple(ranks))


def lost(ends: Sequence[str], mine: str, ranks: Sequence[int]) -> PeerLost:
    """`ends` say how each lost rank ended, `mine` what this rank was doing."""
    words = _plain(f"{'; '.join(ends)}. {mine}")
    if any(" left; it " in end for end in ends):  # without an error, but too early
        notes = _under_way([mine])
        words = _begun(notes, words) if notes else f"{words}. {_TOGETHER}"
    return PeerLost(words, tuple(ranks))


def timed_out(late: Sequence[str], seconds: float, activities: Sequence[str], ranks: Sequence[int]) -> TimedOut:
    """`late` names the missing ranks, `activities` say what every rank last did."""
    who = ", ".join(late) or "a peer"
    words = _plain(f"{who} did not reach this call within {seconds:.1f} s. {'; '.join(activities)}")
    return TimedOut(_begun(_under_way(activities), words), tuple(ranks))


def lost_early(ends: Mapping[int, str], ranks: Sequence[int] | None = None) -> PeerLost:
    """`ends` say which ranks ended before there was a communicator, and how."""
    return PeerLost(
        f"{'; '.join(ends.values())} before the ranks were connected", tuple(ends if ranks is None else ranks)
    )


def did_not_connect(me: str, stage: str, missing: Mapping[int, int], seconds: float) -> TimedOut:
    """`missing` are the ranks that did not arrive, by their number in the world; if there are none, the network is at
    fault."""
    if missing:
        return TimedOut(
            f"{me}: ranks {list(missing.values())} did not reach the handshake ({stage!r}) within {seconds:.1f} s. "
            "All ranks must connect; look at the output of those ranks first.",
            tuple(missing),
        )
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    way = f"interface {interface}" if interface else "the interface that a machine's own name resolves to"
    return TimedOut(
        f"{me}: all ranks have arrived, but could not reach each other over {way} within {seconds:.1f} s; set "
        "GLOO_SOCKET_IFNAME on each machine to the interface on which the others reach it"
    )


def wrong_token(me: str, others: Mapping[int, str]) -> CommError:
    """What the store holds for `others` is not sealed with this rank's token."""
    return CommError(
        f"{me} does not trust what the store holds for {', '.join(others.values())}: it is not sealed with this "
        "rank's token; give all machines the same SHERD_TOKEN",
        tuple(others),
    )


def warn_late(me: str, late: dict[int, str], seconds: float, call: str, timeout: float) -> None:
    """A warning for each late rank; `late` says who each is and what it last did."""
    end = "" if math.isinf(timeout) else f" It gives up after {timeout:g} s."
    for activity in late.values():
        log.warning("%s has waited %.1f s for %s.%s", me, seconds, _plain(activity), end)
    observe.emit("comm.late", ranks=list(late), call=_plain(call), seconds=round(seconds, 3))


def emit_fault(error: CommError) -> None:
    kind = {PeerLost: "comm.lost", Diverged: "comm.diverged"}.get(type(error), "error")
    observe.emit(kind, ranks=list(error.ranks), text=str(error))


def _plain(words: str) -> str:
    """The text without its notes."""
    return _NOTE.sub("", words)


def _under_way(activities: Sequence[str]) -> list[str]:
    """The notes of calls that ranks are in, not of those that they have finished."""
    return [note for each in activities for calls in each.split(" is in ")[1:] for note in _NOTE.findall(calls)]


def _begun(notes: Sequence[str], words: str) -> str:
    """The text with its notes first, each once."""
    return " ".join([*(f"{note}." for note in dict.fromkeys(notes)), words])
