"""The seat of a machine on the board, by number: taken once, and kept by heartbeats until all machines have arrived."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import NoReturn

from torch.distributed import DistError

from sherd.cli.machines.board import PLAN, Board, News
from sherd.comm.meeting.notes import printable
from sherd.errors import ConfigError

BEAT_SECONDS = 0.5  # between two heartbeats
SILENT_SECONDS = 4.0  # without one, a machine counts as gone
LOOK_SECONDS = 0.1


def key_of(machine: int) -> str:
    return f"sherd/launch/machine/{machine}"


class Seat:
    """The seat of this machine. `taken` raises the error for one that another machine has."""

    def __init__(self, board: Board, machine: int, machines: int, me: News) -> None:
        self._board = board
        self._machine = machine
        self._machines = machines
        self._me = me
        self._there = b""  # what is written there
        self._beats, self._beaten = 0, 0.0

    def take(self) -> None:
        """Take the seat, also from an earlier launcher of this machine that has left or gone silent."""
        key, start = key_of(self._machine), time.monotonic()
        self._there = self._board.raw(key)
        while (other := self._board.read(key)) and not other.get("left"):
            if self._board.raw(key) != self._there or self._board.read(PLAN):
                self.taken(other)
            if time.monotonic() - start > SILENT_SECONDS:
                break
            time.sleep(LOOK_SECONDS)
        self.keep()

    def keep(self) -> None:
        """Write a heartbeat, if one is due."""
        if time.monotonic() - self._beaten < BEAT_SECONDS:
            return
        self._beats, self._beaten = self._beats + 1, time.monotonic()
        self._write({"beat": self._beats})

    def leave(self) -> None:
        """Say that this machine has left, at once instead of by its silence."""
        self._board = self._board.brief()
        with contextlib.suppress(DistError, ConfigError):
            self._write({"left": True})

    def taken(self, other: News) -> NoReturn:
        raise ConfigError(
            f"two machines have --node-rank {self._machine}: this one ({socket.gethostname()}) and "
            f"{printable(other.get('name', 'another'))}; give each its own number, from 0 to {self._machines - 1}"
        )

    def _write(self, more: News) -> None:
        key = key_of(self._machine)
        written = self._board.claim(key, self._there, {**self._me, **more})
        if written is None:
            self.taken(self._board.read(key) or {})
        self._there = written


class Seats:
    """The seats of all other machines, as machine 0 sees them."""

    def __init__(self, board: Board, machines: int) -> None:
        self._board = board
        self._numbers = range(1, machines)
        self._last: dict[int, tuple[News, float]] = {}  # the last entry of each, and when it was seen

    def missing(self) -> list[int]:
        """The machines that have not arrived, or have no recent heartbeat."""
        for number in self._numbers:
            entry = self._board.read(key_of(number))
            if entry and (number not in self._last or self._last[number][0] != entry):
                self._last[number] = entry, time.monotonic()
        return [number for number in self._numbers if not self._is_there(number)]

    def entries(self) -> list[News]:
        return [self._last[number][0] for number in self._numbers]

    def _is_there(self, number: int) -> bool:
        entry, when = self._last.get(number, ({"left": True}, 0.0))
        return not entry.get("left") and time.monotonic() - when < SILENT_SECONDS
