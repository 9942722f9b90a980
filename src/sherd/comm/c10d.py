"""The c10d transport: over any process group of torch.distributed.

Data moves as bytes with the backend's all-to-all, all-gather and broadcast; sums are taken here, in the order of the
tree. On gloo that is also faster than its own reduce-scatter, which is an all-reduce and sends twice what is needed.
With `order="transport"` the backend reduces in whatever order it likes.

Before each operation the ranks exchange a small fingerprint, because backends answer calls that do not match with
garbage, a hang or a crash. `check=False` spares that message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from sherd.comm import faults
from sherd.comm.base import Communicator
from sherd.comm.calls import Call, call_site, site_text
from sherd.comm.codec import Codec, decoded
from sherd.comm.handle import Handle
from sherd.comm.host.peers import Peers
from sherd.comm.summation import combine, cut_for, one_phase
from sherd.comm.watchdog import Watchdog
from sherd.config import CommOptions
from sherd.errors import CommClosed, CommError

_HEADER = struct.Struct("<Q504s")  # fingerprint, call and site
_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


Steps = Generator[dist.Work | None, None, None]
SliceSteps = Generator[dist.Work | None, None, Sequence[Tensor]]


class C10dHandle(Handle):
    """An operation as a generator that yields each piece of the backend's work it needs completed before it goes on."""

    __slots__ = ("_complete", "_finished", "_steps", "_work")

    def __init__(self, steps: Steps, complete: Callable[[dist.Work], None], finished: Callable[[], None]) -> None:
        self._complete = complete
        self._finished = finished
        self._steps = steps
        self._work: dist.Work | None = next(steps, None)
        self.result = None

    def wait(self) -> Tensor:
        while self._work is not None:
            self._complete(self._work)
            self._work = next(self._steps, None)
        self._finished()
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        while self._work is not None and self._work.is_completed():
            self._complete(self._work)
            self._work = next(self._steps, None)
        return self._work is None


class C10dCommunicator(Communicator):
    """Ranks of a process group. Takes a group for itself: nobody else should use `group` meanwhile."""

    transport = "c10d"

    def __init__(
        self,
        group: dist.ProcessGroup,
        options: CommOptions | None = None,
        names: Sequence[str] | None = None,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), options or CommOptions())
        self.names = list(names or [f"rank {r}" for r in dist.get_process_group_ranks(group)])
        self._group = group
        self._number = 0
        self._broken: str | None = None
        self._peers = peers
        self._device = torch.device("cpu") if "gloo" in dist.get_backend_config(group) else torch.device("cuda")
        store = PrefixStore("sherd", dist.distributed_c10d._get_process_group_store(group))
        self._watchdog = Watchdog(store, self.rank, self.names, peers, self.options)

    # ---------------------------------------------------------------- groups and life

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_group(ranks)
        self._agree(Call("subgroup", f"subgroup({list(ranks)})"))
        if self.rank not in ranks:
            return None
        world_ranks = dist.get_process_group_ranks(self._group)
        group = dist.new_group([world_ranks[r] for r in ranks], use_local_synchronization=True)
        options = self.options.replace(group=min(self.tree.group, len(ranks)))
        peers = self._peers.renumbered({r: i for i, r in enumerate(ranks)}) if self._peers else None
        return C10dCommunicator(group, options, [self.names[r] for r in ranks], peers)

    def close(self) -> None:
        if self._broken is None:
            self._broken = "it was closed"
        self._watchdog.close()

    # ---------------------------------------------------------------- operations

    def _reduce_scatter(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        def steps() -> Steps:
            if self.options.order == "transport" and codec is None:
                reduced = target if target.dtype == source.dtype else torch.empty_like(source[: target.numel()])
                yield dist.reduce_scatter_single(reduced, source, _REDUCE[op], self._group, async_op=True)
                if reduced is not target:
                    target.copy_(reduced)
            else:
                yield from self._reduce_slices(source, target, op, codec)

        return self._issue(call, (self.world - 1) * _wire_bytes(target.numel(), source, codec), steps)

    def _all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        payload = (self.world - 1) * _wire_bytes(source.numel(), source, codec)
        return self._issue(call, payload, lambda: self._gather_slices(source, target, codec))

    def _all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, peers = source.numel(), self.world - 1
        if self.options.order == "transport" and codec is None:
            payload = 2 * peers * _wire_bytes(numel, source) // self.world
            return self._issue(call, payload, lambda: self._transport_all_reduce(source, target, op))
        if one_phase(numel * source.element_size(), codec):
            payload = peers * _wire_bytes(numel, source)
            return self._issue(call, payload, lambda: self._gather_and_reduce(source, target, op))
        cut = cut_for(numel, self.world, codec)
        payload = peers * (_wire_bytes(cut, source, codec) + _wire_bytes(cut, target, codec))
        return self._issue(call, payload, lambda: self._reduce_then_gather(source, target, cut, op, codec))

    def _broadcast(self, call: Call, target: Tensor, root: int) -> Handle:
        def steps() -> Steps:
            yield dist.broadcast(_bytes(target), group=self._group, group_src=root, async_op=True)

        payload = (self.world - 1) * _wire_bytes(target.numel(), target) if self.rank == root else 0
        return self._issue(call, payload, steps)

    def _all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        def steps() -> Steps:
            yield dist.all_to_all_single(_bytes(target), _bytes(source), group=self._group, async_op=True)

        return self._issue(call, (self.world - 1) * _wire_bytes(source.numel() // self.world, source), steps)

    def _barrier(self, call: Call) -> Handle:
        def steps() -> Steps:
            token = torch.zeros(self.world + 1, dtype=torch.uint8, device=self._device)
            yield dist.all_gather_single(token[1:], token[:1], group=self._group, async_op=True)

        handle = self._issue(call, 0, steps)
        handle.result = torch.empty(0)
        return handle

    def _send(self, call: Call, source: Tensor, to: int) -> Handle:
        def steps() -> Steps:
            works, header = [], self._header(call)
            if self.options.check:
                works.append(dist.isend(header, group=self._group, group_dst=to))
            if source.numel():
                works.append(dist.isend(_bytes(source), group=self._group, group_dst=to))
            yield from works

        return self._message(call, _wire_bytes(source.numel(), source), to, steps)

    def _recv(self, call: Call, target: Tensor, source: int) -> Handle:
        def steps() -> Steps:
            if self.options.check:
                header = self._header(call)
                sent = torch.empty_like(header)
                yield dist.irecv(sent, group=self._group, group_src=source)
                self._compare([(self.rank, header), (source, sent)])
            if target.numel():
                yield dist.irecv(_bytes(target), group=self._group, group_src=source)

        return self._message(call, 0, source, steps)

    # ---------------------------------------------------------------- their parts

    def _exchange_slices(self, source: Tensor, cut: int, codec: Codec | None) -> SliceSteps:
        """Give rank r slice r of `source`; the slices that all ranks gave this one."""
        if codec is None:
            received = torch.empty_like(source)
            yield dist.all_to_all_single(_bytes(received), _bytes(source), group=self._group, async_op=True)
            return received.view(self.world, cut).unbind()
        wire = torch.empty(self.world, codec.wire_bytes(cut), dtype=torch.uint8, device=source.device)
        for row, piece in zip(wire, source.view(self.world, cut), strict=True):
            codec.encode(piece, row)
        arrived = torch.empty_like(wire)
        yield dist.all_to_all_single(arrived.view(-1), wire.view(-1), group=self._group, async_op=True)
        return [decoded(codec, row, cut, source.dtype) for row in arrived]

    def _reduce_slices(self, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Steps:
        parts = yield from self._exchange_slices(source, target.numel(), codec)
        combine(self.tree, parts, target, op)

    def _gather_slices(self, source: Tensor, target: Tensor, codec: Codec | None) -> Steps:
        if codec is None and source.dtype == target.dtype:
            yield dist.all_gather_single(_bytes(target), _bytes(source), group=self._group, async_op=True)
            return
        wire = torch.empty(_wire_bytes(source.numel(), source, codec), dtype=torch.uint8, device=source.device)
        if codec is None:
            wire = _bytes(source)
        else:
            codec.encode(source, wire)
        arrived = torch.empty(self.world, wire.numel(), dtype=torch.uint8, device=source.device)
        yield dist.all_gather_single(arrived.view(-1), wire, group=self._group, async_op=True)
        for place, row in zip(target.view(self.world, -1), arrived, strict=True):
            # As on every transport, what arrives has the dtype of what was given before it is cast to the output's.
            place.copy_(decoded(codec, row, source.numel(), source.dtype) if codec else row.view(source.dtype))

    def _gather_and_reduce(self, source: Tensor, target: Tensor, op: str) -> Steps:
        everything = torch.empty(self.world, source.numel(), dtype=source.dtype, device=source.device)
        yield from self._gather_slices(source, everything.view(-1), None)
        combine(self.tree, everything.unbind(), target, op)

    def _reduce_then_gather(self, source: Tensor, target: Tensor, cut: int, op: str, codec: Codec | None) -> Steps:
        padded = _padded(source, self.world * cut)
        mine = torch.empty(cut, dtype=target.dtype, device=target.device)
        yield from self._reduce_slices(padded, mine, op, codec)
        mine[max(source.numel() - self.rank * cut, 0) :].zero_()  # a lossy codec has smeared something over the padding
        whole = target if target.numel() == self.world * cut else torch.empty_like(padded, dtype=target.dtype)
        yield from self._gather_slices(mine, whole, codec)
        if whole is not target:
            target.copy_(whole[: target.numel()])

    def _transport_all_reduce(self, source: Tensor, target: Tensor, op: str) -> Steps:
        reduced = target if target.dtype == source.dtype else torch.empty_like(source)
        if reduced.data_ptr() != source.data_ptr():
            reduced.copy_(source)
        yield dist.all_reduce(reduced, _REDUCE[op], self._group, async_op=True)
        if reduced is not target:
            target.copy_(reduced)

    # ---------------------------------------------------------------- checking and waiting

    def _issue(self, call: Call, payload: int, steps: Callable[[], Steps]) -> C10dHandle:
        finished = self._begin(call, payload)
        self._agree(call)
        with self._breaking():
            return C10dHandle(steps(), self._complete, finished)

    def _message(self, call: Call, payload: int, peer: int, steps: Callable[[], Steps]) -> C10dHandle:
        def complete(work: dist.Work) -> None:
            with self._breaking():
                self._watchdog.wait_for_message(work, peer)

        finished = self._begin(call, payload)
        with self._breaking():
            return C10dHandle(steps(), complete, finished)

    def _begin(self, call: Call, payload: int) -> Callable[[], None]:
        if self._broken is not None:
            raise CommClosed(f"this communicator cannot be used any more: {self._broken}")
        number = self._number = self._number + 1
        self.counters.add(call.operation, payload, _HEADER.size * (self.world - 1) if self.options.check else 0)
        self._watchdog.enter(number, f"{call.text} at {site_text(call_site())}")
        return lambda: self._watchdog.finish(number)

    def _agree(self, call: Call) -> None:
        """All ranks make this call, or all of them get an error."""
        if not self.options.check:
            return
        header = self._header(call)
        headers = torch.empty(self.world * header.numel(), dtype=torch.uint8, device=self._device)
        with self._breaking():
            work = dist.all_gather_single(headers, header, group=self._group, async_op=True)
        self._complete(work)
        self._compare(list(enumerate(headers.view(self.world, -1))))

    def _header(self, call: Call) -> Tensor:
        text = f"{call.text} at {site_text(call_site())}".encode()[:503]
        return torch.frombuffer(bytearray(_HEADER.pack(call.fingerprint, text)), dtype=torch.uint8).to(self._device)

    def _compare(self, headers: Sequence[tuple[int, Tensor]]) -> None:
        calls = [(rank, *_HEADER.unpack(bytes(header.tolist()))) for rank, header in headers]
        mine = next(fingerprint for rank, fingerprint, _ in calls if rank == self.rank)
        if all(fingerprint == mine for _, fingerprint, _ in calls):
            return
        sides = [f"{self.names[r]} called {text.rstrip(bytes(1)).decode(errors='replace')}" for r, _, text in calls]
        error = faults.diverged(self._number, sides, [rank for rank, *_ in calls])
        self._broken = str(error)
        raise self._watchdog.report("diverged", error)

    def _complete(self, work: dist.Work) -> None:
        with self._breaking():
            self._watchdog.wait(work)

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What goes wrong between ranks leaves them in different places: the communicator is of no more use."""
        try:
            yield
        except CommError as error:
            self._broken = str(error)
            raise
        except RuntimeError as error:
            fault = self._watchdog.explain(error, range(self.world))
            self._broken = str(fault)
            raise fault from error
        except BaseException as error:
            self._broken = f"it was interrupted by {type(error).__name__}"
            raise


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _padded(source: Tensor, numel: int) -> Tensor:
    if source.numel() == numel:
        return source
    padded = torch.zeros(numel, dtype=source.dtype, device=source.device)
    padded[: source.numel()] = source
    return padded


def _wire_bytes(numel: int, tensor: Tensor, codec: Codec | None = None) -> int:
    return codec.wire_bytes(numel) if codec else numel * tensor.element_size()
