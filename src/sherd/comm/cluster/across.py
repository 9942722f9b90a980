"""How slices cross the network: messages between the ranks of a column, one after another on a thread of their own.

Messages to single peers and not the backend's collectives: what arrives goes straight to its place, nothing is copied
for the rank itself, and a connection that breaks says to whom. The generators here run on the column's lane, so that an
exchange goes on while the rank computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sherd.comm.c10d.slices import EXCHANGE_BYTES, as_bytes
from sherd.comm.c10d.wire import Wire
from sherd.comm.codec import Codec, decoded, encode
from sherd.comm.faults import LinkBroken
from sherd.comm.summation import SummationTree, combine


class Link:
    """A message under way to or from rank `peer`."""

    def __init__(self, start: Callable[[], dist.Work], peer: int, waited_for: set[int]) -> None:
        self._peer = peer
        self._waited_for = waited_for
        with self._known():
            self._work = start()

    def wait(self) -> None:
        self._waited_for.add(self._peer)
        with self._known():
            self._work.wait()
        self._waited_for.clear()

    @contextmanager
    def _known(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LinkBroken(str(error), self._peer) from error


Steps = Generator[Link, None, None]


class Across:
    """The column of one rank. `ranks` are its members' numbers in the world, one per host."""

    def __init__(self, wire: Wire, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.hosts = len(ranks)
        self.mine = wire.rank
        self._wire = wire
        self._others = [h for h in range(self.hosts) if h != self.mine]
        self._tree = SummationTree(self.hosts, 1)  # each part is the sum of a group already
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._waited_for: set[int] = set()

    def waiting_for(self) -> list[int]:
        """The rank whose message the lane waits for."""
        return list(self._waited_for)

    def swap(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Steps:
        """Give host h `give[h]` and take `take[h]` from it, for all other hosts."""
        yield from self._start(give, take)

    def reduce(self, sums: Tensor, target: Tensor, op: str, count: int) -> Steps:
        """Row h of `sums` is this host's part of the slice of host h: reduce all hosts' parts of this one's slice."""
        numel = target.numel()
        width = max(EXCHANGE_BYTES // (len(self._others) * sums.element_size()), 1)
        arrived = self._room(2 if numel > width else 1, min(width, numel), sums.dtype)
        under_way: deque[tuple[int, list[Tensor], list[Link]]] = deque()
        for index, start in enumerate(range(0, numel, width)):
            stop = min(start + width, numel)
            rows = [row[: stop - start] for row in arrived[index % 2]]
            links = self._start([row[start:stop] for row in sums], rows, index % 2)
            under_way.append((start, rows, links))
            if len(under_way) == 2:
                yield from self._add(*under_way.popleft(), sums, target, op, count)
        for piece in under_way:
            yield from self._add(*piece, sums, target, op, count)

    def exchange_and_reduce(self, part: Tensor, target: Tensor, op: str, count: int) -> Steps:
        """Every host's `part`, whole, reduced here."""
        rows = [part if h == self.mine else torch.empty_like(part) for h in range(self.hosts)]
        yield from self.swap([part] * self.hosts, rows)
        combine(self._tree, rows, target, op, count)

    def gather(self, source: Tensor, places: Sequence[Tensor], codec: Codec | None) -> Steps:
        """Every host's `source`, each into its place."""
        if codec is None and source.dtype == places[0].dtype:
            if places[self.mine].data_ptr() != source.data_ptr():
                places[self.mine].copy_(source)
            yield from self.swap([source] * self.hosts, places)
            return
        wire = as_bytes(source)
        if codec is not None:
            wire = torch.empty(codec.wire_bytes(source.numel()), dtype=torch.uint8)
            encode(codec, source, wire)
        rows = [wire if h == self.mine else torch.empty_like(wire) for h in range(self.hosts)]
        yield from self.swap([wire] * self.hosts, rows)
        for place, row in zip(places, rows, strict=True):
            # As on every transport, what arrives has the dtype of what was given before it is cast to the output's.
            place.copy_(decoded(codec, row, source.numel(), source.dtype) if codec else row.view(source.dtype))

    def spread(self, tensor: Tensor, root: int) -> Steps:
        """Overwrite `tensor` with that of host `root`."""
        nothing = tensor[:0]
        give = [tensor if self.mine == root else nothing] * self.hosts
        yield from self.swap(give, [tensor if h == root else nothing for h in range(self.hosts)])

    # ---------------------------------------------------------------- parts

    def _start(self, give: Sequence[Tensor], take: Sequence[Tensor], tag: int = 0) -> list[Link]:
        def receive(h: int) -> dist.Work:
            return self._wire.recv(as_bytes(take[h]), h, tag)

        def send(h: int) -> dist.Work:
            return self._wire.send(as_bytes(give[h]), h, tag)

        received = [h for h in self._others if take[h].numel()]
        sent = [h for h in self._others if give[h].numel()]
        links = [Link(partial(receive, h), self.ranks[h], self._waited_for) for h in received]
        return links + [Link(partial(send, h), self.ranks[h], self._waited_for) for h in sent]

    def _add(
        self, start: int, rows: list[Tensor], links: list[Link], sums: Tensor, target: Tensor, op: str, count: int
    ) -> Steps:
        yield from links
        stop = start + rows[self.mine].numel()
        parts = [sums[h, start:stop] if h == self.mine else row for h, row in enumerate(rows)]
        combine(self._tree, parts, target[start:stop], op, count)

    def _room(self, pieces: int, width: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """A row for each host and piece. They are kept: touching new pages costs as much as sending what they hold."""
        nbytes = -(-max(width, 1) * dtype.itemsize // 64) * 64
        needed = pieces * self.hosts * nbytes
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        rows = self._scratch[:needed].view(dtype).view(pieces, self.hosts, -1)[:, :, :width]
        return [list(piece) for piece in rows]
