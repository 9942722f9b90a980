"""A map whose function is collective: a forward that gathers parameters from all ranks.

Every rank has to make as many forwards as the others. Chunks are dealt in turn, and before each forward the ranks agree
whether anyone still has a batch; a rank that has none repeats one, which counts nothing.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch

from sherd.api.helpers.coordination import exchange
from sherd.comm import Communicator, labelled
from sherd.comm.waiting.patience import without_limit
from sherd.errors import ChunkFailed, CommError
from sherd.mapreduce import randomness
from sherd.mapreduce.mapping import LONGEST, Job, Partial
from sherd.mapreduce.tree import Forest, chunks_in, items_of

DONE, GOING, FAILED = range(3)


class LockStep:
    """One such map on this rank. `repeat(item)` does what the others do for an item, and counts nothing."""

    def __init__(self, comm: Communicator, job: Job, repeat: Callable[[Any], object]) -> None:
        self._comm, self._job, self._repeat = comm, job, repeat
        self.forest: Forest[Partial] = Forest(job.merge)
        self.done: list[int] = []
        self._last: list[Any] = []  # the last item, if there was one

    def run(self) -> None:
        """Compute all chunks, together with the other ranks. Collective."""
        with randomness.untouched():
            try:
                self._own_chunks()
                while self._meet(DONE) == GOING:
                    self._repeat(self._any_item())
            except (CommError, ChunkFailed):
                raise
            except Exception as error:
                self._tell(error)

    def _own_chunks(self) -> None:
        job, world = self._job, self._comm.world
        numbers: Iterator[int] = itertools.count(self._comm.rank, world)
        if job.source.count is not None:
            numbers = iter(range(self._comm.rank, chunks_in(job.source.count, job.chunk), world))
        with closing(self._read(numbers)) as reading:
            for part, items in reading:
                chunk = part.start // job.chunk
                randomness.begin(job.seed, chunk)
                self.forest.add((0, chunk), job.fold(self._paced(part, items)))
                self.done.append(chunk)

    def _paced(self, part: range, items: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        for number, item in zip(part, items, strict=False):
            self._last = [item]
            self._meet(GOING)
            yield number, item

    def _any_item(self) -> Any:
        if not self._last:
            with closing(self._read(iter([0]))) as reading:
                self._last = [next(items) for _, items in reading][:1]
        return self._last[0]

    def _read(self, numbers: Iterator[int]) -> Any:
        job = self._job
        return job.source.read(items_of(number, job.chunk, job.source.count) for number in numbers)

    # ---------------------------------------------------------------- together

    def _meet(self, mine: int) -> int:
        """What the busiest rank is about to do. Raises what failed on any rank. Collective."""
        with self._comm.counters.agreeing(), labelled(f"{self._job.what}: who has a batch"), without_limit():
            found = int(self._comm.all_reduce(torch.tensor([mine]), op="max").wait())
        if found == FAILED:
            self._raise_failures("")
        return found

    def _tell(self, error: Exception) -> None:
        """This rank failed between two forwards or inside one; then the others notice that it makes another call."""
        text = "".join(traceback.format_exception(error))[-LONGEST:]
        try:
            said = f"{type(error).__name__}: {str(error)[:200]}"
            with self._comm.counters.agreeing(), labelled(f"{self._job.what}, which failed with {said}"):
                self._comm.all_reduce(torch.tensor([FAILED]), op="max").wait()
            self._raise_failures(text)
        except CommError as told:
            raise error from told

    def _raise_failures(self, mine: str) -> None:
        for rank, text in enumerate(exchange(self._comm, self._job.what, mine)):
            if text:
                raise ChunkFailed(f"rank {self._comm.rank}: {self._job.what} failed on rank {rank}:\n{text}")
