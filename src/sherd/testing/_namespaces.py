"""Unnamed network namespaces: the kernel removes one when its last process ends, in whatever way."""

from __future__ import annotations

import ctypes
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sherd.errors import SherdError, Unsupported

T = TypeVar("T")

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000


class Namespace:
    """A new network namespace, kept alive by a thread of this process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="sherd-namespace", daemon=True)
        self._thread.start()
        try:
            self.run(lambda: _system_call("unshare", CLONE_NEWNET))
        except OSError as error:
            self.close()
            raise Unsupported(f"network namespaces cannot be made here: {error}; they need root") from error

    @property
    def task(self) -> int:
        """The kernel's id of the thread, by which `ip` finds the namespace."""
        number = self._thread.native_id
        assert number is not None, "it was started"
        return number

    @property
    def path(self) -> str:
        """The file through which any process of this machine can enter."""
        return f"/proc/{os.getpid()}/task/{self.task}/ns/net"

    def run(self, job: Callable[[], T]) -> T:
        """Call `job` inside, on the namespace's thread."""
        return _on(self._jobs.put, job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _live(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def enter(path: str) -> None:
    """Move the calling thread, and whatever it starts from now on, into a namespace."""
    with Path(path).open("rb") as file:
        _system_call("setns", file.fileno(), CLONE_NEWNET)


def rename_this_machine(name: str) -> None:
    """Give the calling process its own host name."""
    _system_call("unshare", CLONE_NEWUTS)
    data = name.encode()
    _system_call("sethostname", data, len(data))


def run_inside(path: str, *command: str) -> str:
    """Run a command in a namespace and return what it prints."""

    def job() -> str:
        enter(path)
        return run(*command)

    return _on(lambda started: threading.Thread(target=started).start(), job)


def run(*command: str) -> str:
    """Run a command in the namespace of the calling thread and return what it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise Unsupported(f"there is no command {command[0]!r} here; install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise SherdError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error
    return done.stdout


def _on(start: Callable[[Callable[[], None]], Any], job: Callable[[], T]) -> T:
    """Run a job in another thread; its result or its error."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((job(), None))
        except BaseException as error:  # raised in the calling thread
            answers.put((None, error))

    start(answer)
    value, error = answers.get()
    if error is not None:
        raise error
    result: T = value
    return result


def _system_call(name: str, *arguments: int | bytes) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
