"""Every error that sherd raises on purpose.

    SherdError
    |- ConfigError             an option, a name or an argument that cannot be right
    |- CommError               communication between ranks went wrong
    |  |- PeerLost             a rank died or left while others needed it
    |  |- Diverged             ranks made different calls where they must make the same one
    |  |- TimedOut             a rank did not reach a call in time
    |  |- CodecFailed          a codec could not encode or decode
    |  `- CommClosed           a communicator was used after close() or after it failed
    |- ChunkFailed             a chunk of a map_reduce or an evaluation failed (carries its traceback)
    |- Unsupported             this machine or this torch cannot do it
    `- RankFailed              one or more ranks of a launch failed (carries every traceback)

A message says what happened, on which rank, what was expected and what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SherdError(Exception):
    """The root of the tree: `except sherd.SherdError` catches what sherd raises on purpose and nothing else."""


class ConfigError(SherdError, ValueError):
    """An option, a name or an argument that cannot be right."""


class CommError(SherdError, RuntimeError):
    """Communication between ranks went wrong. `ranks` lists those concerned, where known."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class PeerLost(CommError):
    """A rank died or left while others needed it. `ranks` lists the lost ones."""


class Diverged(CommError):
    """Ranks made different calls where they must make the same one."""


class TimedOut(CommError):
    """A rank did not reach a call in time. `ranks` lists the missing ones."""


class CodecFailed(CommError):
    """A codec could not encode or decode. The other ranks get `PeerLost` with the same message."""


class CommClosed(CommError):
    """A communicator was used after `close()`, or after an error had broken it."""


class ChunkFailed(SherdError, RuntimeError):
    """A chunk of `sherd.map_reduce` or `sherd.evaluate` failed, on whichever rank. `chunk` is its number, and `item`
    that of the item at which it failed; both are -1 if results could not be merged."""

    def __init__(self, message: str, chunk: int = -1, item: int = -1) -> None:
        super().__init__(message)
        self.chunk = chunk
        self.item = item


class Unsupported(SherdError, RuntimeError):
    """This machine or this build of torch cannot do what was asked."""


class RankFailed(SherdError, RuntimeError):
    """One or more ranks of a launch failed. `failures` maps each of them to its traceback or exit status."""

    def __init__(self, message: str, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


def nearest(name: object, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest valid name, if any, and a list of all."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return f"{suggestion}valid: {', '.join(map(repr, names))}"
