"""How ranks on other machines ended, and telling those machines how ours did."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

from torch.distributed import DistError

from sherd.cli.machines.board import FAULT, OFF, Board, News
from sherd.cli.machines.rendezvous import Meeting
from sherd.comm.meeting.notes import printable

HEAR_SECONDS = 0.2  # between two looks at the board
LINGER_SECONDS = 15.0  # for machines that know of a failure to end their ranks
STOPPED_SECONDS = 3.0  # the same after a signal, which may mean that nobody is waiting any more


@dataclass(frozen=True)
class Fault:
    """The first rank of the run that failed, on whichever machine."""

    rank: int
    pid: int
    machine: str  # its name
    how: str  # text to follow "rank 3 "

    @classmethod
    def of(cls, news: News) -> Fault | None:
        """From a message on the board; None if it is malformed."""
        try:
            return cls(int(news["rank"]), int(news["pid"]), printable(news["machine"]), printable(news["how"]))
        except (LookupError, TypeError, ValueError):
            return None


class Newsroom:
    """The launcher's side of the board while ranks run. Nothing here can block the thread that watches them."""

    def __init__(self, meeting: Meeting) -> None:
        self.fault: Fault | None = None  # on another machine
        self.off = ""  # why another machine has left although none of its ranks failed
        self.lost = False  # machine 0 no longer answers
        self._meeting = meeting
        self._hearing = meeting.hearing
        self._alone = meeting.machines == 1
        self.all_ended = self._alone  # no rank is running on any other machine
        self._over = threading.Event()
        if not self._alone:
            threading.Thread(target=self._hear, name="sherd-launch-news", daemon=True).start()

    @property
    def failure(self) -> str:
        """What went wrong elsewhere, as text; "" if nothing has."""
        if fault := self.fault:
            return f"rank {fault.rank} on machine {fault.machine} failed first (pid {fault.pid}): it {fault.how}"
        if self.off:
            return f"{self.off}; stopping the ranks of this machine"
        if self.lost:
            return "the launcher of machine 0 is gone, and its ranks with it; stopping the ranks of this machine"
        return ""

    def tell(self, rank: int, pid: int, how: str) -> None:
        """Tell every machine that a rank of this one failed, unless one on another machine failed before."""
        words = {"rank": rank, "pid": pid, "machine": socket.gethostname(), "how": how}
        with contextlib.suppress(DistError):
            self._note(self._meeting.board.brief().write_first(FAULT, words))

    def tell_ended(self, well: bool) -> None:
        """Tell every machine that no rank is running on this one any more."""
        with contextlib.suppress(DistError):
            self._meeting.board.brief().write(_end(self._meeting.machine), {"well": well})

    def close(self, well: bool, stopped: bool = False) -> None:
        """On machine 0, wait until the others no longer need its store: they must also learn why it ends."""
        self._over.set()
        if self._alone or well or self.off:  # a machine that has left will not report that it has ended
            return
        self.tell_ended(well)
        if self._meeting.machine != 0:
            return
        end = time.monotonic() + (STOPPED_SECONDS if stopped else LINGER_SECONDS)
        with contextlib.suppress(DistError):
            while time.monotonic() < end and not self._have_all_ended(self._meeting.board.brief()):
                time.sleep(HEAR_SECONDS)

    def _hear(self) -> None:
        ended_well = False  # machine 0, which may leave before slow ranks of others are done
        while not (self._over.wait(HEAR_SECONDS) or self.fault or self.off or self.lost):
            try:
                if found := self._hearing.read(FAULT):
                    self._note(found)
                elif found := self._hearing.read(OFF):
                    self.off = printable(found.get("why"))
                else:
                    end = self._hearing.read(_end(0))
                    ended_well = end is not None and end.get("well") is True
                    self.all_ended = self._have_all_ended(self._hearing)
            except DistError:
                self.lost, self.all_ended = not ended_well, ended_well
                return

    def _have_all_ended(self, board: Board) -> bool:
        return all(board.read(_end(machine)) for machine in range(self._meeting.machines))

    def _note(self, news: News) -> None:
        fault = Fault.of(news)
        if fault and not self._is_ours(fault):
            self.fault = fault

    def _is_ours(self, fault: Fault) -> bool:
        first = self._meeting.first_rank
        return first <= fault.rank < first + self._meeting.ranks


def _end(machine: int) -> str:
    return f"sherd/launch/end/{machine}"
