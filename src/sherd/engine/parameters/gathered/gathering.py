"""Which buckets of parameters are whole on this rank, and for how long.

    gathered   all slices of a bucket are in its pages, or being received
    touched    about to be read: gathered first, if it is not
    used       by a running call; not released before the call ends
    pinned     read outside torch's dispatch; not released before the parameters change
    held       pinned for good: gathered again after each change
    released   its pages are gone

Gathering is collective, so what is gathered and released, and when, may depend only on what was touched: then ranks
that run the same model do the same.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from sherd.comm import Handle, labelled
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.parameters.gathered.route import Route
from sherd.engine.parameters.isolation import isolated
from sherd.errors import SherdError

AHEAD = 2
"""Buckets that are gathered before they are needed."""
WINDOW = AHEAD + 2
"""Buckets that stay gathered: those ahead, the one in use, and one more, since a layer can span two."""


class Gathering:
    """Gathers buckets on use.

    `fetch(b)` starts gathering a bucket, collectively; `release(b)` frees its memory; `is_written(b)` says whether this
    rank wrote into it; `write_back(b)` keeps this rank's part of what it wrote.
    """

    def __init__(
        self,
        fetch: Callable[[Bucket], Handle],
        release: Callable[[Bucket], None],
        write_back: Callable[[Bucket], None],
        is_written: Callable[[Bucket], bool],
    ) -> None:
        self._fetch = fetch
        self._give_back = release
        self._write_back = write_back
        self._is_written = is_written
        self._route: Route[Bucket] = Route()
        self._process = os.getpid()
        self._gathered: dict[Bucket, Handle | None] = {}  # least recently touched first; None: complete
        self._used: Counter[Bucket] = Counter()
        self._edited: set[Bucket] = set()
        self._pinned: set[Bucket] = set()
        self._held: set[Bucket] = set()
        self.steps = 0
        """How many times all parameters have changed; for messages."""
        self._nodes: dict[int, tuple[int, set[Bucket]]] = {}  # by graph task: its current node, and what that reads

    @property
    def gathered(self) -> list[Bucket]:
        """The buckets that are gathered."""
        return list(self._gathered)

    def touch(self, bucket: Bucket) -> None:
        """Make a bucket whole, and start gathering those expected next. Collective unless it is gathered."""
        if os.getpid() != self._process:
            raise SherdError(
                f"this process was forked from a rank and uses {_name(bucket)}, which only the ranks can gather; "
                f"give it a copy made before the fork: copy.deepcopy(model)"
            )
        moved = self._route.visit(bucket)
        if moved or bucket not in self._gathered:
            if torch._C._current_graph_task_id() == -1:
                self._nodes.clear()
            with isolated():
                self._gather_all((bucket, *self._route.ahead(AHEAD)))
        handle = self._gathered.pop(bucket)
        if handle is not None:
            with isolated():
                handle.wait()
        self._gathered[bucket] = None  # now the most recently touched

    def use(self, buckets: Iterable[Bucket]) -> None:
        """A call that reads these buckets begins."""
        buckets = list(buckets)
        self._used.update(buckets)
        try:
            for bucket in buckets:
                self.touch(bucket)
        except BaseException:
            self.leave(buckets)
            raise

    def leave(self, buckets: Iterable[Bucket]) -> None:
        """The call has ended."""
        self._used.subtract(buckets)

    def touch_for_node(self, bucket: Bucket) -> None:
        """A node of autograd's graph unpacks what it saved, and keeps it until it has run. Torch does not report when
        that is, so a node counts as ended when another one of the same backward unpacks something."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():
            self.pin(bucket)  # the program inspects the graph, or create_graph=True saves the tensor again
            return
        number: int = node._sequence_nr()
        last, reads = self._nodes.get(task, (number, set[Bucket]()))
        if last != number:
            reads = set()
        reads.add(bucket)
        self._nodes[task] = number, reads
        self.touch(bucket)

    def pin(self, bucket: Bucket) -> None:
        """Keep a bucket gathered until the parameters change."""
        self._pinned.add(bucket)
        self.touch(bucket)

    def hold(self, bucket: Bucket) -> None:
        """Keep a bucket gathered for good."""
        self._held.add(bucket)
        self.touch(bucket)

    def edited(self, buckets: Iterable[Bucket]) -> None:
        """The program wrote into these buckets while they were gathered."""
        self._edited.update(buckets)

    def written(self) -> list[Bucket]:
        """Buckets that the program wrote into and that were not written back yet."""
        # Incomplete ones may still be receiving data, and cannot have been used.
        self._edited.update(b for b, handle in self._gathered.items() if handle is None and self._is_written(b))
        return sorted(self._edited, key=_place)

    def drop(self, buckets: Iterable[Bucket]) -> None:
        """Release these buckets even if they are pinned: they are about to change."""
        for bucket in buckets:
            self._pinned.discard(bucket)
            if bucket in self._gathered:
                with isolated():
                    self._release(bucket)

    def refresh(self) -> None:
        """The parameters have changed: gather held buckets again. Collective if there are any."""
        self._route.end()
        for bucket in sorted(self._held.difference(self._gathered), key=_place):
            self.touch(bucket)

    def _gather_all(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket not in self._gathered:
                self._make_room(set(buckets))
                with labelled(self._label(bucket)):
                    self._gathered[bucket] = self._fetch(bucket)

    def _make_room(self, keep: set[Bucket]) -> None:
        spare = len(self._gathered) + 1 - WINDOW
        if spare <= 0:
            return
        read = keep.union(*(reads for _, reads in self._nodes.values()), self._pinned, self._held)
        for bucket in [bucket for bucket in self._gathered if bucket not in read and not self._used[bucket]][:spare]:
            self._release(bucket)

    def _label(self, bucket: Bucket) -> str:
        return f"the use of {_name(bucket)} in step {self.steps}, which all ranks must make under zero3"

    def _release(self, bucket: Bucket) -> None:
        handle = self._gathered.pop(bucket)
        if handle is not None:
            handle.wait()
        try:
            if bucket in self._edited or self._is_written(bucket):
                self._edited.discard(bucket)
                self._write_back(bucket)
        finally:
            self._give_back(bucket)


def _place(bucket: Bucket) -> int:
    """A key that orders buckets the same on all ranks."""
    return bucket.described.index


def _name(bucket: Bucket) -> str:
    return str(getattr(bucket.values, "name", bucket))
