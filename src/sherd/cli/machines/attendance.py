"""The connection to the `sherd run --hosts` that started this one over ssh, through standard input.

The first line is the token, which must not be on a command line. Then comes the name of a signal, or end-of-file: ssh
does not forward signals, but it does forward the end of its own standard input, whatever caused it.
"""

from __future__ import annotations

import os
import signal
import threading

from sherd.cli.words import TOKEN
from sherd.errors import ConfigError

STDIN = 0


def attend() -> None:
    """Read the token; then end this process by a signal when told to, or when the other end is gone."""
    token = _line()
    if not token:
        raise ConfigError("--attended is for sherd itself: it expects a token on standard input, but found nothing")
    os.environ[TOKEN] = token
    threading.Thread(target=_obey, name="sherd-launch-attend", daemon=True).start()


def _obey() -> None:
    word = _line()
    known = word in signal.Signals.__members__
    os.kill(os.getpid(), signal.Signals[word] if known else signal.SIGTERM)


def _line() -> str:
    """Read a line, unbuffered: a buffer would swallow what follows."""
    data = b""
    while (byte := os.read(STDIN, 1)) not in (b"", b"\n"):
        data += byte
    return data.decode(errors="replace").strip()
