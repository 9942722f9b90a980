"""The operations of the cluster transport.

Sums are taken inside the hosts first, and the partial sum of each host crosses the network: that is the summation tree
with one group per host, so the bits are those of any other transport with that tree. A codec applies to contributions,
inside the host; partial sums cross as they are, as they would otherwise be rounded twice.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sherd.comm.base import Backing, Communicator
from sherd.comm.c10d.communicator import HEADER_BYTES, C10dCommunicator, leave
from sherd.comm.c10d.wire import Wire
from sherd.comm.calls import Call, Site, call_site
from sherd.comm.closing import opened
from sherd.comm.cluster.crossing import Across, BufferPool, Column, Steps
from sherd.comm.cluster.pipeline import ALL, ClusterOperation, Phase, Pipeline, ToldMessage
from sherd.comm.codec import Codec, wire_bytes
from sherd.comm.handle import EMPTY, Handle
from sherd.comm.host.communicator import HostCommunicator
from sherd.comm.host.joining.link import Check, Link
from sherd.comm.solo import SoloCommunicator
from sherd.comm.summation import cut_for, one_phase
from sherd.comm.waiting.progress import take_part
from sherd.config import CommOptions

PATIENCE = 1.25
Inside = HostCommunicator | SoloCommunicator
During = Callable[[Callable[[], Wire]], Wire]


class ClusterCommunicator(Communicator):
    """Ranks of several hosts of equal size. Build it with `sherd.comm.connect`.

    `flat` joins all ranks over the network, for single messages and reports of faults. `inside` and `again` are two
    communicators among the ranks of this host, for what comes before the network and what comes after it; `column`
    joins this rank with those of the same number on the other hosts.
    """

    transport = "cluster"
    shares_memory = True

    def __init__(
        self,
        flat: C10dCommunicator,
        link: Link,
        options: CommOptions,
        during: During = lambda work: work(),
        check: Check = lambda: None,
    ) -> None:
        """Join the ranks of `flat`; `link` joins those of this host. Collective. `during` does work that waits for
        ranks of other hosts."""
        local = len(link.members)
        host, place = divmod(flat.rank, local)
        ranks = range(place, flat.world, local)
        column = during(lambda: flat.wire_among(ranks))
        inside: Inside = SoloCommunicator(options)
        again: Inside = SoloCommunicator(options)
        if local > 1:
            numbers = range(host * local, (host + 1) * local)
            # A rank that waits for a neighbour that waits for another host must not give up first: it would name the
            # neighbour. Later, it is told of the host.
            patient = options.replace(timeout=PATIENCE * options.timeout, warn_after=options.warn_seconds)
            inside = HostCommunicator(link, patient, numbers=numbers, lock=flat.lock, check=check)
            again = HostCommunicator(link, patient, inside, numbers, flat.lock, check)
        super().__init__(flat.rank, flat.world, options)
        self.names, self.lock, self.seal = flat.names, flat.lock, flat.seal
        self._flat, self._inside, self._again = flat, inside, again
        self._locals = local
        self._pool = BufferPool()
        self._column = Column(flat, column, ranks, self._pool, options.check)
        self._hosts, self._mine = self._column.hosts, self._column.mine
        hosts = [part for part in (inside, again) if isinstance(part, HostCommunicator)]
        self._pipeline = Pipeline([flat, *hosts, self._column], self.lock)
        self._number = 0
        # Called by close(), when nothing refers to this communicator any more, or at the end of the process.
        self._leave = weakref.finalize(self, leave, os.getpid(), [self._column.lane], column)
        opened(self)

    # ---------------------------------------------------------------- groups, memory and life

    @property
    def host(self) -> Communicator:
        return self._inside

    def shared_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._pipeline.check()
        with self._pipeline.failing():
            return self._inside.shared_tensor(*shape, dtype=dtype)

    def backing(self, tensor: Tensor) -> Backing | None:
        return self._inside.backing(tensor)

    def shared_buffers(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        self._pipeline.check()
        with self._pipeline.failing():
            return self._inside.shared_buffers(*shape, dtype=dtype)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Of the same kind among whole hosts, over shared memory inside one, over torch.distributed otherwise."""
        self._check_group(ranks)
        self.site = call_site()
        self.start_barrier(Call("subgroup", f"subgroup({list(ranks)})")).wait()
        self._pipeline.drain()
        hosts = {rank // self._locals for rank in ranks}
        whole = list(ranks) == [rank for rank in range(self.world) if rank // self._locals in hosts]
        with self._pipeline.failing():
            if len(hosts) > 1:
                flat = self._flat.subgroup(ranks)
                if whole and isinstance(flat, C10dCommunicator) and isinstance(self._inside, HostCommunicator):
                    link = self._inside.meet(range(self._locals), self.options)
                    during = partial(flat.watched, ranks=range(flat.world))
                    return ClusterCommunicator(flat, link, self.options, during)
                return flat
            return self._inside.subgroup([r % self._locals for r in ranks]) if hosts == {self._mine} else None

    def use_here(self) -> None:
        for part in (self._flat, self._inside, self._again):
            part.use_here()
        take_part(self._pipeline)

    def _close(self, error: BaseException | None) -> None:
        self._pipeline.close()
        if error is not None:
            self._column.wire.faulty = True
        self._leave()
        for part in (self._flat, self._inside, self._again):
            part.close(error)

    # ---------------------------------------------------------------- operations

    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        cut = target.numel()
        sums = self._pool.take(self._hosts * cut, source.dtype).view(self._hosts, cut)
        return self._issue(
            call,
            (self._hosts - 1) * wire_bytes(cut, source),
            lambda: self._reduce_inside(call, source, sums, op, codec, own),
            lambda across: across.reduce(sums, target, op, self.world),
            finish=lambda: self._pool.give_back(sums),
            reading=1,  # what crosses the network is this host's sum, in memory of its own
        )

    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        if isinstance(self._inside, HostCommunicator):
            call = self._inside.naming(call, target)
        return self._issue(
            call,
            (self._hosts - 1) * wire_bytes(source.numel(), source, codec),
            lambda: [self._inside.start_barrier(call)],  # no rank of this host still reads what is overwritten
            lambda across: across.gather(source, self._column_of(target), codec),
            lambda: self._gather_inside(call, target),
        )

    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, others = source.numel(), self._hosts - 1
        if one_phase(numel * source.element_size(), codec):
            summed = torch.empty_like(source)
            return self._issue(
                call,
                others * wire_bytes(numel, source),
                lambda: [self._inside.start_all_reduce(call, source, summed, _undivided(op), None)],
                lambda across: across.exchange_and_reduce(summed, target, op, self.world),
            )
        cut = cut_for(numel, self.world, codec)
        sums = self._pool.take(self._hosts * cut, source.dtype).view(self._hosts, cut)
        even = numel == self.world * cut
        whole = target if even else torch.empty(self.world * cut, dtype=target.dtype)
        mine = whole[self.rank * cut : (self.rank + 1) * cut]

        def cross(across: Across) -> Steps:
            yield from across.reduce(sums, mine, op, self.world)
            mine[max(numel - self.rank * cut, 0) :].zero_()  # what a codec made of the padding must not spread
            yield from across.gather(mine, self._column_of(whole), codec)

        def finish() -> None:
            self._pool.give_back(sums)
            if not even:
                target.copy_(whole[:numel])

        return self._issue(
            call,
            others * (wire_bytes(cut, source) + wire_bytes(cut, target, codec)),
            lambda: self._reduce_inside(call, source, sums, op, codec),
            cross,
            lambda: self._gather_inside(call, whole),
            finish,
        )

    def start_reduce(
        self, call: Call, source: Tensor, target: Tensor, root: int, op: str, own: Tensor | None = None
    ) -> Handle:
        host, local = divmod(root, self._locals)
        crosses = local == self._inside.rank
        summed = self._pool.take(source.numel() if crosses else 0, source.dtype)
        nothing = summed[:0]
        parts = [summed if h == host else nothing for h in range(self._hosts)]
        return self._issue(
            call,
            wire_bytes(source.numel(), source) if crosses and self.rank != root else 0,
            lambda: [self._inside.start_reduce(call, source, summed, local, _undivided(op), own)],
            lambda across: across.reduce(parts, target, op, self.world),
            finish=lambda: self._pool.give_back(summed),
            reading=1,  # what crosses the network is this host's sum, in memory of its own
        )

    def start_broadcast(self, call: Call, target: Tensor, root: int, source: Tensor | None = None) -> Handle:
        host, local = divmod(root, self._locals)
        from_here, crosses, shared = host == self._mine, local == self._inside.rank, False
        if isinstance(self._inside, HostCommunicator):
            call, shared = self._inside.naming(call, target), self._inside.shares(target)

        def inside() -> Sequence[Handle]:
            if from_here and not shared:
                return [self._inside.start_broadcast(call, target, local, source)]
            return [self._inside.start_barrier(call)]  # no rank of this host still reads what is overwritten

        def cross(across: Across) -> Steps:
            if shared and source is not None:
                target.copy_(source)
            yield from across.spread(target if crosses else target[:0], host)

        def again() -> Sequence[Handle]:
            if shared:
                return [self._again.start_barrier(call)]
            return [] if from_here else [self._again.start_broadcast(call, target, local)]

        payload = (self._hosts - 1) * wire_bytes(target.numel(), target) if self.rank == root else 0
        return self._issue(call, payload, inside, cross, again)

    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        rows = self._pool.take(source.numel(), source.dtype).view(self._hosts, -1)
        takes = target.view(self._hosts, -1)

        def inside() -> Sequence[Handle]:
            # Each rank of this host gets what all of its ranks have for its column. This host's own part then arrived.
            blocks = source.view(self._hosts, -1)
            return [
                self._inside.start_all_to_all(call, b, takes[h] if h == self._mine else rows[h])
                for h, b in enumerate(blocks)
            ]

        payload = (self._hosts - 1) * wire_bytes(rows[0].numel(), source)
        give_back = partial(self._pool.give_back, rows)
        return self._issue(call, payload, inside, lambda across: across.swap(list(rows), list(takes)), finish=give_back)

    def start_barrier(self, call: Call) -> Handle:
        token = torch.zeros(self._hosts, dtype=torch.uint8)
        rows = list(token.view(self._hosts, 1))
        handle = self._issue(
            call,
            0,
            lambda: [self._inside.start_barrier(call)],
            lambda across: across.gather(token[:1], rows, None),
        )
        handle.result = EMPTY
        return handle

    def start_send(self, call: Call, source: Tensor, to: int) -> Handle:
        return self._message(call, source, to, wire_bytes(source.numel(), source))

    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle:
        return self._message(call, target, source, 0)

    # ---------------------------------------------------------------- their phases

    def _reduce_inside(
        self, call: Call, source: Tensor, sums: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Sequence[Handle]:
        """This host's sums of the slices of this rank's column: row h of `sums` for that of host h."""
        width = self._locals * sums.shape[1]
        handles = []
        for h, row in enumerate(sums):
            block = source[h * width : (h + 1) * width]
            if block.numel() < width:
                block = torch.cat([block, block.new_zeros(width - block.numel())])
            mine = own if h == self._mine else None
            handles.append(self._inside.start_reduce_scatter(call, block, row, _undivided(op), codec, mine))
        return handles

    def _gather_inside(self, call: Call, target: Tensor) -> Sequence[Handle]:
        """Every rank of this host has filled in its column of `target`."""
        if isinstance(self._inside, HostCommunicator) and self._inside.shares(target):
            return [self._again.start_barrier(call)]
        mine, blocks = self._column_of(target), target.view(self._hosts, -1)
        return [self._again.start_all_gather(call, mine[h], block, None) for h, block in enumerate(blocks)]

    def _column_of(self, target: Tensor) -> list[Tensor]:
        """The slices of this rank's column, one per host."""
        return list(target.view(self._hosts, self._locals, -1)[:, self._inside.rank])

    # ---------------------------------------------------------------- issuing and waiting

    def _issue(
        self,
        call: Call,
        payload: int,
        inside: Phase,
        cross: Callable[[Across], Steps],
        again: Phase | None = None,
        finish: Callable[[], None] = lambda: None,
        reading: int = ALL,
    ) -> ClusterOperation:
        self._pipeline.check()
        self._number += 1
        site, number = self.site, self._number
        with self._pipeline.failing():
            done = self._flat.note_call(call, number, site)
        self.counters.add(call.operation, payload, HEADER_BYTES * (self._hosts - 1) if self.options.check else 0)

        def finished() -> None:
            finish()
            done()

        phases: list[Phase] = [
            partial(self._started, self._inside, site, inside),
            lambda: [self._column.start(call, site, number, cross)],
        ]
        if again is not None:
            phases.append(partial(self._started, self._again, site, again))
        return self._pipeline.issue(ClusterOperation(self._pipeline, phases, finished, reading))

    def _started(self, part: Inside, site: Site, phase: Phase) -> Sequence[Handle]:
        part.site = site
        handles = phase()
        for handle in handles:
            handle.result = EMPTY
        return handles

    def _message(self, call: Call, tensor: Tensor, peer: int, payload: int) -> Handle:
        self._pipeline.check()
        part: Communicator = self._flat
        if peer // self._locals == self._mine:
            part, peer, payload = self._inside, peer % self._locals, 0
        part.site = self.site
        self.counters.add(call.operation, payload, 0)
        with self._pipeline.failing():
            start = part.start_send if call.operation == "send" else part.start_recv
            return ToldMessage(start(call, tensor, peer), self._pipeline)


def _undivided(op: str) -> str:
    """What is computed inside a host: a mean is divided only at the end."""
    return "sum" if op == "mean" else op
