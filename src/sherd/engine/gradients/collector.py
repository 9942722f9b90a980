"""The gradients of one round: which have arrived, and which bucket is next.

A bucket is *complete* when each of its entries has arrived once in the round. Buckets are launched as soon as they are
complete, but in one order that all ranks share; at the end of the round the incomplete ones are launched too, with
zeros for what is missing. What arrives after its bucket was launched is *late*: it waits until ranks have agreed that
there is such. Entries are packed alike under every strategy, so what is late is the same under all of them, and so is
the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sherd.comm import labelled
from sherd.engine.gradients.gradients import RingGradients
from sherd.layout.shard_layout import ShardLayout

MAX_WAITING = 8
"""How many complete buckets may wait for their turn."""


class Collector:
    """Takes gradients as they arrive and launches buckets in order."""

    def __init__(self, layout: ShardLayout, gradients: RingGradients) -> None:
        self._gradients = gradients
        self.label = ""
        """What errors call these rounds."""
        self.order: list[int] = []
        """The order in which buckets are launched, the same on all ranks."""
        self.used: list[bool] = []
        """Which entries have arrived on this rank since ranks last agreed on it."""
        self.grow(layout)

    def grow(self, layout: ShardLayout) -> None:
        """Take the entries that `layout` has more, between two rounds. Their buckets are the last to be launched."""
        self._layout = layout
        self._homes = [layout.bucket_of(entry).index for entry in range(len(layout.entries))]
        self.order += range(len(self.order), len(layout.buckets))
        self.used += [False] * (len(layout.entries) - len(self.used))
        self.start()

    def start(self) -> None:
        """A new round."""
        self._arrived = [False] * len(self._layout.entries)
        self._missing = [len(bucket.members) for bucket in self._layout.buckets]
        self._late: dict[int, Tensor] = {}
        self._launched = 0
        self._launched_complete = 0
        self._is_launched = [False] * len(self._layout.buckets)
        self.completed: list[int] = []
        """Buckets in this rank's order: what the order of the next rounds is learned from."""

    def arrive(self, entry: int, gradient: Tensor, factor: float, op: str | None) -> None:
        """Take a gradient; without `op` nothing is launched in this round."""
        bucket = self._homes[entry]
        self.used[entry] = True
        if self._is_launched[bucket]:
            before = self._late.get(entry)
            self._late[entry] = gradient * factor if before is None else before.add_(gradient, alpha=factor)
            return
        self._gradients.take(entry, gradient, factor)
        if self._arrived[entry]:
            return
        self._arrived[entry] = True
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self.completed.append(bucket)
            if op is not None:
                self._launch_in_turn(op)
                # One that does not come must not hold all others in memory: should it come after all, it is late.
                while len(self.completed) - self._launched_complete > MAX_WAITING:
                    self._launch_next(op)
                    self._launch_in_turn(op)

    def flush(self, op: str) -> None:
        """Launch the buckets that were not complete."""
        while self._launched < len(self.order):
            self._launch_next(op)

    def late(self) -> list[bool]:
        """Which buckets this rank has late gradients for."""
        buckets = {self._homes[entry] for entry in self._late}
        return [bucket in buckets for bucket in range(len(self._layout.buckets))]

    def nothing_late(self) -> list[bool]:
        """The same where there is nothing."""
        return [False] * len(self._layout.buckets)

    def launch_late(self, late: Sequence[bool], op: str) -> None:
        """Launch again the buckets for which some rank has late gradients."""
        for entry, gradient in self._late.items():
            self._gradients.take(entry, gradient, 1.0)
        self._late.clear()
        for bucket in self.order:
            if late[bucket]:
                self._launch(bucket, op)

    @property
    def launched(self) -> int:
        """How many buckets were launched in this round."""
        return self._launched

    def forget(self) -> None:
        """Ranks have agreed on what was used, or it does not matter any more."""
        self.used = [False] * len(self.used)

    def _launch_in_turn(self, op: str) -> None:
        while self._launched < len(self.order) and not self._missing[self.order[self._launched]]:
            self._launch_next(op)

    def _launch_next(self, op: str) -> None:
        bucket = self.order[self._launched]
        self._launched += 1
        self._launched_complete += not self._missing[bucket]
        self._is_launched[bucket] = True
        self._launch(bucket, op)

    def _launch(self, bucket: int, op: str) -> None:
        with labelled(self.label):
            self._gradients.launch(bucket, op)
