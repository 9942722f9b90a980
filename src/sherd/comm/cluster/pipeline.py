"""The order in which operations go through their phases.

An operation inside a cluster has up to three *phases*: inside the host, across the network, and inside the host again.
A phase is started when the one before it is complete, and only after all earlier operations have started theirs: so
in each phase the operations run in the order in which they were issued, on every rank, whatever is waited for first.

A failure in one part of a cluster communicator is the end of the whole: the other parts are told.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from sherd.comm.closing import unusable
from sherd.comm.handle import Handle
from sherd.comm.waiting.progress import take_part
from sherd.errors import CommError

ALL = sys.maxsize
Phase = Callable[[], Sequence[Handle]]
"""Starts a part of an operation and returns what has to be complete before the next."""


class ClusterOperation(Handle):
    """A handle that a pipeline moves on, phase by phase. The first `reading` phases read the input."""

    __slots__ = ("_finish", "_phases", "_pipeline", "_reading", "finished", "needs", "started")

    def __init__(
        self, pipeline: Pipeline, phases: Sequence[Phase], finish: Callable[[], None], reading: int = ALL
    ) -> None:
        self._pipeline = pipeline
        self._phases = phases
        self._finish = finish
        self._reading = reading
        self.started = 0
        self.finished = False
        self.needs: Sequence[Handle] = ()

    def is_met(self) -> bool:
        return all(handle.done() for handle in self.needs)

    def step(self) -> None:
        """Start the next phase, the present one being complete, or finish."""
        for handle in self.needs:
            handle.wait()  # it is done, or has failed
        self.needs = ()
        if self.started < len(self._phases):
            self.started += 1  # first: starting it may wait, and what is moved on meanwhile must not start it again
            self.needs = self._phases[self.started - 1]()
        else:
            self._finish()
            self.finished = True
            self._phases = ()

    def wait(self) -> Tensor:
        self._pipeline.complete(self)
        return self.result

    def done(self) -> bool:
        return self._pipeline.try_complete(self)

    def release(self) -> None:
        self._pipeline.complete(self, self._reading)


class ToldMessage(Handle):
    """A message through one part of a cluster: if it fails, the ranks that wait in other parts are told."""

    __slots__ = ("_inner", "_pipeline")

    def __init__(self, inner: Handle, pipeline: Pipeline) -> None:
        self._inner = inner
        self._pipeline = pipeline

    def wait(self) -> Tensor:
        self._inner.result = self.result
        with self._pipeline.failing():
            return self._inner.wait()

    def done(self) -> bool:
        with self._pipeline.failing():
            return self._inner.done()


class Part(Protocol):
    """A communicator that can tell its other ranks of a failure they cannot see."""

    def fail(self, error: CommError) -> None: ...


class Pipeline:
    """The operations of one rank that are under way, in a communicator with these parts."""

    def __init__(self, parts: Sequence[Part], lock: threading.RLock) -> None:
        self._parts = parts
        self._broken: str | None = None  # why it can no longer be used
        self.lock = lock
        self._operations: list[ClusterOperation] = []
        self._moving = False
        take_part(self)

    def issue(self, operation: ClusterOperation) -> ClusterOperation:
        """Start the first phase of an operation."""
        with self.failing():
            operation.step()
        self._operations.append(operation)
        self.move_all()
        return operation

    def complete(self, operation: ClusterOperation, phases: int = ALL) -> None:
        """Run `operation` to its end, or so many of its phases, and those ahead of it as far as that takes."""
        while not self.try_complete(operation) and operation.started <= phases:
            behind = next(each for each in self._operations if each is operation or each.started <= phases)
            with self.failing():
                for handle in behind.needs:
                    handle.wait()

    def try_complete(self, operation: ClusterOperation) -> bool:
        if not operation.finished:
            self.check()
            self.move_all()
        return operation.finished

    def drain(self) -> None:
        """Complete everything, before a wait that does not move operations on."""
        while self._operations:
            self.complete(self._operations[0])

    def check(self) -> None:
        if self._broken is not None:
            raise unusable(self._broken)

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._operations.clear()

    def move_all(self) -> int:
        """Do what can be done without waiting; the number of operations that are left."""
        if self._operations and not self._moving:  # no context manager: this is called thousands of times a second
            self._moving = True
            try:
                self._move()
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._moving = False
        return len(self._operations)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Whatever fails inside is the end of everything that is under way, and the other parts are told."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the ranks that wait in other parts what went wrong."""
        if self._broken is None:
            fault = error if isinstance(error, CommError) else CommError(f"{type(error).__name__}: {error}")
            self._broken = str(fault)
            for part in self._parts:
                part.fail(fault)
        self._operations.clear()

    def _move(self) -> None:
        least = sys.maxsize  # phases that all earlier operations have started
        for operation in list(self._operations):
            while not operation.finished and operation.started < least and operation.is_met():
                operation.step()
            if operation.finished:
                self._operations.remove(operation)
            else:
                least = min(least, operation.started)
