"""A small ring of slots from which pieces of buckets are reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle

SLOTS = 4
"""How far a rank may run ahead of the slowest. On two ranks that exchange as much as they compute, a backward took
161 ms with two slots, 154 with four and no less with more."""


class Ring:
    """Slots of `nbytes` each, used in turn. On a host they are memory from which peers read in place.

    They are allocated by the first `take`, which all ranks come to together: some training never needs them.
    """

    def __init__(self, comm: Communicator, nbytes: int, device: torch.device) -> None:
        self._comm = comm
        self.slot_bytes = nbytes
        self._device = device
        self._slots: list[Tensor] = []
        self._users: list[Handle | None] = [None] * SLOTS
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that exist."""
        return sum(slot.numel() for slot in self._slots)

    def take(self, numel: int, dtype: torch.dtype, wait_for: Callable[[Handle], None]) -> Tensor:
        """The next slot, once the reduction that used it last has read it."""
        if not self._slots:
            self._slots = [self._allocate() for _ in range(SLOTS)]
        user = self._users[self._next]
        if user is not None:
            wait_for(user)
        return self._slots[self._next][: numel * dtype.itemsize].view(dtype)

    def lend(self, handle: Handle) -> None:
        """The slot that was taken belongs to `handle` until that has released it."""
        self._users[self._next] = handle
        self._next = (self._next + 1) % SLOTS

    def done(self, handle: Handle) -> None:
        """A reduction is complete: nothing of it is kept, least of all the tensor that it wrote."""
        for slot, user in enumerate(self._users):
            if user is handle:
                self._users[slot] = None

    def _allocate(self) -> Tensor:
        if self._comm.shares_memory and self._device.type == "cpu":
            return self._comm.shared_buffers(self.slot_bytes, dtype=torch.uint8)[self._comm.host.rank]
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)
