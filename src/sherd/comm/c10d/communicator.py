"""The operations of the c10d transport.

Data moves as bytes with the backend's all-to-all, all-gather and broadcast; sums are taken here, in the order of the
tree. On gloo that is also faster than its own reduce-scatter, which is an all-reduce and sends twice what is needed.
With `order="transport"` the backend reduces in whatever order it likes.

Before each operation the ranks exchange a small fingerprint, because backends answer calls that do not match with
garbage, a hang or a crash. `check=False` spares that message.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from sherd.comm import faults
from sherd.comm.base import Communicator
from sherd.comm.c10d.lanes import Lane, Message
from sherd.comm.c10d.slices import Slices, Steps, as_bytes
from sherd.comm.c10d.watchdog import MOVE_EVERY, Watchdog
from sherd.comm.c10d.wire import Wire, over_group
from sherd.comm.calls import Call, call_site, site_text
from sherd.comm.codec import Codec, wire_bytes
from sherd.comm.handle import Handle
from sherd.comm.host.peers import Peers
from sherd.comm.progress import move_everything, take_part
from sherd.comm.solo import SoloCommunicator
from sherd.comm.summation import cut_for, one_phase
from sherd.config import CommOptions
from sherd.errors import CodecFailed, CommClosed, CommError, Diverged, PeerLost, TimedOut

_HEADER = struct.Struct("<Q504s")  # fingerprint, call and site
HEADER_BYTES = _HEADER.size
_KINDS = {Diverged: "diverged", PeerLost: "lost", TimedOut: "late"}


def backend_limit(options: CommOptions) -> timedelta:
    """The backend's own timeout: after ours, because ours names the rank that is missing."""
    return timedelta(seconds=2 * options.timeout)


class C10dHandle(Handle):
    """An operation as a generator that yields each piece of the backend's work it needs completed before it goes on."""

    __slots__ = ("_breaking", "_finished", "_steps", "_wait", "_work")

    def __init__(
        self,
        steps: Steps,
        wait: Callable[[dist.Work], None],
        breaking: Callable[[], AbstractContextManager[None]],
        finished: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._wait = wait
        self._breaking = breaking
        self._finished = finished
        self.result = None
        with breaking():
            self._work: dist.Work | None = next(steps, None)

    def complete(self) -> None:
        """Go through all of it."""
        while self._work is not None:
            self._go_on()

    def wait(self) -> Tensor:
        self.complete()
        self._finished()
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        while self._work is not None and self._work.is_completed():
            self._go_on()
        return self._work is None

    def _go_on(self) -> None:
        with self._breaking():
            work = self._work
            assert work is not None
            self._wait(work)
            if self._work is work:  # while it waited, it may have been moved on
                self._work = next(self._steps, None)
        if self._work is None:
            self._breaking = nullcontext  # no more of the communicator, which may hold this one


class C10dCommunicator(Communicator):
    """Ranks of a process group. Takes a group for itself: nobody else should use `group` meanwhile."""

    transport = "c10d"

    def __init__(
        self,
        group: dist.ProcessGroup | Wire,
        options: CommOptions | None = None,
        names: Sequence[str] | None = None,
        peers: Peers | None = None,
        ranks_per_host: int | None = None,
    ) -> None:
        wire = group if isinstance(group, Wire) else over_group(group)
        super().__init__(wire.rank, wire.world, options or CommOptions())
        self.names = list(names or [f"rank {r}" for r in wire.world_ranks])
        self._wire = wire
        self._ranks_per_host = ranks_per_host
        self._number = 0
        self._alone = SoloCommunicator(self.options)
        self._broken: str | None = None
        self._in_exchanges: C10dHandle | None = None
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._slices = Slices(wire, self.tree)
        self._peers = peers
        self._device = wire.device
        self._watchdog = Watchdog(PrefixStore("sherd", wire.store), self.rank, self.names, peers, self.options)
        take_part(self)
        # Called by close(), or when nobody holds this communicator any more, or at the end of the process.
        self._leave = weakref.finalize(self, self._watchdog.close)

    # ---------------------------------------------------------------- groups and life

    @property
    def host(self) -> Communicator:
        return self._alone

    @property
    def ranks_per_host(self) -> int | None:
        return self._ranks_per_host

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_group(ranks)
        self._site = call_site()
        self._issue(Call("subgroup", f"subgroup({list(ranks)})"), 0, _no_steps).complete()
        if self.rank not in ranks or len(ranks) == 1:
            return SoloCommunicator(self.options) if self.rank in ranks else None
        wire = self._wire.subgroup(ranks, backend_limit(self.options))
        options = self.options.replace(group=min(self.tree.group, len(ranks)))
        peers = self._peers.renumbered({r: i for i, r in enumerate(ranks)}) if self._peers else None
        return C10dCommunicator(wire, options, [self.names[r] for r in ranks], peers)

    def use_here(self) -> None:
        take_part(self)

    def fail(self, error: CommError) -> None:
        """Give up because of what happened elsewhere, and tell the other ranks."""
        if self._broken is None:
            self._broken = str(error)
            self._watchdog.report(_KINDS.get(type(error), "failed"), error)

    def _close(self, error: BaseException | None) -> None:
        if self._broken is None:
            self._broken = "it was closed"
            if error is not None:
                self._watchdog.report("failed", CommError(f"{type(error).__name__}: {error}"))
        self._lanes.clear()
        self._leave()

    def move_all(self) -> int:
        """Move on what takes several exchanges, without waiting; the number of operations that need it."""
        return 0 if self._in_exchanges is None or self._in_exchanges.done() else 1

    # ---------------------------------------------------------------- operations

    def _reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        cut = target.numel()
        self._put_own(source, own)
        payload = (self.world - 1) * wire_bytes(cut, source, codec)
        if self.options.order == "transport" and codec is None:
            return self._issue(call, payload, lambda: self._slices.backend_reduce_scatter(source, target, op))
        exchanges = 2 if self._slices.goes_in_pieces(source, cut, codec) else 1
        return self._issue(call, payload, lambda: self._slices.reduce(source, target, cut, op, codec), exchanges)

    def _all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        payload = (self.world - 1) * wire_bytes(source.numel(), source, codec)
        return self._issue(call, payload, lambda: self._slices.gather(source, target, codec))

    def _all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, peers = source.numel(), self.world - 1
        if self.options.order == "transport" and codec is None:
            payload = 2 * peers * wire_bytes(numel, source) // self.world
            return self._issue(call, payload, lambda: self._slices.backend_all_reduce(source, target, op))
        if one_phase(numel * source.element_size(), codec):
            payload = peers * wire_bytes(numel, source)
            return self._issue(call, payload, lambda: self._slices.gather_and_reduce(source, target, op))
        cut = cut_for(numel, self.world, codec)
        payload = peers * (wire_bytes(cut, source, codec) + wire_bytes(cut, target, codec))
        return self._issue(call, payload, lambda: self._slices.reduce_and_gather(source, target, cut, op, codec), 2)

    def _broadcast(self, call: Call, target: Tensor, root: int) -> Handle:
        def steps() -> Steps:
            yield self._wire.broadcast(as_bytes(target), root)

        payload = (self.world - 1) * wire_bytes(target.numel(), target) if self.rank == root else 0
        return self._issue(call, payload, steps)

    def _all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        def steps() -> Steps:
            yield self._slices.all_to_all(target, source)

        return self._issue(call, (self.world - 1) * wire_bytes(source.numel() // self.world, source), steps)

    def _barrier(self, call: Call) -> Handle:
        def steps() -> Steps:
            token = torch.zeros(self.world + 1, dtype=torch.uint8, device=self._device)
            yield self._slices.all_gather(token[1:], token[:1])

        handle = self._issue(call, 0, steps)
        handle.result = torch.empty(0)
        return handle

    def _send(self, call: Call, source: Tensor, to: int) -> Handle:
        header = self._header(call)

        def steps() -> Steps:
            if self.options.check:
                yield self._wire.send(header, to)
            if source.numel():
                yield self._wire.send(as_bytes(source), to)

        return self._message(call, wire_bytes(source.numel(), source), to, steps)

    def _recv(self, call: Call, target: Tensor, source: int) -> Handle:
        header = self._header(call)

        def steps() -> Steps:
            if self.options.check:
                sent = torch.empty_like(header)
                yield self._wire.recv(sent, source)
                self._compare([(self.rank, header), (source, sent)])
            if target.numel():
                yield self._wire.recv(as_bytes(target), source)

        return self._message(call, 0, source, steps)

    # ---------------------------------------------------------------- checking and waiting

    def _issue(self, call: Call, payload: int, steps: Callable[[], Steps], exchanges: int = 1) -> C10dHandle:
        """Start an operation. One that takes several exchanges must be through before the next is started: ranks that
        wait in different orders would exchange the wrong ones."""
        self._check_usable()
        if self._in_exchanges is not None:
            self._in_exchanges.complete()
            self._in_exchanges = None
        self._number += 1
        finished = self._begin(call, payload)
        self._agree(call)
        handle = C10dHandle(steps(), self._watchdog.wait, self._breaking, finished)
        if exchanges > 1:
            self._in_exchanges = handle
        return handle

    def _message(self, call: Call, payload: int, peer: int, steps: Callable[[], Steps]) -> Handle:
        def watch(attempt: Callable[[float], bool]) -> None:
            def attempt_and_move(seconds: float) -> bool:
                # The peer may be waiting for this rank's part of something else before it sends.
                return attempt(MOVE_EVERY if move_everything() else seconds)

            with self._breaking():
                self._watchdog.watch(attempt_and_move, [peer])

        lane = (call.operation, peer)
        self._check_usable()
        finished = self._begin(call, payload)
        if lane not in self._lanes:
            self._lanes[lane] = Lane(f"sherd-{call.operation}-{peer}")
        message = Message(steps(), watch, finished)
        self._lanes[lane].add(message)
        return message

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise CommClosed(f"this communicator cannot be used any more: {self._broken}")

    def _begin(self, call: Call, payload: int) -> Callable[[], None]:
        self.counters.add(call.operation, payload, HEADER_BYTES * (self.world - 1) if self.options.check else 0)
        with self._breaking():
            deed = self._watchdog.enter(self._number, f"{call.text} at {site_text(self._site)}")
        return partial(self._watchdog.finish, deed)

    def _agree(self, call: Call) -> None:
        """All ranks make this call, or all of them get an error."""
        if not self.options.check:
            return
        header = self._header(call)
        headers = torch.empty(self.world * header.numel(), dtype=torch.uint8, device=self._device)
        with self._breaking():
            self._watchdog.wait(self._wire.all_gather(headers, header))
        self._compare(list(enumerate(headers.view(self.world, -1))))

    def _header(self, call: Call) -> Tensor:
        text = f"{call.text} at {site_text(self._site)}".encode()[:503]
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

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What goes wrong between ranks leaves them in different places: the communicator is of no more use."""
        try:
            yield
        except CodecFailed as error:
            self._broken = str(error)
            self._watchdog.report("failed", error)
            raise
        except CommError as error:
            self._broken = str(error)
            raise
        except RuntimeError as error:
            fault = self._watchdog.explain(error, range(self.world))
            self._broken = str(fault)
            raise fault from error
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._watchdog.report("failed", CommError(self._broken))
            raise


def _no_steps() -> Steps:
    yield from ()
