"""How slices move over a process group: generators that yield the backend's work that has to complete next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from sherd.comm.c10d.operations import Steps
from sherd.comm.c10d.wire import Wire
from sherd.comm.codec import Codec, decoded, encode, encoded
from sherd.comm.summation import combine
from sherd.layout.tree import SummationTree

Pair = tuple[Tensor, Tensor]

# A large exchange goes in pieces of a few MB, each sent while the previous one is added: memory is bounded. Of 1 to
# 32 MB, 4 and 8 were the fastest on two ranks.
EXCHANGE_BYTES = 8 << 20

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}

# What gloo gets right, found by trying all. For the rest it has no kernel, which breaks the group, or adds the bytes of
# bools.
_FLOATS = ("sum", "mean", "max", "min", "product")
_WHOLE = ("sum", "max", "min", "product", "and", "or", "xor")
_BACKEND_REDUCES = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), _FLOATS),
    **dict.fromkeys((torch.int64, torch.int32, torch.int8, torch.uint8), _WHOLE),
    **dict.fromkeys((torch.complex64, torch.complex128), ("sum", "mean")),
}


class Slices:
    """Moves and reduces slices between the ranks of a group. A tensor is cut into one slice of `cut` elements per rank;
    the last slices may be shorter."""

    def __init__(self, wire: Wire, tree: SummationTree) -> None:
        self._wire = wire
        self._tree = tree
        self._rank, self._world = wire.rank, wire.world
        self._buffers: list[Tensor] = []

    def goes_in_pieces(self, source: Tensor, cut: int, codec: Codec | None) -> bool:
        """Whether `reduce` takes several exchanges."""
        whole = source.numel() == self._world * cut and source.numel() * source.element_size() <= EXCHANGE_BYTES
        return codec is None and not whole

    def reduce(self, source: Tensor, target: Tensor, cut: int, op: str, codec: Codec | None) -> Steps:
        """Reduce this rank's slice of every rank's `source` into `target`."""
        if codec is not None:
            yield from self._reduce_encoded(_padded(source, self._world * cut), target, op, codec)
        elif self.goes_in_pieces(source, cut, codec):
            yield from self._reduce_in_pieces(source, target, cut, op)
        else:
            received = torch.empty_like(source)
            yield self.all_to_all(received, source)
            combine(self._tree, received.view(self._world, cut).unbind(), target, op)

    def goes_to_root_in_pieces(self, source: Tensor) -> bool:
        """Whether `reduce_to` takes several exchanges."""
        return source.numel() > self._width_to_root(source)

    def reduce_to(self, source: Tensor, target: Tensor, root: int, op: str) -> Steps:
        """Reduce every rank's `source` into `target`, on rank `root`."""
        width = self._width_to_root(source)
        others = [r for r in range(self._world) if r != self._rank] if self._rank == root else []
        under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for start in range(0, source.numel(), width):
            piece = source[start : start + width]
            rows = torch.empty(len(others), piece.numel(), dtype=source.dtype, device=source.device)
            given, nbytes = piece[: 0 if others else None], piece.numel() * piece.element_size()
            receives = [nbytes if r in others else 0 for r in range(self._world)]
            sends = [nbytes if not others and r == root else 0 for r in range(self._world)]
            work = self._wire.all_to_all(as_bytes(rows.view(-1)), as_bytes(given), receives, sends)
            parts = list(rows)
            parts.insert(self._rank, piece)
            under_way.append((work, target[start : start + width], parts))
            if len(under_way) == 2:
                yield from self._reduce_parts(*under_way.pop(0), op)
        for each in under_way:
            yield from self._reduce_parts(*each, op)

    def _reduce_parts(self, work: dist.Work, target: Tensor, parts: list[Tensor], op: str) -> Steps:
        yield work
        if len(parts) == self._world:
            combine(self._tree, parts, target, op)

    def _width_to_root(self, source: Tensor) -> int:
        """Elements that each rank sends to the root at a time."""
        return max(EXCHANGE_BYTES // (max(self._world - 1, 1) * source.element_size()), 1)

    def gather(self, source: Tensor, target: Tensor, codec: Codec | None) -> Steps:
        """Every rank's `source`, in rank order."""
        if codec is None and source.dtype == target.dtype:
            yield self.all_gather(target, source)
            return
        wire = encoded(codec, source)
        arrived = torch.empty(self._world, wire.numel(), dtype=torch.uint8, device=source.device)
        yield self.all_gather(arrived.view(-1), wire)
        for place, row in zip(target.view(self._world, -1), arrived, strict=True):
            # As on every transport, data arrives in the dtype of the input and is then cast to that of the output.
            place.copy_(decoded(codec, row, source.numel(), source.dtype))

    def gather_and_reduce(self, source: Tensor, target: Tensor, op: str) -> Steps:
        """Every rank's `source`, reduced here."""
        everything = torch.empty(self._world, source.numel(), dtype=source.dtype, device=source.device)
        yield from self.gather(source, everything.view(-1), None)
        combine(self._tree, everything.unbind(), target, op)

    def reduce_and_gather(self, source: Tensor, target: Tensor, cut: int, op: str, codec: Codec | None) -> Steps:
        """Each rank reduces its slice, then all of them are gathered."""
        mine = target[self._rank * cut : (self._rank + 1) * cut]
        yield from self.reduce(source, mine, cut, op, codec)
        if codec is not None:
            whole = torch.empty(self._world * cut, dtype=target.dtype, device=target.device)
            yield from self.gather(_padded(mine, cut), whole, codec)
            target.copy_(whole[: target.numel()])
        elif target.numel() == self._world * cut:
            yield from self.gather(mine, target, None)
        else:
            yield from self._gather_in_pieces(mine, target, cut)

    # ---------------------------------------------------------------- in the backend's own order

    def backend_reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Whether the backend can do this reduction."""
        return op in _BACKEND_REDUCES.get(dtype, ())

    def backend_reduce_scatter(self, source: Tensor, target: Tensor, op: str) -> Steps:
        reduced = target if target.dtype == source.dtype else torch.empty_like(source[: target.numel()])
        yield self._wire.reduce_scatter(reduced, source, _REDUCE[op])
        if reduced is not target:
            target.copy_(reduced)

    def backend_all_reduce(self, source: Tensor, target: Tensor, op: str) -> Steps:
        reduced = target if target.dtype == source.dtype else torch.empty_like(source)
        if reduced.data_ptr() != source.data_ptr():
            reduced.copy_(source)
        yield self._wire.all_reduce(reduced, _REDUCE[op])
        if reduced is not target:
            target.copy_(reduced)

    # ---------------------------------------------------------------- parts

    def _reduce_encoded(self, source: Tensor, target: Tensor, op: str, codec: Codec) -> Steps:
        cut = source.numel() // self._world
        wire = torch.empty(self._world, codec.wire_bytes(cut), dtype=torch.uint8, device=source.device)
        for row, piece in zip(wire, source.view(self._world, cut), strict=True):
            encode(codec, piece, row)
        arrived = torch.empty_like(wire)
        yield self.all_to_all(arrived.view(-1), wire.view(-1))
        parts = [decoded(codec, row, cut, source.dtype)[: target.numel()] for row in arrived]
        combine(self._tree, parts, target, op)

    def _reduce_in_pieces(self, source: Tensor, target: Tensor, cut: int, op: str) -> Steps:
        with self._scratch(source) as pairs:
            width = pairs[0][0].numel() // (self._world - 1)
            under_way = []
            for index, start in enumerate(range(0, cut, width)):
                work, rows = self._exchange_piece(source, cut, start, min(start + width, cut), pairs[index % 2])
                under_way.append((work, start, rows))
                if len(under_way) == len(pairs):
                    yield from self._reduce_piece(*under_way.pop(0), source, target, cut, op)
            for piece in under_way:
                yield from self._reduce_piece(*piece, source, target, cut, op)

    def _exchange_piece(
        self, source: Tensor, cut: int, start: int, stop: int, pair: Pair
    ) -> tuple[dist.Work, list[Tensor]]:
        """Exchange elements [start, stop) of every slice with the others; the rows that will have arrived from them."""
        others = [r for r in range(self._world) if r != self._rank]
        send, receive = (buffer[: len(others) * (stop - start)].view(len(others), -1) for buffer in pair)
        for r, row in zip(others, send, strict=True):
            piece = source[r * cut + start : min(r * cut + stop, source.numel())]
            row[: piece.numel()].copy_(piece)
        return self.exchange_with_others(receive.view(-1), send.view(-1)), list(receive)

    def _reduce_piece(
        self, work: dist.Work, start: int, rows: list[Tensor], source: Tensor, target: Tensor, cut: int, op: str
    ) -> Steps:
        yield work
        place = target[start : start + rows[0].numel()]
        parts = [row[: place.numel()] for row in rows]
        mine = self._rank * cut + start
        parts.insert(self._rank, source[mine : mine + place.numel()])
        combine(self._tree, parts, place, op)

    def _gather_in_pieces(self, mine: Tensor, target: Tensor, cut: int) -> Steps:
        with self._scratch(target) as pairs:
            send, receive = pairs[0]
            width = send.numel() // self._world
            for start in range(0, cut, width):
                given = send[: min(width, cut - start)]
                piece = mine[start : start + given.numel()]
                given[: piece.numel()].copy_(piece)
                arrived = receive[: self._world * given.numel()]
                yield self.all_gather(arrived, given)
                for r, part in enumerate(arrived.view(self._world, -1)):
                    stop = min(r * cut + start + given.numel(), target.numel())
                    place = target[min(r * cut + start, stop) : stop]
                    place.copy_(part[: place.numel()])

    @contextmanager
    def _scratch(self, like: Tensor) -> Iterator[tuple[Pair, Pair]]:
        """Two pairs of buffers, which are reused: touching new pages costs as much as sending what they hold."""
        whole = self._buffers.pop() if self._buffers else None
        if whole is None or whole.device != like.device:
            whole = torch.empty(4 * EXCHANGE_BYTES, dtype=torch.uint8, device=like.device)
        a, b, c, d = whole.view(like.dtype).chunk(4)
        yield (a, b), (c, d)
        self._buffers.append(whole)

    def all_to_all(self, output: Tensor, input: Tensor) -> dist.Work:
        return self._wire.all_to_all(as_bytes(output), as_bytes(input))

    def exchange_with_others(self, output: Tensor, input: Tensor) -> dist.Work:
        """An all-to-all of equal parts that leaves out the part a rank would send to itself."""
        part = input.numel() * input.element_size() // (self._world - 1)
        splits = [0 if r == self._rank else part for r in range(self._world)]
        return self._wire.all_to_all(as_bytes(output), as_bytes(input), splits, splits)

    def all_gather(self, output: Tensor, input: Tensor) -> dist.Work:
        return self._wire.all_gather(as_bytes(output), as_bytes(input))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _padded(source: Tensor, numel: int) -> Tensor:
    if source.numel() == numel:
        return source
    padded = torch.zeros(numel, dtype=source.dtype, device=source.device)
    padded[: source.numel()] = source
    return padded
