"""Ranks in new interpreters, which inherit nothing from the caller but its environment.

A notebook has threads and may have used an accelerator, and neither survives a fork; multiprocessing's spawn would
import the caller's main script again, and print to the terminal of the notebook server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait

from sherd.errors import Unsupported
from sherd.ranks import worker
from sherd.ranks.output import Output
from sherd.ranks.process import Process, Start

# The caller's sys.path first: a new interpreter might not find sherd without it.
_BOOT = "import sys; sys.path[:] = {path!r}; from sherd.ranks import fresh; fresh.main({rank}, {control}, {parent})"


def starter(environ: Mapping[str, str]) -> Start:
    """Starts ranks with this environment from their first instruction."""

    def start(rank: int, control: socket.socket) -> tuple[Process, Sequence[Output]]:
        interpreter = Interpreter(rank, control, environ)
        return interpreter, interpreter.outputs

    return start


class Interpreter:
    """A new process in its own session, so that the caller alone handles ^C in a terminal or a notebook.

    Processes that it started end with it.
    """

    def __init__(self, rank: int, control: socket.socket, environ: Mapping[str, str]) -> None:
        parent, self._alive = os.pipe()  # `parent` sees end-of-file when this process closes the other end, or dies
        boot = _BOOT.format(path=list(map(str, sys.path)), rank=rank, control=control.fileno(), parent=parent)
        prefix = f"[rank {rank}] " if rank else ""
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(control.fileno(), parent),
                env=environ,
                start_new_session=True,
            )
            self.pid = self._popen.pid
            self.sentinel = _process_handle(self.pid)
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(parent)
        assert self._popen.stdout is not None and self._popen.stderr is not None, "both were asked for"
        self.outputs = (Output(self._popen.stdout, "stdout", prefix), Output(self._popen.stderr, "stderr", prefix))

    @property
    def exitcode(self) -> int | None:
        if self._popen.returncode is None and wait([self.sentinel], 0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # before the process is reaped, while the pid is still its own
            self._popen.wait()
        return self._popen.returncode

    def close(self) -> None:
        os.close(self._alive)
        os.close(self.sentinel)


def main(rank: int, control: int, parent: int) -> None:
    """Where a new interpreter begins."""
    # A pipe is not a terminal: without this, lines would arrive in blocks.
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    worker.main(rank, socket.socket(fileno=control), parent)


def _process_handle(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise Unsupported(
            f"sherd.launch needs pidfd_open, which this kernel does not have ({error}); write the code in a script and "
            "start it with `sherd run`"
        ) from error
