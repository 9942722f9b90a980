"""The map phase: chunks are dealt, computed, and computed again where that failed or a number was lost.

A round ends with an exchange in which ranks tell each other which chunks they have and which failed. So every rank
knows the same, whatever the store said, and all of them raise the same error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from sherd.api.helpers.bars import Loop
from sherd.api.helpers.coordination import exchange
from sherd.comm import Communicator
from sherd.comm.waiting.patience import without_limit
from sherd.errors import ChunkFailed, CommError, Diverged
from sherd.mapreduce import randomness
from sherd.mapreduce.dealing import Dealer
from sherd.mapreduce.sources import Source
from sherd.mapreduce.tree import Forest, chunks_in, items_of

Partial = dict[Any, Any]
"""The result of some neighbouring chunks, by key."""
LONGEST = 8000  # characters of a traceback: its end says what happened


@dataclass(frozen=True)
class Job:
    """What is computed."""

    what: str
    source: Source
    chunk: int
    """items in each"""
    fold: Callable[[Iterator[tuple[int, Any]]], Partial]
    """the result of one chunk, from the numbers of its items and the items"""
    merge: Callable[[Partial, Partial], Partial]
    retries: int = 0
    seed: int = 0
    desc: str = ""
    progress: bool = True


class Failure(NamedTuple):
    """A chunk that raised; chunk -1 is a merge of results. It is sent as a plain tuple."""

    chunk: int
    item: int
    text: str


class Told(NamedTuple):
    """What a rank tells the others at the end of a round."""

    done: list[int]
    """the chunks that it has, of all rounds"""
    failed: list[int]
    """those that failed in this round"""
    failure: tuple[int, int, str] | None
    """the one to report"""
    items: int | None
    """how many there are, where that is known"""

    def plain(self) -> tuple[Any, ...]:
        """As it is sent."""
        return (self.done, self.failed, None if self.failure is None else tuple(self.failure), self.items)


class MapPhase:
    """One map on this rank. Afterwards the `forest` has the results of this rank's chunks."""

    def __init__(self, comm: Communicator, job: Job, name: str) -> None:
        self._comm, self._job, self._name = comm, job, name
        self.forest: Forest[Partial] = Forest(job.merge)
        self.done: list[int] = []
        self._failures: dict[int, Failure] = {}  # of this round, by chunk
        self._errors: dict[int, Exception] = {}
        self._tried: dict[int, list[int]] = {}  # by chunk, the ranks on which it failed in earlier rounds

    def run(self) -> None:
        """Compute all chunks, together with the other ranks. Collective."""
        source = self._job.source
        chunks = None if source.count is None else chunks_in(source.count, self._job.chunk)
        with Dealer(self._comm, self._name, chunks) as dealer, randomness.untouched():
            self._first_round(dealer)
            while (mine := self._settle()) is not None:
                with closing(self._read(iter(mine))) as reading:
                    for part, items in reading:
                        self._attempt(part, items)

    def _first_round(self, dealer: Dealer) -> None:
        bar = Loop(self._job.source.count, self._job.desc)
        if self._job.progress:
            bar.open()
        try:
            with closing(self._read(dealer.numbers())) as reading:
                for part, items in reading:
                    if self._job.progress:  # numbers ascend, so this is what all ranks have been given
                        bar.advance(part.start - bar.done)
                    if not self._attempt(part, items) and (not self._job.retries or -1 in self._failures):
                        dealer.end()  # no rank computes more than it has to
                        return
            if self._job.progress and self._job.source.count is not None:
                bar.advance(self._job.source.count - bar.done)
        finally:
            bar.close()

    def _read(self, numbers: Iterator[int]) -> Any:
        job = self._job
        return job.source.read(items_of(number, job.chunk, job.source.count) for number in numbers)

    def _attempt(self, part: range, items: Iterator[Any]) -> bool:
        """Compute a chunk; whether that succeeded."""
        chunk, at = part.start // self._job.chunk, part.start

        def numbered() -> Iterator[tuple[int, Any]]:
            nonlocal at
            for at in part:  # set first: it names the item that cannot be read
                try:
                    item = next(items)
                except StopIteration:  # of a stream
                    return
                yield at, item

        try:
            randomness.begin(self._job.seed, chunk)
            result = self._job.fold(numbered())
        except CommError:
            raise  # ranks are out of sync: map_fn communicated
        except Exception as error:  # whatever the user's function raises
            self._fail(chunk, at, error)
            return False
        try:
            self.forest.add((0, chunk), result)
        except Exception as error:
            self._fail(-1, at, error)
            return False
        self.done.append(chunk)
        return True

    def _fail(self, chunk: int, item: int, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))[-LONGEST:]
        self._failures[chunk], self._errors[chunk] = Failure(chunk, item, text), error

    # ---------------------------------------------------------------- the end of a round

    def _settle(self) -> list[int] | None:
        """The chunks that this rank has to compute in another round; None if there is none. Collective."""
        failed = sorted(self._failures)
        gone = [chunk for chunk in failed if len(self._tried.get(chunk, ())) >= self._job.retries or chunk < 0]
        report = self._failures[(gone or failed)[0]] if failed else None
        mine = Told(self.done, failed, report, self._job.source.count)
        with without_limit():  # a chunk takes as long as it takes; a rank that dies is noticed
            told = [Told(*each) for each in exchange(self._comm, f"{self._job.what}: what was done", mine.plain())]
        for rank, each in enumerate(told):
            for chunk in each.failed:
                self._tried.setdefault(chunk, []).append(rank)
        self._raise_failures(told)
        count = self._counted(told)
        missing = self._missing(told, chunks_in(count, self._job.chunk))
        self._failures.clear()
        self._job.source.count = count
        if not missing:
            return None
        # On another rank each time, as what failed may be the rank.
        to = {chunk: self._tried[chunk][-1] + 1 if chunk in self._tried else chunk for chunk in missing}
        return [chunk for chunk in missing if to[chunk] % self._comm.world == self._comm.rank]

    def _raise_failures(self, told: list[Told]) -> None:
        reported = [Failure(*each.failure) for each in told if each.failure is not None]
        broken = all(each.items is None for each in told)  # a stream that no rank could read to its end
        final = [e for e in reported if broken or e.chunk < 0 or len(self._tried[e.chunk]) > self._job.retries]
        if not final:
            return
        chunk, item, text = min(final)
        ranks = self._tried[chunk]
        where = f"rank {self._comm.rank}: {self._job.what}"
        if chunk < 0:
            message = f"{where}: the results of two chunks could not be merged on rank {ranks[-1]}:\n{text}"
        else:
            count = self._job.source.count
            items = items_of(chunk, self._job.chunk, count)
            named = f"chunk {chunk} (items {items.start} to {items.stop - 1})"
            tries = f" after {len(ranks)} attempts, on ranks {_listed(ranks)}" if len(ranks) > 1 else ""
            message = f"{where}: {named} failed at item {item} on rank {ranks[-1]}{tries}:\n{text}"
        raise ChunkFailed(message, chunk, item) from self._errors.get(chunk)

    def _counted(self, told: list[Told]) -> int:
        """How many items there are."""
        counts = {rank: each.items for rank, each in enumerate(told) if each.items is not None}
        first = min(counts)
        for rank, count in counts.items():
            if count != counts[first]:
                raise Diverged(
                    f"{self._job.what}: the stream has {counts[first]} items on rank {first} and {count} on rank "
                    f"{rank}; every rank must read the same stream",
                    (first, rank),
                )
        return counts[first]

    def _missing(self, told: list[Told], chunks: int) -> list[int]:
        having: dict[int, int] = {}
        for rank, each in enumerate(told):
            for chunk in each.done:
                other = having.setdefault(chunk, rank)
                if other != rank or not 0 <= chunk < chunks:
                    raise CommError(
                        f"{self._job.what}: chunk {chunk} of {chunks} was dealt to rank {other} and to rank {rank}: "
                        f"someone else wrote to the store of this job. See docs/security.md",
                        (other, rank),
                    )
        return [chunk for chunk in range(chunks) if chunk not in having]


def _listed(ranks: list[int]) -> str:
    *others, last = map(str, ranks)
    return f"{', '.join(others)} and {last}" if others else last
