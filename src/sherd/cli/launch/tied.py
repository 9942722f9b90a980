"""The first instructions of a rank: tie its life to that of the launcher, then become the command.

The launcher runs this file by its path, in an interpreter that imports nothing else (`python -I -S`, 20 ms), because
the kernel ends a process with its parent only if the process itself asks for it, and a hook of `subprocess` would run
between fork and exec of a process with threads. The process stays the same: the script sees the pid, arguments, files
and environment that it would have seen without this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(launcher: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it survives the exec
    if os.getppid() != launcher:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # this interpreter ignores them, and that would be inherited
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
