"""Signals that end a run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

STOPPING: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under `nohup` a run outlives its terminal
    STOPPING = tuple(number for number in STOPPING if number != signal.SIGHUP)


class Stopped(BaseException):
    """A signal that ends the run. Not an `Exception`, so that no handler swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def signals_raise(numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Inside, these signals become `Stopped`, in the main thread."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
