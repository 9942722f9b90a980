"""The output of the ranks of this machine: forwarded to our own stdout and stderr, and to files on request.

A single rank inherits this process's terminal, so that a debugger, `input()` and progress bars work as without sherd.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sherd.cli import messages
from sherd.cli.launch.request import Showing
from sherd.cli.output.console import STDERR, STDOUT, Console, Writer
from sherd.cli.output.source import Source
from sherd.cli.output.tracebacks import Tracebacks
from sherd.cli.output.watching import warn_if_nothing, watched

UNFINISHED_SECONDS = 0.1  # after which a terminal shows an unfinished line: it may be a prompt
TICK_SECONDS = 0.1
SETTLE_SECONDS = 2.0  # for a stopped terminal (^S) to accept the last output of a dead rank


class Output:
    """The interface, and the output of a rank that inherits this process's streams."""

    failed = False  # a rank did not end well

    def files(self, rank: int) -> dict[str, Any]:
        """Arguments of `subprocess.Popen` for this rank."""
        return {}

    def started(self, rank: int) -> None:
        """The rank has its files."""

    def settle(self, rank: int, killed: bool) -> None:
        """The rank has failed: show the rest of its output now, before any message about it."""
        self.failed = True

    def settle_all(self) -> None:
        """The same for all of them."""

    def wrote(self, rank: int) -> bool:
        """Whether the rank is known to have written anything."""
        return False

    def interrupted(self) -> None:
        """From now on, ranks end because they are told to."""

    def close(self) -> None:
        """All have ended."""


class Piped(Output):
    """Ranks write into pipes; a thread forwards it. Only that thread waits for the reader of this process's output."""

    def __init__(self, showing: Showing, ranks: int, console: Console) -> None:
        self._console = console
        self._showing = showing
        self._several = ranks > 1
        if self._several:
            console.keep_bars()
        self._sources: dict[int, list[Source]] = {}
        self._theirs: dict[int, list[int]] = {}  # the ranks' ends of the pipes
        self._logs: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._over = False
        self._tracebacks = Tracebacks(self._show_stderr, messages.say)
        self._thread = threading.Thread(target=self._pump, name="sherd-launch-output", daemon=True)
        self._thread.start()

    def files(self, rank: int) -> dict[str, Any]:
        log = self._opened_log(rank)
        theirs, sources = [], []
        for stream in (STDOUT, STDERR):
            ours, its = os.pipe()
            writer = Writer(stream, self._console.prefix(self._showing.label, rank, stream))
            sources.append(Source(rank, writer, ours, log))
            theirs.append(its)
        self._sources[rank], self._theirs[rank] = sources, theirs
        files: dict[str, Any] = {"stdout": theirs[0], "stderr": theirs[1]}
        return files | ({"stdin": subprocess.DEVNULL} if self._showing.attended else {})

    def started(self, rank: int) -> None:
        for descriptor in self._theirs.pop(rank):
            os.close(descriptor)
        for source in self._sources[rank]:
            self._selector.register(source.pipe, selectors.EVENT_READ, source)
        os.write(self._waker, b".")  # on some systems a thread in `select` does not notice new files

    def settle(self, rank: int, killed: bool) -> None:
        self.failed = True
        if self._console.lock.acquire(timeout=SETTLE_SECONDS):
            try:
                self._drain(rank, killed, failed=True)
            finally:
                self._console.lock.release()

    def settle_all(self) -> None:
        if self._console.lock.acquire(timeout=SETTLE_SECONDS):
            try:
                self._drain_all()
            finally:
                self._console.lock.release()

    def wrote(self, rank: int) -> bool:
        return any(source.wrote for source in self._sources.get(rank, ()))

    def interrupted(self) -> None:
        self._tracebacks.interrupted = True

    def close(self) -> None:
        """Show what is left, without waiting for processes that a rank left behind and that hold a pipe."""
        with self._console.lock:
            self._drain_all()
        self._over = True
        os.write(self._waker, b".")
        self._thread.join()
        for descriptor in (*self._logs, self._wake, self._waker):
            os.close(descriptor)

    def _opened_log(self, rank: int) -> int | None:
        if self._showing.log_dir is None:
            return None
        path = Path(self._showing.log_dir) / f"rank{rank:05d}.log"
        self._logs.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644))
        return self._logs[-1]

    def _drain_all(self) -> None:
        for rank in self._sources:
            self._drain(rank)
        self._tracebacks.close()
        self._console.flush()

    def _drain(self, rank: int, killed: bool = False, failed: bool = False) -> None:
        for source in self._sources.get(rank, ()):
            while data := source.read():
                self._forward(source, data)
            self._finish(source)
        self._tracebacks.release(rank, killed, failed)
        self._console.flush()

    def _pump(self) -> None:
        while not self._over:
            events = self._selector.select(TICK_SECONDS)
            with self._console.lock:
                for key, _ in events:
                    if key.data is None:
                        os.read(self._wake, 4096)
                    else:
                        self._hear(key.data)
                self._tick()
                self._console.flush()
                self._console.refresh()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.data.pipe)
        self._selector.close()

    def _hear(self, source: Source) -> None:
        data = source.read()
        if data:
            self._forward(source, data)
        if data == b"" or source.writer.stream in self._console.closed:
            # Nobody reads it any more: the rank notices as it would without sherd.
            self._finish(source)
            source.ended = True
            self._selector.unregister(source.pipe)
            os.close(source.pipe)

    def _forward(self, source: Source, data: bytes) -> None:
        self._put(source, source.pieces.cut(data))

    def _finish(self, source: Source) -> None:
        if rest := source.pieces.take():
            self._put(source, [rest])

    def _put(self, source: Source, pieces: list[bytes]) -> None:
        if source.writer.stream == STDERR and self._several:
            self._tracebacks.take(source.rank, pieces)
        else:
            self._console.put(source.writer, pieces)

    def _show_stderr(self, rank: int, pieces: Any) -> None:
        writer = self._sources[rank][1].writer
        own = f"[rank{rank}]: ".encode()  # torch's prefix, the same as ours
        self._console.put(writer, [piece.removeprefix(own) for piece in pieces] if writer.prefix else pieces)

    def _tick(self) -> None:
        self._tracebacks.tick()
        now = time.monotonic()
        for sources in list(self._sources.values()):
            for source in sources:
                waits = source.pieces.rest and now - source.last > UNFINISHED_SECONDS
                held = source.writer.stream == STDERR and self._tracebacks.is_holding(source.rank)
                if waits and not held and self._console.is_terminal(source.writer.stream):
                    self._finish(source)


@contextlib.contextmanager
def output_of(showing: Showing, ranks: int) -> Iterator[Output]:
    """The output of `ranks` ranks, and the display of their events, until they have ended."""
    console = Console()
    with watched(showing, console) as watcher:
        if ranks == 1 and not (showing.log_dir or showing.live or showing.label or showing.attended):
            output = Output()
            said: Any = contextlib.nullcontext()
        else:
            output, said = Piped(showing, ranks, console), messages.said_by(console.say)
        with said:
            try:
                yield output
            finally:
                output.close()
                if watcher is not None:
                    watcher.close(well=not output.failed)
                console.leave(keep=True)
                if showing.events and not (watcher or output.failed or showing.quiet or showing.attended):
                    warn_if_nothing(showing.events)
