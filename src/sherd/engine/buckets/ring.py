"""A small ring of slots from which pieces of buckets are reduced, and the reductions in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.exchange import Exchange

SLOTS = 4
"""How far a rank may run ahead of the slowest. On two ranks that exchange as much as they compute, a backward took
161 ms with two slots, 154 with four and no less with more."""
MAX_UNDER_WAY = 32
MAX_ON_THE_WAY = 2 * SLOTS
"""The limit for reductions through the ring. Their slots are free again while partial sums still cross the network, in
the communicator's memory."""


class Ring:
    """`count` slots of `nbytes` each, used in turn. On a host they are memory from which peers read in place.

    They are allocated by the first `take`, which all ranks make together, since some training never needs them. A slot
    is *lent* to the reduction that reads it, and free when the reduction has released it.
    """

    def __init__(self, comm: Communicator, count: int, nbytes: int, device: torch.device) -> None:
        self._comm = comm
        self.count = count
        self.slot_bytes = nbytes
        self._device = device
        self._slots: list[Tensor] = []
        self._lent: list[Handle | None] = [None] * count
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated slots."""
        return sum(slot.numel() for slot in self._slots)

    def take(self, numel: int, dtype: torch.dtype, wait_for: Callable[[Handle], None]) -> Tensor:
        """The next slot, once the reduction that used it last has read it."""
        if not self._slots:
            self._slots = [self._allocate() for _ in range(self.count)]
        reader = self._lent[self._next]
        if reader is not None:
            wait_for(reader)
        return self._slots[self._next][: numel * dtype.itemsize].view(dtype)

    def lend(self, handle: Handle) -> None:
        """Lend the slot last taken to `handle` until it is released."""
        self._lent[self._next] = handle
        self._next = (self._next + 1) % self.count

    def done(self, handle: Handle) -> None:
        """A reduction is done: drop its handle, and with it the tensor that it wrote."""
        for slot, reader in enumerate(self._lent):
            if reader is handle:
                self._lent[slot] = None

    def _allocate(self) -> Tensor:
        if self._comm.shares_memory and self._device.type == "cpu":
            return self._comm.shared_buffers(self.slot_bytes, dtype=torch.uint8)[self._comm.host.rank]
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)


class Reduction(NamedTuple):
    """A reduction in flight. An `addend` is added to `target` at the end; without one, the sum is already there."""

    bucket: Bucket
    handle: Handle
    target: Tensor
    addend: Tensor | None
    last: bool


class Reductions:
    """The reductions of one model that are in flight, oldest first."""

    def __init__(self, comm: Communicator, exchange: Exchange, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._exchange = exchange
        self.ring = Ring(comm, 0, 0, device)
        self._under_way: deque[Reduction] = deque()

    def fit(self, buckets: Iterable[Bucket]) -> None:
        """Make enough slots, large enough for these buckets. Nothing may be in flight."""
        nbytes, pieces = 0, 0
        for bucket in buckets:
            nbytes = max(nbytes, self._exchange.slot_bytes(bucket))
            pieces += self._exchange.count(bucket.described)
        count = min(pieces, SLOTS)  # slots are free again when a round ends: it uses no more of them than it has pieces
        if nbytes > self.ring.slot_bytes or count > self.ring.count:
            self.ring = Ring(self._comm, count, nbytes, self._device)

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A slot to fill and then lend to its reduction."""
        while len(self._under_way) >= MAX_ON_THE_WAY:
            self._finish_oldest()
        return self.ring.take(numel, dtype, self._release)

    def add(self, bucket: Bucket, handle: Handle, target: Tensor, addend: Tensor | None, last: bool) -> None:
        """Add a reduction that was started; `last` marks the last one of its bucket."""
        self._under_way.append(Reduction(bucket, handle, target, addend, last))
        self._finish_done()

    def settle(self) -> None:
        """Complete every reduction in flight."""
        while self._under_way:
            self._finish_oldest()

    def _release(self, handle: Handle) -> None:
        """Wait until the slot of this reduction is free."""
        if self._exchange.sum_in_slot:
            while any(reduction.handle is handle for reduction in self._under_way):
                self._finish_oldest()
        else:
            handle.release()
            self._finish_done()

    def _finish_done(self) -> None:
        # Early, so that sums are used while in the cache and peers do not wait for what this rank can already read.
        while self._under_way and (self._under_way[0].handle.done() or len(self._under_way) > MAX_UNDER_WAY):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, handle, target, addend, last = self._under_way.popleft()
        handle.wait()
        self.ring.done(handle)
        if addend is not None:
            target.add_(addend)
        if last:
            bucket.finish()
