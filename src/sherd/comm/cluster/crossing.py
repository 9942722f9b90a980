"""How operations cross the network: messages between the ranks of a column, waited for on a thread of their own.

First the ranks of the column compare their calls, then come the messages of the operation itself. They go to single
peers instead of through the backend's collectives: data arrives straight where it belongs, a rank copies nothing for
itself, and a broken connection names the peer. The first messages are posted when an operation is ready to cross, so
that they are queued behind those of earlier ones and the network is never idle; the rest of it runs on the column's
lane, so that an exchange goes on while the rank computes.

The messages of an operation have *tags* of their own, made of its number and its fingerprint. So two ranks that make
different calls never get each other's data, and their headers show the difference.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from sherd.comm.c10d.communicator import C10dCommunicator
from sherd.comm.c10d.operations import Lane, LaneOperation, Wait
from sherd.comm.c10d.slices import EXCHANGE_BYTES, as_bytes
from sherd.comm.c10d.wire import Wire
from sherd.comm.calls import Call, Site
from sherd.comm.codec import Codec, decoded, encoded
from sherd.comm.handle import EMPTY, Handle
from sherd.comm.summation import combine
from sherd.comm.waiting.deadlock import COLLECTIVE, Stance
from sherd.comm.waiting.faults import LinkBroken
from sherd.comm.waiting.progress import move_everything
from sherd.errors import CommError
from sherd.layout.tree import SummationTree

TAGS = 2
"""How many an operation has: the pieces of a large exchange alternate."""
HEADER_TAG = 0
FINGERPRINTS, NUMBERS = 1 << 18, 1 << 10  # how many a tag tells apart: it has 31 bits
FINGERPRINT_BYTES = 8
MOVE_EVERY = 0.001  # seconds between looks while a neighbour may need this rank for something else
KEPT_BUFFERS = 16  # two for each reduction: a host's sums, and those of the others
LARGE_ENOUGH = 1 << 16  # bytes; the allocator itself reuses smaller ones

Steps = Generator[Wait, None, None]


class BufferPool:
    """The last few buffers that a rank or its lane gave back: touching new pages costs as much as sending what they
    hold."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, not initialised."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            for index, kept in enumerate(self._kept):
                if nbytes <= kept.numel() <= 2 * nbytes:
                    return self._kept.pop(index)[:nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype)

    def give_back(self, tensor: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        if whole.numel() >= LARGE_ENOUGH:
            with self._lock:
                self._kept = [*self._kept[1 - KEPT_BUFFERS :], whole]


class Column:
    """The ranks with this one's number on every host: `ranks` are their numbers in the world, one per host. `flat`
    watches all ranks while operations cross; with `check`, calls are compared first."""

    def __init__(self, flat: C10dCommunicator, wire: Wire, ranks: Sequence[int], pool: BufferPool, check: bool) -> None:
        self.ranks = ranks
        self.hosts = len(ranks)
        self.mine = wire.rank
        self.wire = wire
        self.pool = pool
        self.others = [h for h in range(self.hosts) if h != self.mine]
        self.tree = SummationTree(self.hosts, 1)  # each part is the sum of a group already
        self.lane = Lane("sherd-across")
        self._flat = flat
        self._check = check
        self._waited_for: set[int] = set()

    def start(self, call: Call, site: Site, number: int, cross: Callable[[Across], Steps]) -> Handle:
        """Post the first messages of an operation, and put the rest of it on the lane."""
        header = self._flat.header(call, site) if self._check else None

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

            self._flat.watch(attempt_and_move, self.ranks, lambda: list(self._waited_for), stance)

        def stance() -> Stance | None:
            # With headers, nobody gets through before every rank of every host has reached this call.
            return self._flat.stance(COLLECTIVE, number, call.made_at(site)) if header is not None else None

        operation = LaneOperation(self._steps(call, number, header, cross), watch, lambda: None)
        operation.result = EMPTY
        operation.start()
        self.lane.add(operation)
        return operation

    def message(self, start: Callable[[Tensor, int, int], Wait], tensor: Tensor, h: int, tag: int) -> Wait:
        """Start to send or receive a message to or from host h. If its connection breaks, the error names the rank."""
        peer = self.ranks[h]
        try:
            wait = start(as_bytes(tensor), h, tag)
        except RuntimeError as error:
            raise LinkBroken(str(error), peer) from error

        def wait_for_peer() -> None:
            self._waited_for.add(peer)
            try:
                wait()
            except RuntimeError as error:
                raise LinkBroken(str(error), peer) from error
            self._waited_for.clear()

        return wait_for_peer

    def fail(self, error: CommError) -> None:
        """What is under way will not get through."""
        self.wire.fail()

    def _steps(self, call: Call, number: int, header: Tensor | None, cross: Callable[[Across], Steps]) -> Steps:
        try:
            agreed = iter(()) if header is None else self._agree(header)
            crossed = cross(Across(self, _tag(call, number)))
            first = [next(agreed, None), next(crossed, None)]
            for message, rest in zip(first, (agreed, crossed), strict=True):
                if message is not None:
                    yield message
                    yield from rest
        except (CommError, LinkBroken):
            raise
        except RuntimeError as error:  # no peer's fault
            raise CommError(f"{type(error).__name__}: {error}") from error

    def _agree(self, header: Tensor) -> Steps:
        """All ranks of this column make the same call, or all of them get an error."""
        headers = [header if h == self.mine else torch.empty_like(header) for h in range(self.hosts)]
        yield from Across(self, HEADER_TAG).swap([header] * self.hosts, headers)
        self.wire.met = True
        if not all(torch.equal(header[:FINGERPRINT_BYTES], other[:FINGERPRINT_BYTES]) for other in headers):
            self._flat.compare(list(zip(self.ranks, headers, strict=True)))


class Across:
    """The messages of one operation, with tags from `tag` to `tag + TAGS - 1`."""

    def __init__(self, column: Column, tag: int) -> None:
        self._column = column
        self._tag = tag
        self.hosts, self.mine = column.hosts, column.mine
        self._others, self._tree = column.others, column.tree

    def swap(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Steps:
        """Send `give[h]` to host h and receive `take[h]` from it, for all other hosts."""
        yield from self._start(give, take)

    def reduce(self, sums: Tensor | Sequence[Tensor], target: Tensor, op: str, count: int) -> Steps:
        """Row h of `sums` is this host's part of host h's slice: reduce all hosts' parts of this host's own slice. Of
        slices that are not empty, all have one size."""
        numel = max(row.numel() for row in sums)
        width = max(EXCHANGE_BYTES // (len(self._others) * sums[0].element_size()), 1)
        pieces, longest = 2 if numel > width else 1, min(width, target.numel())
        room = self._column.pool.take(pieces * len(self._others) * longest, sums[0].dtype)
        arrived = room.view(pieces, len(self._others), longest)
        under_way: deque[tuple[list[Tensor], Tensor, list[Wait]]] = deque()
        for index, start in enumerate(range(0, numel, width)):
            stop = min(start + width, numel)
            parts = [row[start:stop] for row in sums]
            rows = list(parts)
            for h, row in zip(self._others, arrived[index % 2], strict=True):
                rows[h] = row[: target.numel() and stop - start]
            messages = self._start(parts, rows, index % 2)
            under_way.append((rows, target[start:stop], messages))
            if len(under_way) == 2:
                yield from self._add(*under_way.popleft(), op, count)
        for piece in under_way:
            yield from self._add(*piece, op, count)
        self._column.pool.give_back(room)

    def exchange_and_reduce(self, part: Tensor, target: Tensor, op: str, count: int) -> Steps:
        """Every host's `part`, whole, reduced here."""
        rows = [part if h == self.mine else torch.empty_like(part) for h in range(self.hosts)]
        yield from self.swap([part] * self.hosts, rows)
        combine(self._tree, rows, target, op, count)

    def gather(self, source: Tensor, places: Sequence[Tensor], codec: Codec | None) -> Steps:
        """Every host's `source`, each into its row of `places`."""
        if codec is None and source.dtype == places[0].dtype:
            if places[self.mine].data_ptr() != source.data_ptr():
                places[self.mine].copy_(source)
            yield from self.swap([source] * self.hosts, places)
            return
        wire = encoded(codec, source)
        rows = [wire if h == self.mine else torch.empty_like(wire) for h in range(self.hosts)]
        yield from self.swap([wire] * self.hosts, rows)
        for place, row in zip(places, rows, strict=True):
            # As on every transport, data arrives in the dtype of the input and is then cast to that of the output.
            place.copy_(decoded(codec, row, source.numel(), source.dtype))

    def spread(self, tensor: Tensor, root: int) -> Steps:
        """Overwrite `tensor` with that of host `root`."""
        nothing = tensor[:0]
        give = [tensor if self.mine == root else nothing] * self.hosts
        yield from self.swap(give, [tensor if h == root else nothing for h in range(self.hosts)])

    # ---------------------------------------------------------------- parts

    def _start(self, give: Sequence[Tensor], take: Sequence[Tensor], tag: int = 0) -> list[Wait]:
        column, tag = self._column, self._tag + tag
        received = [column.message(column.wire.recv, take[h], h, tag) for h in self._others if take[h].numel()]
        return received + [column.message(column.wire.send, give[h], h, tag) for h in self._others if give[h].numel()]

    def _add(self, rows: list[Tensor], target: Tensor, messages: list[Wait], op: str, count: int) -> Steps:
        yield from messages
        if target.numel():
            combine(self._tree, rows, target, op, count)


def _tag(call: Call, number: int) -> int:
    """A tag for the messages of one call that no other call under way has, nor a different call of the same number."""
    return TAGS * (1 + call.fingerprint % FINGERPRINTS * NUMBERS + number % NUMBERS)
