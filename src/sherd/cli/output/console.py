"""Where output goes: this process's stdout and stderr, in whole lines, with a frame below them in a terminal.

A *piece* is output up to and including a line feed, or a carriage return as progress bars write it. Pieces of different
writers never mix: what is written while another writer's line is unfinished starts a new line.
"""

from __future__ import annotations

import errno
import os
import re
import select
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STDOUT, STDERR = 1, 2
TERMINAL = "terminal"
SAY_SECONDS = 1.0
BAR_SECONDS = 0.2  # between two states of a progress bar
CLEAR_LINE = b"\r\x1b[K"
# Readable on dark and light backgrounds; not red, which is for errors, nor black or white.
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)
_LEFT = (errno.EPIPE, errno.EIO)  # its reader has left, or the terminal has been closed
_FINISHED = (b"\n", b"\r")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(eq=False)
class Writer:
    """One stream of one rank."""

    stream: int  # STDOUT or STDERR
    prefix: bytes = b""
    fresh: bool = True  # its next output begins a line
    bar: bytes = b""  # its progress bar, if a frame shows it
    in_bar: bool = False  # it has returned to the start of its line


class Console:
    """Both streams of this process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed: set[int] = set()  # streams that nobody reads any more
        self._unfinished: dict[object, Writer | None] = {}  # whose unfinished line each device shows
        self._pending: list[tuple[int, bytes]] = []
        self._since = 0.0  # when the last output came
        self._framed = False  # there is a display below the output
        self._frame: list[str] = []
        self._drawn: list[int] = []  # the widths of the lines now on the screen
        self._bars: list[Writer] = []
        self._moved, self._drawn_at = (
            False,
            0.0,
        )  # whether a bar has moved since the last frame, and when that was drawn

    @staticmethod
    def bare(line: str) -> str:
        """Without colours."""
        return _CONTROL.sub("", line)

    def is_terminal(self, stream: int) -> bool:
        return os.isatty(stream)

    def prefix(self, label: str, rank: int, stream: int) -> bytes:
        """The prefix of a rank's lines: none for rank 0, so that scripts can read its output."""
        if rank == 0:
            return b""
        text = f"[{label} rank {rank}]" if label else f"[rank {rank}]"
        if self.coloured(stream):
            text = f"\x1b[{COLOURS[(rank - 1) % len(COLOURS)]}m{text}\x1b[0m"
        return f"{text} ".encode()

    def coloured(self, stream: int) -> bool:
        return self.is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def put(self, writer: Writer, pieces: Sequence[bytes]) -> None:
        """Add to what the next `flush` writes. Only the last piece may be unfinished."""
        device = self._device(writer.stream)
        with self.lock:
            for piece in pieces:
                if self._framed and device == TERMINAL and self._is_of_bar(writer, piece):
                    continue
                other = self._unfinished.get(device)
                if other is not None and other is not writer:
                    self._pending.append((writer.stream, b"\n"))
                    other.fresh = True
                data = writer.prefix + piece if writer.fresh else piece
                writer.fresh = piece.endswith(_FINISHED)
                # After a carriage return the line is still there, and this writer's next one overwrites it.
                self._unfinished[device] = None if piece.endswith(b"\n") else writer
                self._pending.append((writer.stream, data))
            self._since = time.time()

    def _is_of_bar(self, writer: Writer, piece: bytes) -> bool:
        """Keep the state of a progress bar for the frame: above it, every state would be a new line."""
        if piece.endswith(b"\n") or not (piece.endswith(b"\r") or writer.in_bar):
            if writer in self._bars:
                self._bars.remove(writer)
            writer.in_bar, writer.bar = False, b""
            return False
        writer.in_bar = True
        if text := piece.strip(b"\r"):
            writer.bar, self._moved = text, True
            if writer not in self._bars:
                self._bars.append(writer)
        return True

    def flush(self) -> None:
        with self.lock:
            pending, self._pending = self._pending, []
            if pending:
                self._erase()
                for stream, data in _joined(pending):
                    self._write(stream, data)
                self._draw()

    def say(self, text: str) -> None:
        """A line of the launcher's own, on stderr."""
        line = text.encode(errors="replace") + b"\n"
        # The reader of stdout may have stopped, which blocks the thread that writes there; stderr may be free.
        if not self.lock.acquire(timeout=SAY_SECONDS):
            self._write(STDERR, line)
            return
        try:
            self.put(Writer(STDERR), [line])
            self.flush()
        finally:
            self.lock.release()

    def show(self, lines: Sequence[str], *, latest: float = 0.0) -> None:
        """Draw a frame below everything, replacing the previous one.

        An unfinished line delays it: that may be a prompt, with an answer being typed. Once the ranks have gone on
        (`latest` is the unix time of their last activity), it is no prompt any more.
        """
        with self.lock:
            self._framed, self._frame = True, list(lines)
            self.flush()
            if latest > self._since and self._unfinished.get(TERMINAL) is not None:
                self._write(self._below, b"\n")
                self._end_line()
            self._draw()

    def keep_bars(self) -> None:
        """From now on progress bars stay below the output, each on its own line. `refresh` draws them."""
        self._framed = any(self.is_terminal(stream) for stream in (STDOUT, STDERR)) and not _is_dumb()

    def refresh(self) -> None:
        """Draw progress bars that have moved, now and then."""
        with self.lock:
            if self._moved and time.monotonic() - self._drawn_at > BAR_SECONDS:
                self._draw()

    def leave(self, *, keep: bool) -> None:
        """End the display; its last frame stays on the screen if `keep`."""
        with self.lock:
            self.flush()
            if not keep:
                self._frame = []
            self._draw()
            self._framed, self._frame, self._drawn, self._bars = False, [], [], []

    # Terminals such as tmux move what `ESC[J` clears from the first line on into their scrollback: clearing the screen
    # would leave a copy of every frame there. So lines are cleared one by one, or overwritten.

    def _erase(self) -> None:
        """Remove the frame; the next output takes its place."""
        if rows := self._rows():
            self._write(self._below, CLEAR_LINE + b"\x1b[1A\x1b[2K" * rows)
        self._drawn = []

    def _draw(self) -> None:
        """Draw the frame over the one before, unless a line is unfinished."""
        if self._unfinished.get(TERMINAL) is not None:
            return
        columns, height = self._size()
        bars = [
            self.bare((writer.prefix + writer.bar).decode(errors="replace"))[: columns - 1] for writer in self._bars
        ]
        lines = [*bars, *self._frame][-max(1, height - 1) :]
        rows = self._rows()
        if lines or rows:
            text = "".join(f"{line}\x1b[K\n" for line in lines).encode()
            back = CLEAR_LINE + f"\x1b[{rows}A".encode() if rows else b""
            self._write(self._below, back + text + b"\x1b[J" * bool(rows))
        self._drawn = [len(self.bare(line)) for line in lines]
        self._moved, self._drawn_at = False, time.monotonic()

    def _rows(self) -> int:
        """Rows of the screen that the frame takes: a terminal that has become narrower has wrapped its lines."""
        columns, height = self._size()
        return min(sum(max(1, -(-width // columns)) for width in self._drawn), max(1, height - 1))

    @property
    def _below(self) -> int:
        """The stream of the terminal that the frame is on."""
        return STDOUT if self.is_terminal(STDOUT) else STDERR

    def _size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._below)
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24

    def _end_line(self) -> None:
        if writer := self._unfinished.get(TERMINAL):
            writer.fresh = True
        self._unfinished[TERMINAL] = None

    def _device(self, stream: int) -> object:
        return TERMINAL if self.is_terminal(stream) else stream

    def _write(self, stream: int, data: bytes) -> None:
        if stream in self.closed:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stream, view) :]
            except BlockingIOError:  # the terminal is shared with a program that has changed its mode
                select.select([], [stream], [])
            except OSError as error:
                self.closed.add(stream)
                if error.errno not in _LEFT and STDERR not in self.closed:
                    name = "stdout" if stream == STDOUT else "stderr"
                    self._write(STDERR, f"sherd run: no more can be written to {name}: {error.strerror}\n".encode())
                return


def _joined(parts: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Consecutive parts for the same stream, as one write."""
    stream = parts[0][0]
    gathered: list[bytes] = []
    for target, data in parts:
        if target != stream:
            yield stream, b"".join(gathered)
            stream, gathered = target, []
        gathered.append(data)
    yield stream, b"".join(gathered)


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"
