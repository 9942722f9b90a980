"""What a call of the backend returns to torch.

Nothing runs in the background: an operation is completed by the thread that waits for it. So an error is raised by
`wait()`, from where torch passes it on to the training loop as it is. It must never be put into a future: torch's
functions lose it there, and its DDP takes it for a tensor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sherd.comm.base import Communicator
from sherd.comm.handle import Handle
from sherd.errors import TimedOut

_NO_LIMIT = timedelta(0)
_LOOK_EVERY = 0.0005


class Locked:
    """`with locked as communicator`: one thread at a time. Torch only promises that all ranks make their calls in the
    same order; a checkpoint, for one, may be saved by a thread of its own."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._thread = threading.get_ident()

    def __enter__(self) -> Communicator:
        self._communicator.lock.acquire()
        thread = threading.get_ident()
        if thread != self._thread:
            self._communicator.use_here()
            self._thread = thread
        return self._communicator

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._communicator.lock.release()


class Pending(dist.Work):
    """Operations under way. `outputs` are torch's result; `finish` is what is left to do when they are complete."""

    def __init__(
        self,
        locked: Locked,
        handles: Sequence[Handle],
        outputs: Sequence[Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._locked = locked
        self._handles = handles
        self._outputs = list(outputs)
        self._finish = finish
        self._complete = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if not self._complete:
            if timeout > _NO_LIMIT:
                self._wait_within(timeout.total_seconds())
            with self._locked:
                self._wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        if self._complete or self._error is not None:
            return True
        with self._locked:
            try:
                if not all(handle.done() for handle in self._handles):
                    return False
                self._wait()
            except BaseException as error:
                self._error = error
        return True

    def is_success(self) -> bool:
        return self._complete

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future: it could not be completed later, as torch waits for it outside Python."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            for handle in self._handles:
                handle.wait()
        except BaseException as error:
            self._error = error
            raise
        if self._finish is not None and not self._complete:
            self._finish()
        self._complete = True

    def _wait_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise TimedOut(f"an operation was not complete after the {seconds:g} s that wait() was given")
            time.sleep(_LOOK_EVERY)
