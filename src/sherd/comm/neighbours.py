"""Tensors that a rank shows to a few others, and reads of theirs: no call that all ranks must make.

Neighbours on one host read each other's memory where it is: a message of one byte says that it may be read, another
that it was. To the others it is sent.

    shown = neighbours.room([weight, bias])                once; collective among the ranks of a host
    neighbours.wait_until_read()                           nobody needs the old values any more
    for each in shown: each.own.copy_(...)
    neighbours.show(shown, targets)
    for theirs in neighbours.read(shown, sources): ...     the first tensor of every source, then the second
    neighbours.finish()

`mix` does the last three, and adds up what it reads. Every rank must go through these calls in the same order, with
targets and sources that fit together. Then ranks cannot wait for each other in a circle: each waits only for what
others do before they wait in the same round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm.base import Communicator
from sherd.comm.handle import Handle

_SHOWN, _READ = 1, 2  # tags, which the two ends of a message compare


@dataclass(frozen=True)
class Shown:
    """Memory of this rank that its neighbours read, and where those on this host have theirs."""

    own: Tensor
    near: Mapping[int, Tensor]
    """by rank; this rank's own too"""


class Neighbours:
    """One rank and those it exchanges with, which may be others each time."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        shares = comm.shares_memory and device.type == "cpu"
        first = comm.rank - comm.host.rank
        self._near = range(first, first + comm.host.world) if shares else range(comm.rank, comm.rank + 1)
        self._unread: list[int] = []  # who has not said yet that it has read what was shown last
        self._reading: list[int] = []  # whom it must tell that it has read
        self._sending: list[Handle] = []
        self._inbox: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self._allocated = 0

    @property
    def bytes(self) -> int:
        """What this rank allocated."""
        return self._allocated + sum(room.nbytes for room in self._inbox)

    def room(self, tensors: Sequence[Tensor]) -> list[Shown]:
        """Memory for flat tensors like these. Collective among the ranks of a host."""
        made: dict[torch.dtype, Iterator[Shown]] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            made[dtype] = self._room([tensor.numel() for tensor in tensors if tensor.dtype == dtype], dtype)
        return [next(made[tensor.dtype]) for tensor in tensors]

    def _room(self, sizes: list[int], dtype: torch.dtype) -> Iterator[Shown]:
        numel, rank = sum(sizes), self._comm.rank
        self._allocated += numel * dtype.itemsize
        if len(self._near) > 1:
            buffers = dict(zip(self._near, self._comm.shared_buffers(numel, dtype=dtype), strict=True))
        else:
            buffers = {rank: torch.zeros(numel, dtype=dtype, device=self._device)}
        cut = {each: torch.split(buffer, sizes) for each, buffer in buffers.items()}
        return iter([Shown(cut[rank][i], {each: parts[i] for each, parts in cut.items()}) for i in range(len(sizes))])

    def wait_until_read(self) -> None:
        """Return when what was shown may be overwritten."""
        for target in self._unread:
            self._hear(target, _READ)
        self._unread = []

    def show(self, shown: Sequence[Shown], targets: Collection[int]) -> None:
        """Let these ranks read what this rank has written. Afterwards, `read` what others show."""
        near = [target for target in targets if target in self._near]
        far = [target for target in targets if target not in self._near]
        for target in near:
            self._tell(target, _SHOWN)
        self._unread = near
        if near:  # between hosts, as everywhere, only what crosses the network is counted
            self._comm.host.counters.add("lend", len(near) * sum(each.own.nbytes for each in shown), 0)
        self._sending = [self._comm.send(each.own, target) for each in shown for target in far]

    def read(self, shown: Sequence[Shown], sources: Sequence[int]) -> Iterator[Tensor]:
        """What these ranks show in place of each of `shown`: of all sources, then the next of `shown`.

        A tensor may be used until the next one is asked for. After the last one, `finish`.
        """
        self._reading = [source for source in sources if source in self._near]
        for source in self._reading:
            self._hear(source, _SHOWN)
        far = [source for source in sources if source not in self._near]
        received = self._receive(shown, far)
        for each in shown:
            for source in sources:
                yield each.near[source] if source in self._near else next(received)

    def finish(self) -> None:
        """End a round: sources may overwrite what they showed, and this rank may leave though others still read."""
        for source in self._reading:
            self._tell(source, _READ)
        for handle in self._sending:
            handle.wait()
        self._reading, self._sending = [], []

    def mix(
        self,
        shown: Sequence[Shown],
        into: Sequence[Tensor],
        rows: Sequence[Mapping[int, float]],
        targets: Collection[int],
    ) -> None:
        """Show tensors to these ranks, and write into each of `into` the sum of what is shown in its place, by this
        rank too: `rows` has the weight of every rank. Added in rank order, so the bits are those of any transport."""
        me = self._comm.rank
        self.show(shown, targets)
        parts = self.read(shown, [rank for rank in sorted(rows[0]) if rank != me] if rows else [])
        for each, target, row in zip(shown, into, rows, strict=True):
            exact = target.dtype.itemsize >= torch.float32.itemsize
            total = target if exact else torch.empty_like(target, dtype=torch.float32)
            for place, (rank, weight) in enumerate(sorted(row.items())):
                part = each.own if rank == me else next(parts)
                if place == 0:
                    torch.mul(part.to(total.dtype), weight, out=total)
                else:
                    total.add_(part, alpha=weight)
            if not exact:
                target.copy_(total)
        self.finish()

    def _receive(self, shown: Sequence[Shown], sources: Sequence[int]) -> Iterator[Tensor]:
        """What comes by message. One is under way while another is used."""
        largest = max((each.own.nbytes for each in shown), default=0) if sources else 0
        if self._inbox[0].numel() < largest:
            self._inbox = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        under_way: deque[Handle] = deque()
        wanted = [(each.own, source) for each in shown for source in sources]
        for number, (like, source) in enumerate(wanted):
            place = self._inbox[number % 2][: like.nbytes].view(like.dtype)
            under_way.append(self._comm.recv(place, source))
            if len(under_way) > 1:
                yield under_way.popleft().wait()
        if under_way:
            yield under_way.popleft().wait()

    def _tell(self, rank: int, what: int) -> None:
        with self._comm.counters.agreeing():
            self._comm.send(torch.zeros(1, dtype=torch.uint8), rank, what).wait()

    def _hear(self, rank: int, what: int) -> None:
        with self._comm.counters.agreeing():
            self._comm.recv(torch.zeros(1, dtype=torch.uint8), rank, what).wait()
