"""A collective under way over a process group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor

from sherd.comm.c10d.slices import Steps
from sherd.comm.handle import Handle
from sherd.errors import CommClosed


class C10dHandle(Handle):
    """An operation as a generator that yields each piece of the backend's work it needs completed before it goes on."""

    __slots__ = ("_breaking", "_failure", "_finished", "_steps", "_wait", "_work")

    def __init__(
        self,
        steps: Steps,
        wait: Callable[[dist.Work], None],
        breaking: Callable[[], AbstractContextManager[None]],
        finished: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._wait = wait
        self._breaking = breaking
        self._finished = finished
        self._failure: str | None = None
        with breaking():
            self._work: dist.Work | None = next(steps, None)

    def complete(self) -> None:
        """Go through all of it."""
        while self._work is not None:
            self._go_on()
        if self._failure is not None:
            raise CommClosed(self._failure)

    def wait(self) -> Tensor:
        self.complete()
        self._finished()
        return self.result

    def done(self) -> bool:
        while self._work is not None and self._work.is_completed():
            self._go_on()
        return self._work is None

    def _go_on(self) -> None:
        try:
            with self._breaking():
                work = self._work
                assert work is not None
                self._wait(work)
                if self._work is work:  # it may have been moved on while this waited
                    self._work = next(self._steps, None)
        except BaseException as error:
            # The backend's work keeps connections open, and the caller may keep this handle.
            self._failure = f"this call has failed already: {error}"
            self._work = None
            raise
        if self._work is None:
            self._breaking = nullcontext  # drop the communicator, which may refer to this handle
