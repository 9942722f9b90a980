"""The operations of the cluster transport.

A sum is taken inside the hosts first, and what crosses the network is a host's partial sum: the summation tree with
groups of one host each, hence the same bits as any other transport with that tree. A codec is for the contributions,
inside the host; partial sums cross as they are, as they would otherwise be rounded twice.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from sherd.comm.base import Backing, Communicator
from sherd.comm.c10d.communicator import HEADER_BYTES, C10dCommunicator, backend_limit
from sherd.comm.c10d.lanes import Lane, Message, close_lanes
from sherd.comm.c10d.wire import COME_BACK, LINGER, Wire
from sherd.comm.calls import Call, Site, call_site, site_text
from sherd.comm.cluster.across import TAGS, Across, Column, Steps
from sherd.comm.cluster.buffer_pool import Spares
from sherd.comm.cluster.failure_state import Trouble
from sherd.comm.cluster.pipeline import ALL, ClusterOperation, Phase, Pipeline, ToldMessage
from sherd.comm.codec import Codec, wire_bytes
from sherd.comm.handle import Handle
from sherd.comm.host.communicator import HostCommunicator
from sherd.comm.host.joining.rendezvous import Check, Link
from sherd.comm.solo import SoloCommunicator
from sherd.comm.summation import cut_for, one_phase
from sherd.comm.waiting.deadlock import COLLECTIVE, Stance
from sherd.comm.waiting.faults import LinkBroken
from sherd.comm.waiting.progress import move_everything, take_part
from sherd.config import CommOptions
from sherd.errors import CommError

HEADER_TAG = 0
FINGERPRINTS, NUMBERS = 1 << 18, 1 << 10  # that tags tell apart: they have 31 bits
FINGERPRINT_BYTES = 8
PATIENCE = 1.25
MOVE_EVERY = 0.001  # seconds between looks while a neighbour may need this rank for something else
_EMPTY = torch.empty(0)
Inside = HostCommunicator | SoloCommunicator
During = Callable[[Callable[[], Wire]], Wire]


class ClusterCommunicator(Communicator):
    """Ranks of several hosts of equal size. Build it with `sherd.comm.connect`.

    `flat` reaches every rank over the network: single messages and news of faults go that way. `inside` and `again` are
    two communicators among the ranks of this host, for what comes before and what comes after the network; `column`
    joins the ranks with this one's number on the other hosts.
    """

    transport = "cluster"
    shares_memory = True

    def __init__(
        self, flat: C10dCommunicator, inside: Inside, again: Inside, column: Wire, options: CommOptions
    ) -> None:
        super().__init__(flat.rank, flat.world, options)
        self.names, self.turn, self.seal = flat.names, flat.turn, flat.seal
        self._flat, self._inside, self._again = flat, inside, again
        self._locals = inside.world
        self._spares = Spares()
        self._column = Column(column, range(inside.rank, self.world, inside.world), self._spares)
        self._hosts, self._mine = self._column.hosts, self._column.mine
        self._lane = Lane("sherd-across")
        hosts = [part for part in (inside, again) if isinstance(part, HostCommunicator)]
        self._trouble = Trouble([flat, *hosts, self._column])
        self._pipeline = Pipeline(self._trouble, self.turn)
        self._number = 0
        # Called by close(), or when nobody holds this communicator any more, or at the end of the process.
        self._leave = weakref.finalize(self, _leave, os.getpid(), self._lane, column)

    @classmethod
    def over(
        cls,
        flat: C10dCommunicator,
        link: Link,
        options: CommOptions,
        during: During = lambda work: work(),
        check: Check = lambda: None,
    ) -> ClusterCommunicator:
        """Join the ranks of `flat`, of which `link` joins those of this host. Collective. `during` does what waits for
        ranks of other hosts."""
        local = len(link.members)
        host, place = divmod(flat.rank, local)
        column = during(lambda: flat._wire.subgroup(range(place, flat.world, local), backend_limit(options)))
        inside: Inside = SoloCommunicator(options)
        again: Inside = SoloCommunicator(options)
        if local > 1:
            numbers = range(host * local, (host + 1) * local)
            # Who waits for a neighbour that waits for another host must not be the first to give up: it would name the
            # neighbour, and then hears of the host.
            patient = options.replace(timeout=PATIENCE * options.timeout, warn_after=options.warn_seconds)
            inside = HostCommunicator(link, patient, numbers=numbers, turn=flat.turn, check=check)
            again = HostCommunicator(link, patient, inside, numbers, flat.turn, check)
        return cls(flat, inside, again, column, options)

    # ---------------------------------------------------------------- groups, memory and life

    @property
    def host(self) -> Communicator:
        return self._inside

    def shared_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._trouble.check()
        with self._pipeline.failing():
            return self._inside.shared_tensor(*shape, dtype=dtype)

    def backing(self, tensor: Tensor) -> Backing | None:
        return self._inside.backing(tensor)

    def shared_buffers(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        self._trouble.check()
        with self._pipeline.failing():
            return self._inside.shared_buffers(*shape, dtype=dtype)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Of the same kind among whole hosts, over shared memory inside one, over torch.distributed otherwise."""
        self._check_group(ranks)
        self._site = call_site()
        self._barrier(Call("subgroup", f"subgroup({list(ranks)})")).wait()
        self._pipeline.drain()
        hosts = {rank // self._locals for rank in ranks}
        whole = list(ranks) == [rank for rank in range(self.world) if rank // self._locals in hosts]
        with self._pipeline.failing():
            if len(hosts) > 1:
                flat = self._flat.subgroup(ranks)
                if whole and isinstance(flat, C10dCommunicator) and isinstance(self._inside, HostCommunicator):
                    link = self._inside.meet(range(self._locals), self.options)
                    during = partial(flat.watched, ranks=range(flat.world))
                    return ClusterCommunicator.over(flat, link, self.options, during)
                return flat
            return self._inside.subgroup([r % self._locals for r in ranks]) if hosts == {self._mine} else None

    def use_here(self) -> None:
        for part in (self._flat, self._inside, self._again):
            part.use_here()
        take_part(self._pipeline)

    def _close(self, error: BaseException | None) -> None:
        self._trouble.close()
        self._pipeline.abandon()
        if error is not None:
            self._column.wire.faulty = True
        self._leave()
        for part in (self._flat, self._inside, self._again):
            part.close(error)

    # ---------------------------------------------------------------- operations

    def _reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        cut = target.numel()
        sums = self._spares.take(self._hosts * cut, source.dtype).view(self._hosts, cut)
        return self._issue(
            call,
            (self._hosts - 1) * wire_bytes(cut, source),
            lambda: self._reduce_inside(call, source, sums, op, codec, own),
            lambda across: across.reduce(sums, target, op, self.world),
            finish=lambda: self._spares.give_back(sums),
            reading=1,  # what crosses the network is this host's sum, in memory of its own
        )

    def _all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        if isinstance(self._inside, HostCommunicator):
            call = self._inside.naming(call, target)
        return self._issue(
            call,
            (self._hosts - 1) * wire_bytes(source.numel(), source, codec),
            lambda: [self._inside._barrier(call)],  # nobody on this host still reads what is overwritten
            lambda across: across.gather(source, self._places(target), codec),
            lambda: self._gather_inside(call, target),
        )

    def _all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, others = source.numel(), self._hosts - 1
        if one_phase(numel * source.element_size(), codec):
            summed = torch.empty_like(source)
            return self._issue(
                call,
                others * wire_bytes(numel, source),
                lambda: [self._inside._all_reduce(call, source, summed, _undivided(op), None)],
                lambda across: across.exchange_and_reduce(summed, target, op, self.world),
            )
        cut = cut_for(numel, self.world, codec)
        sums = self._spares.take(self._hosts * cut, source.dtype).view(self._hosts, cut)
        even = numel == self.world * cut
        whole = target if even else torch.empty(self.world * cut, dtype=target.dtype)
        mine = whole[self.rank * cut : (self.rank + 1) * cut]

        def cross(across: Across) -> Steps:
            yield from across.reduce(sums, mine, op, self.world)
            mine[max(numel - self.rank * cut, 0) :].zero_()  # what a codec made of the padding must not reach the rest
            yield from across.gather(mine, self._places(whole), codec)

        def finish() -> None:
            self._spares.give_back(sums)
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

    def _broadcast(self, call: Call, target: Tensor, root: int) -> Handle:
        host, local = divmod(root, self._locals)
        from_here, crosses = host == self._mine, local == self._inside.rank
        return self._issue(
            call,
            (self._hosts - 1) * wire_bytes(target.numel(), target) if self.rank == root else 0,
            lambda: [self._inside._broadcast(call, target, local) if from_here else self._inside._barrier(call)],
            lambda across: across.spread(target if crosses else target[:0], host),
            lambda: [] if from_here else [self._again._broadcast(call, target, local)],
        )

    def _all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        rows = self._spares.take(source.numel(), source.dtype).view(self._hosts, -1)
        takes = target.view(self._hosts, -1)

        def inside() -> Sequence[Handle]:
            # To each rank of this host, what all of its ranks have for that column. Its own part is there then.
            blocks = source.view(self._hosts, -1)
            return [
                self._inside._all_to_all(call, b, takes[h] if h == self._mine else rows[h]) for h, b in _each(blocks)
            ]

        payload = (self._hosts - 1) * wire_bytes(rows[0].numel(), source)
        give_back = partial(self._spares.give_back, rows)
        return self._issue(call, payload, inside, lambda across: across.swap(list(rows), list(takes)), finish=give_back)

    def _barrier(self, call: Call) -> Handle:
        token = torch.zeros(self._hosts, dtype=torch.uint8)
        handle = self._issue(
            call, 0, lambda: [self._inside._barrier(call)], lambda across: across.gather(token[:1], _cut(token), None)
        )
        handle.result = _EMPTY
        return handle

    def _send(self, call: Call, source: Tensor, to: int) -> Handle:
        return self._message(call, source, to, wire_bytes(source.numel(), source))

    def _recv(self, call: Call, target: Tensor, source: int) -> Handle:
        return self._message(call, target, source, 0)

    # ---------------------------------------------------------------- their phases

    def _reduce_inside(
        self, call: Call, source: Tensor, sums: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Sequence[Handle]:
        """This host's sums of the slices of this rank's column: row h of `sums` for that of host h."""
        width = self._locals * sums.shape[1]
        handles = []
        for h, row in _each(sums):
            block = source[h * width : (h + 1) * width]
            if block.numel() < width:
                block = torch.cat([block, block.new_zeros(width - block.numel())])
            mine = own if h == self._mine else None
            handles.append(self._inside._reduce_scatter(call, block, row, _undivided(op), codec, mine))
        return handles

    def _gather_inside(self, call: Call, target: Tensor) -> Sequence[Handle]:
        """Every rank of this host has filled in its column of `target`."""
        if self._shares(target):
            return [self._again._barrier(call)]
        places, blocks = self._places(target), target.view(self._hosts, -1)
        return [self._again._all_gather(call, places[h], block, None) for h, block in _each(blocks)]

    def _places(self, target: Tensor) -> list[Tensor]:
        """The slices of this rank's column, one per host."""
        return list(target.view(self._hosts, self._locals, -1)[:, self._inside.rank])

    def _shares(self, target: Tensor) -> bool:
        return isinstance(self._inside, HostCommunicator) and self._inside.shares(target)

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
        self._trouble.check()
        self._number += 1
        site, number = self._site, self._number
        done = self._begin(call, payload)

        def start_inside() -> Sequence[Handle]:
            return self._started(self._inside, site, inside)

        def start_across() -> Sequence[Handle]:
            return [self._cross(call, site, number, cross)]

        def start_again() -> Sequence[Handle]:
            assert again is not None
            return self._started(self._again, site, again)

        def finished() -> None:
            finish()
            done()

        phases = [start_inside, start_across, *([start_again] if again else [])]
        return self._pipeline.issue(ClusterOperation(self._pipeline, phases, finished, reading))

    def _started(self, part: Inside, site: Site, phase: Phase) -> Sequence[Handle]:
        part._site = site
        handles = phase()
        for handle in handles:
            handle.result = _EMPTY
        return handles

    def _cross(self, call: Call, site: Site, number: int, cross: Callable[[Across], Steps]) -> Handle:
        """Post what crosses the network first, and put the rest on the column's lane."""
        self._flat._site = site
        header = self._flat._header(call) if self.options.check else None

        def steps() -> Steps:
            try:
                agreed = iter(()) if header is None else self._agree(header)
                crossed = cross(Across(self._column, _tag(call, number)))
                first = [next(agreed, None), next(crossed, None)]
                for link, rest in zip(first, (agreed, crossed), strict=True):
                    if link is not None:
                        yield link
                        yield from rest
            except (CommError, LinkBroken):
                raise
            except RuntimeError as error:  # no peer's fault
                raise CommError(f"{type(error).__name__}: {error}") from error

        def watch(attempt: Callable[[float], bool]) -> None:
            def attempt_and_move(seconds: float) -> bool:
                deadline = time.monotonic() + seconds
                while not attempt(0):
                    left = deadline - time.monotonic()
                    if attempt(min(left, MOVE_EVERY) if move_everything() > 1 else left):
                        break
                    if time.monotonic() >= deadline:
                        return False
                return True

            with self._flat._breaking():
                watch = self._flat._watchdog.watch
                watch(attempt_and_move, self._column.ranks, self._column.waiting_for, stance)

        def stance() -> Stance | None:
            # With headers, every host's ranks must all have come before anybody is through.
            text = f"{call.text} at {site_text(site)}"
            return self._flat.stance(COLLECTIVE, number, text) if header is not None else None

        message = Message(steps(), watch, lambda: None)
        message.result = _EMPTY
        message.start()
        self._lane.add(message)
        return message

    def _agree(self, header: Tensor) -> Steps:
        """The ranks of this column make the same call, or all of them get an error."""
        headers = [header if h == self._mine else torch.empty_like(header) for h in range(self._hosts)]
        yield from Across(self._column, HEADER_TAG).swap([header] * self._hosts, headers)
        self._column.wire.met = True
        if not all(torch.equal(header[:FINGERPRINT_BYTES], other[:FINGERPRINT_BYTES]) for other in headers):
            self._flat._compare(list(zip(self._column.ranks, headers, strict=True)))

    def _begin(self, call: Call, payload: int) -> Callable[[], None]:
        self._flat._number, self._flat._site = self._number, self._site
        with self._pipeline.failing():
            done = self._flat._begin(call, 0)
        self.counters.add(call.operation, payload, HEADER_BYTES * (self._hosts - 1) if self.options.check else 0)
        return done

    def _message(self, call: Call, tensor: Tensor, peer: int, payload: int) -> Handle:
        self._trouble.check()
        part: Communicator = self._flat
        if peer // self._locals == self._mine:
            part, peer, payload = self._inside, peer % self._locals, 0
        part._site = self._site
        self.counters.add(call.operation, payload, 0)
        with self._pipeline.failing():
            start = part._send if call.operation == "send" else part._recv
            return ToldMessage(start(call, tensor, peer), self._pipeline)


def _leave(pid: int, lane: Lane, column: Wire) -> None:
    """Let go of the column. The parts of the communicator do the same for themselves, and say goodbye."""
    if os.getpid() == pid:
        close_lanes([lane], 0.0 if column.faulty else LINGER, column.break_off, COME_BACK)
        column.close()


def _tag(call: Call, number: int) -> int:
    """A tag for the messages of one call, which no other has that is under way, and no other call of that number."""
    return TAGS * (1 + call.fingerprint % FINGERPRINTS * NUMBERS + number % NUMBERS)


def _undivided(op: str) -> str:
    """What is done inside a host: a mean is divided at the end only."""
    return "sum" if op == "mean" else op


def _each(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    return enumerate(rows.unbind())


def _cut(tensor: Tensor) -> list[Tensor]:
    return list(tensor.view(tensor.numel(), 1))
