"""The line to a `sherd run --hosts` that started this one through ssh: its words come on standard input.

The first is the token, which must not be on a command line. What follows is the name of a signal, or the end: ssh
passes no signals on, but it does pass on that its own standard input has ended, however that happened.
"""

from __future__ import annotations

import os
import signal
import threading

from sherd.cli.words import TOKEN
from sherd.errors import ConfigError

STDIN = 0


def attend() -> None:
    """Take the token, then end this process by a signal when told so, or when nobody is there any more."""
    token = _line()
    if not token:
        raise ConfigError("--attended is for sherd itself: it expects a token on standard input, and found nothing")
    os.environ[TOKEN] = token
    threading.Thread(target=_obey, name="sherd-launch-attend", daemon=True).start()


def _obey() -> None:
    word = _line()
    known = word in signal.Signals.__members__
    os.kill(os.getpid(), signal.Signals[word] if known else signal.SIGTERM)


def _line() -> str:
    """Without a buffer, which would swallow what follows."""
    data = b""
    while (byte := os.read(STDIN, 1)) not in (b"", b"\n"):
        data += byte
    return data.decode(errors="replace").strip()
