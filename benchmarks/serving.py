"""A rank of a benchmark: a process that does what the controller's pipe tells it, and sleeps in between.

It is started by `processes` with the number of its pipe as the only argument.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failed:
    """The answer of a rank that cannot go on."""

    reason: str
    details: str


def serve(obey: Callable[[Connection], None]) -> None:
    """Run `obey` on the pipe to the controller until it returns, fails or the controller is gone."""
    # Whatever happens to the controller, even kill -9, no rank stays behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(int(sys.argv[1]))
    try:
        obey(pipe)
    except EOFError:
        pass  # the controller is gone
    except BaseException as error:
        traceback.print_exc()
        reason = str(error).strip().splitlines() or [""]
        pipe.send(Failed(f"{type(error).__name__}: {reason[0]}", traceback.format_exc()))
    # Not through the interpreter's end: the threads of a broken process group can keep it from coming to one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
