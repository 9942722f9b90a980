"""The board: one small block of shared memory in which the ranks of a host tell each other how far they are.

Each word has one writer. A rank's *posted* flag says how far it has contributed and its *done* flag how far it has
read what others contributed. Both count `progress`: the number of an operation in the high bits, chunks of it in the
low ones, so that one comparison answers "is it at least this far?".

For each operation a rank writes a *header* (fingerprint of the call, where its contribution lies) before it raises the
posted flag. The text of a call is written once per call and site and referred to by number, so that it is cheap to say
at any time what every rank last did.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from sherd.comm.calls import Call, Site
from sherd.comm.host import futex
from sherd.comm.host.futex import Sleepers
from sherd.comm.host.memory import SharedBlock, round_up
from sherd.comm.waiting import faults
from sherd.errors import CommError, Diverged, PeerLost, TimedOut

E = TypeVar("E", bound=CommError)

CHUNK_BITS = 24
HEADERS = 64  # operations a rank may be ahead of the slowest reader
_HEADER = struct.Struct("<6Q")  # fingerprint, text, block + 1, offset, first chunk, monotonic ns
HEADER_WORDS = 8
_TEXTS = 256
_TEXT_BYTES = 512
_WORDS_BYTES = 4096
IN_PLACE = 1 << 41  # in the word of a block: the result belongs where the contribution is
_LINE_WORDS = 8  # 64 bytes: flags of different writers are in different cache lines


def progress(operation: int, chunks: int = 0) -> int:
    return (operation << CHUNK_BITS) + chunks


class State(IntEnum):
    """How a rank is, or how it ended."""

    WELL = 0
    LEFT = 1
    DIVERGED = 2
    LOST_PEER = 3
    TIMED_OUT = 4
    FAILED = 5


ERRORS = {State.DIVERGED: Diverged, State.LOST_PEER: PeerLost, State.TIMED_OUT: TimedOut}


class Board:
    """One rank's view of the board of its host. `names` and `numbers` are those of its ranks in messages."""

    def __init__(
        self, block: SharedBlock, rank: int, world: int, names: Sequence[str] = (), numbers: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.world = world
        self.names = names
        self.numbers = numbers
        self._block = block
        self._memory = block.memory
        self.words = block.words()
        flags, channels, states, sleepers, headers, texts, last_words, stances, _ = _offsets(world)
        self.posted = [(flags + 128 * r) // 8 for r in range(world)]
        self.done = [(flags + 128 * r + 64) // 8 for r in range(world)]
        self._flags, self._channels = flags, channels
        self._sleepers = Sleepers(block, sleepers, rank, self.posted, self.done)
        self._asleep, self._nobody = self._sleepers.asleep, bytes(world)
        self.sleep = self._sleepers.sleep
        self.states = self.words[states // 8 : states // 8 + world]
        self.all_well_states = memoryview(bytes(8 * world)).cast("Q")
        self._texts, self._last_words = texts, last_words
        self.headers = [(headers >> 3) + r * HEADERS * HEADER_WORDS for r in range(world)]
        self.stances = [(stances >> 3) + r * _stance_words(world) for r in range(world)]
        self._numbers: dict[tuple[int, Site], int] = {}

    @staticmethod
    def nbytes(world: int) -> int:
        return _offsets(world)[-1]

    # ---------------------------------------------------------------- flags

    def sent(self, source: int, to: int) -> int:
        """The word in which `source` counts what it has put into its channel to `to`."""
        return (self._channels + 128 * (source * self.world + to)) // 8

    def taken(self, source: int, to: int) -> int:
        """The word in which `to` counts what it has taken out of that channel."""
        return self.sent(source, to) + _LINE_WORDS

    def writer(self, index: int) -> int:
        """The rank that writes the flag at `index`."""
        if 8 * index < self._channels:
            return (8 * index - self._flags) // 128
        pair, within = divmod(8 * index - self._channels, 128)
        return pair % self.world if within else pair // self.world

    def purpose(self, index: int) -> tuple[int, int]:
        """What this rank waits for at a flag: 0 a collective, 1 to receive or 2 to send; and the peer of a message."""
        if 8 * index < self._channels:
            return 0, 0
        return (1 if index == self.sent(self.writer(index), self.rank) else 2), self.writer(index)

    def raise_flag(self, index: int, value: int) -> None:
        """Store one of this rank's own words and wake the ranks that waited for it."""
        if not futex.STORES_IN_ORDER:
            futex.fence()
        self.words[index] = value
        with futex.barrier:
            pass
        if self._asleep != self._nobody:
            self._sleepers.wake(index, value)

    # ---------------------------------------------------------------- headers

    def write_header(self, operation: int, call: Call, site: Site, lent: tuple[int, int], first_chunk: int) -> None:
        """Announce this rank's contribution: where it is lent (block -1: nowhere; it may have the mark `IN_PLACE`),
        and its first staging chunk."""
        number = self._numbers.get((call.fingerprint, site))
        if number is None:
            number = self.text_number(call, site)
        where = 8 * (self.headers[self.rank] + operation % HEADERS * HEADER_WORDS)
        block, offset = lent
        _HEADER.pack_into(
            self._memory, where, call.fingerprint, number, block + 1, offset, first_chunk, time.monotonic_ns()
        )

    def header_word(self, rank: int, operation: int) -> int:
        """Index of the first word of a header: fingerprint, text, block + 1, offset, first chunk, time."""
        return self.headers[rank] + operation % HEADERS * HEADER_WORDS

    def fingerprint(self, rank: int, operation: int) -> int:
        return self.words[self.header_word(rank, operation)]

    def location(self, rank: int, operation: int) -> tuple[int, int, int]:
        """SharedBlock (or -1) and offset of what a rank lends, and the number of its first staging chunk."""
        word = self.header_word(rank, operation)
        return (self.words[word + 2] & ~IN_PLACE) - 1, self.words[word + 3], self.words[word + 4]

    # ---------------------------------------------------------------- words

    def text(self, number: int, rank: int) -> str:
        start = self._text(rank, number)
        return bytes(self._memory[start : start + _TEXT_BYTES]).rstrip(b"\0").decode(errors="replace")

    def call_text(self, rank: int, operation: int) -> str:
        """The call that `rank` made as its operation number `operation`, and where."""
        return self.text(self.words[self.header_word(rank, operation) + 1], rank)

    def last_activity(self, rank: int) -> str:
        """What `rank` last did, for errors about ranks that are waited for."""
        reached, finished = self.words[self.posted[rank]], self.words[self.done[rank]]
        operation = reached >> CHUNK_BITS
        _, kind, _, _, _, text, since, in_force = self.words[self.stances[rank] : self.stances[rank] + 8]
        if in_force and kind:
            return f"is in {self.text(text, rank)} (made {(time.monotonic_ns() - since) / 1e9:.1f} s ago)"
        if operation == 0:
            return "has only sent or received so far" if self._messages(rank) else "has made no call yet"
        seconds = (time.monotonic_ns() - self.words[self.header_word(rank, operation) + 5]) / 1e9
        verb = "last finished" if finished >= reached else "is in"
        return f"{verb} {self.call_text(rank, operation)} (call {operation}, made {seconds:.1f} s ago)"

    def note_messages(self) -> None:
        """Note that this rank sends or receives."""
        self.words[self.stances[self.rank] + _stance_words(self.world) - 1] = 1

    def _messages(self, rank: int) -> bool:
        return self.words[self.stances[rank] + _stance_words(self.world) - 1] != 0

    def leave_word(self, state: State, text: str) -> None:
        """Tell the others how this rank ended. The first word stands."""
        if self.states[self.rank] == State.WELL:
            data = text.encode()[: _WORDS_BYTES - 1]
            start = self._last_words + self.rank * _WORDS_BYTES
            self._memory[start : start + _WORDS_BYTES] = data.ljust(_WORDS_BYTES, b"\0")
            if not futex.STORES_IN_ORDER:
                futex.fence()
            self.states[self.rank] = state

    def reported(self, error: E, state: State) -> E:
        """`error`, after the other ranks have been told of it."""
        self.leave_word(state, str(error))
        faults.emit_fault(error)
        return error

    def failures(self) -> dict[int, tuple[State, str]]:
        """Ranks that left or failed, and what they said."""
        return {r: (State(s), self._last(r)) for r, s in enumerate(self.states) if s}

    def all_well(self) -> bool:
        return self.states == self.all_well_states

    def _last(self, rank: int) -> str:
        start = self._last_words + rank * _WORDS_BYTES
        return bytes(self._memory[start : start + _WORDS_BYTES]).rstrip(b"\0").decode(errors="replace")

    def text_number(self, call: Call, site: Site) -> int:
        """The number of the text of a call, which is written if it is not there."""
        number = self._numbers.get((call.fingerprint, site))
        if number is not None:
            return number
        number = len(self._numbers) % _TEXTS
        if number == 0:
            self._numbers.clear()
        data = call.made_at(site).encode()[: _TEXT_BYTES - 1]
        start = self._text(self.rank, number)
        self._memory[start : start + _TEXT_BYTES] = data.ljust(_TEXT_BYTES, b"\0")
        self._numbers[(call.fingerprint, site)] = number
        return number

    def _text(self, rank: int, number: int) -> int:
        return self._texts + (rank * _TEXTS + number) * _TEXT_BYTES


def _stance_words(world: int) -> int:
    """The size of the line that `stances` writes for each rank, with a last word for `note_messages`."""
    return round_up(9 + 2 * world, _LINE_WORDS)


def _offsets(world: int) -> tuple[int, ...]:
    """Byte offsets of flags, channel flags, states, sleepers, headers, texts, last words and stances, and the total."""
    sizes = [
        world * 128,
        world * world * 128,
        round_up(world * 8, 64),
        round_up(Sleepers.nbytes(world), 64),
        world * HEADERS * 8 * HEADER_WORDS,
        world * _TEXTS * _TEXT_BYTES,
        world * _WORDS_BYTES,
        world * 8 * _stance_words(world),
    ]
    return tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
