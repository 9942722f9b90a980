"""The operations of the c10d transport.

Data moves as bytes with the backend's all-to-all, all-gather and broadcast; sums are taken here, in the order of the
tree. On gloo that is also faster than its own reduce-scatter, which is an all-reduce and sends twice what is needed.
With `order="transport"` the backend reduces in its own order, where it can.

Before each operation the ranks exchange a small fingerprint, because with calls that do not match, backends return
garbage, hang or crash. `check=False` saves that message.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from sherd.comm.base import Communicator
from sherd.comm.c10d.operations import C10dHandle, Lane, LaneOperation, Steps, Wait, close_lanes
from sherd.comm.c10d.slices import Slices, as_bytes
from sherd.comm.c10d.watchdog import MOVE_EVERY, Attempt, Slow, TakeStance, Watchdog
from sherd.comm.c10d.wire import COME_BACK, LINGER, Wire, over_group
from sherd.comm.calls import Call, Site, call_site
from sherd.comm.closing import opened, unusable
from sherd.comm.codec import Codec, wire_bytes
from sherd.comm.handle import EMPTY, Handle
from sherd.comm.meeting.guard import Guard
from sherd.comm.meeting.peers import Peers
from sherd.comm.solo import SoloCommunicator
from sherd.comm.summation import cut_for, one_phase
from sherd.comm.trust.seal import Seal
from sherd.comm.waiting import faults
from sherd.comm.waiting.deadlock import COLLECTIVE, Stance
from sherd.comm.waiting.progress import move_everything, take_part
from sherd.comm.waiting.side_thread import SideThread
from sherd.config import CommOptions
from sherd.errors import CodecFailed, CommError

_HEADER = struct.Struct("<Q504s")  # fingerprint, call and site
HEADER_BYTES = _HEADER.size


def backend_limit(options: CommOptions) -> timedelta:
    """For the backend's own connecting: longer than ours, which names the rank that is missing."""
    return timedelta(seconds=2 * options.timeout)


class C10dCommunicator(Communicator):
    """Ranks of a process group. Nothing else should use `group` at the same time."""

    transport = "c10d"

    def __init__(
        self,
        group: dist.ProcessGroup | Wire,
        options: CommOptions | None = None,
        names: Sequence[str] | None = None,
        peers: Peers | None = None,
        ranks_per_host: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        wire = group if isinstance(group, Wire) else over_group(group)
        super().__init__(wire.rank, wire.world, options or CommOptions())
        self.names = list(names or [f"rank {r}" for r in wire.world_ranks])
        self._wire = wire
        self._ranks_per_host = ranks_per_host
        self._number = 0
        self._alone = SoloCommunicator(self.options)
        self._broken: str | None = None
        self._untold: list[CommError] = []  # the failure, until a call of this rank has raised it
        self._in_exchanges: C10dHandle | None = None
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._messages: dict[str, dict[int, int]] = {"send": {}, "recv": {}}  # how many, by peer
        self._slices = Slices(wire, self.tree)
        self._peers = peers
        self._device = wire.device
        self.seal = wire.seal
        place, seal = PrefixStore("sherd", wire.store), (wire.seal or Seal(b"")).derived("watchdog")
        self._watchdog = Watchdog(place, seal, self.rank, self.names, peers, self.options, guard)
        take_part(self)
        # Called by close(), when nothing refers to this communicator any more, or at the end of the process.
        self._leave = weakref.finalize(self, leave, os.getpid(), self._lanes.values(), wire, self._watchdog.close)
        opened(self)

    # ---------------------------------------------------------------- groups and life

    @property
    def host(self) -> Communicator:
        return self._alone

    @property
    def ranks_per_host(self) -> int | None:
        return self._ranks_per_host

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_group(ranks)
        self.site = call_site()
        self._issue(Call("subgroup", f"subgroup({list(ranks)})"), 0, lambda: iter(())).complete()
        if self.rank not in ranks or len(ranks) == 1:
            return SoloCommunicator(self.options) if self.rank in ranks else None
        wire = self.watched(lambda: self.wire_among(ranks), ranks)
        options = self.options.replace(group=min(self.tree.group, len(ranks)))
        peers = self._peers.renumbered({r: i for i, r in enumerate(ranks)}) if self._peers else None
        return C10dCommunicator(wire, options, [self.names[r] for r in ranks], peers)

    def watched(self, work: Callable[[], Wire], ranks: Sequence[int]) -> Wire:
        """Do work that waits for `ranks` inside the backend, and watch these ranks meanwhile."""
        thread = SideThread(work, "sherd-subgroup")
        self.watch(thread.attempt, ranks)
        return thread.result()

    def use_here(self) -> None:
        take_part(self)
        self._watchdog.use_here()

    def _break(self, error: CommError, untold: bool = False) -> CommError:
        """What is under way will not get through because of `error`, which the next call raises too if it is `untold`.

        Returns it, to be raised from no variable: its traceback would hold the frame, and so itself."""
        self._untold = [type(error)(str(error), error.ranks)] if untold else []
        self._broken = str(error)
        self._wire.fail()
        return error

    def _close(self, error: BaseException | None) -> None:
        if self._broken is None:
            self._broken = "it was closed"
            if error is not None:
                self._wire.faulty = True
                self._watchdog.report(CommError(f"{type(error).__name__}: {error}"))
        self._in_exchanges = None
        self._untold.clear()
        self._leave()
        self._lanes.clear()

    def move_all(self) -> int:
        """Move on the operation that takes several exchanges, without waiting; how many such there are."""
        return 0 if self._in_exchanges is None or self._in_exchanges.done() else 1

    # ---------------------------------------------------------------- for a communicator that this one is a part of

    def wire_among(self, ranks: Sequence[int]) -> Wire:
        """A wire of their own for some of these ranks. Collective among them."""
        return self._wire.subgroup(ranks, backend_limit(self.options))

    def note_call(self, call: Call, number: int, site: Site) -> Callable[[], None]:
        """Tell the watchdog of a collective that takes another route; what is returned tells it that this is over."""
        self._number, self.site = number, site
        return self._begin(call, 0)

    def watch(
        self, attempt: Attempt, ranks: Sequence[int], slow: Slow = tuple, stance: TakeStance = lambda: None
    ) -> None:
        """`Watchdog.watch`; what it raises is the end of this communicator."""
        with self._breaking():
            self._watchdog.watch(attempt, ranks, slow, stance)

    def fail(self, error: CommError) -> None:
        """Give up because of a failure elsewhere, and tell the other ranks."""
        if self._broken is None:
            self._watchdog.report(self._break(error))

    # ---------------------------------------------------------------- operations

    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        cut = target.numel()
        self._put_own(source, own)
        payload = (self.world - 1) * wire_bytes(cut, source, codec)
        if self._backend_reduces(source, op, codec):
            return self._issue(call, payload, lambda: self._slices.backend_reduce_scatter(source, target, op))
        exchanges = 2 if self._slices.goes_in_pieces(source, cut, codec) else 1
        return self._issue(call, payload, lambda: self._slices.reduce(source, target, cut, op, codec), exchanges)

    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        payload = (self.world - 1) * wire_bytes(source.numel(), source, codec)
        return self._issue(call, payload, lambda: self._slices.gather(source, target, codec))

    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, peers = source.numel(), self.world - 1
        if self._backend_reduces(source, op, codec):
            payload = 2 * peers * wire_bytes(numel, source) // self.world
            return self._issue(call, payload, lambda: self._slices.backend_all_reduce(source, target, op))
        if one_phase(numel * source.element_size(), codec):
            payload = peers * wire_bytes(numel, source)
            return self._issue(call, payload, lambda: self._slices.gather_and_reduce(source, target, op))
        cut = cut_for(numel, self.world, codec)
        payload = peers * (wire_bytes(cut, source, codec) + wire_bytes(cut, target, codec))
        return self._issue(call, payload, lambda: self._slices.reduce_and_gather(source, target, cut, op, codec), 2)

    def _backend_reduces(self, source: Tensor, op: str, codec: Codec | None) -> bool:
        if self.options.order != "transport" or codec is not None:
            return False
        return self._slices.backend_reduces(source.dtype, op)

    def start_reduce(
        self, call: Call, source: Tensor, target: Tensor, root: int, op: str, own: Tensor | None = None
    ) -> Handle:
        payload = 0 if self.rank == root else wire_bytes(source.numel(), source)
        given = source if own is None else own
        exchanges = 2 if self._slices.goes_to_root_in_pieces(source) else 1
        return self._issue(call, payload, lambda: self._slices.reduce_to(given, target, root, op), exchanges)

    def start_broadcast(self, call: Call, target: Tensor, root: int, source: Tensor | None = None) -> Handle:
        if source is not None:
            target.copy_(source)

        def steps() -> Steps:
            yield self._wire.broadcast(as_bytes(target), root)

        payload = (self.world - 1) * wire_bytes(target.numel(), target) if self.rank == root else 0
        return self._issue(call, payload, steps)

    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        def steps() -> Steps:
            yield self._slices.all_to_all(target, source)

        return self._issue(call, (self.world - 1) * wire_bytes(source.numel() // self.world, source), steps)

    def start_barrier(self, call: Call) -> Handle:
        def steps() -> Steps:
            token = torch.zeros(self.world + 1, dtype=torch.uint8, device=self._device)
            yield self._slices.all_gather(token[1:], token[:1])

        handle = self._issue(call, 0, steps)
        handle.result = EMPTY
        return handle

    def start_send(self, call: Call, source: Tensor, to: int) -> Handle:
        header = self.header(call, self.site)

        def steps() -> Iterator[Wait]:
            if self.options.check:
                yield self._wire.send(header, to)
            if source.numel():
                yield self._wire.send(as_bytes(source), to)

        return self._message(call, wire_bytes(source.numel(), source), to, steps)

    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle:
        header = self.header(call, self.site)

        def steps() -> Iterator[Wait]:
            if self.options.check:
                sent = torch.empty_like(header)
                yield self._wire.recv(sent, source)
                self.compare([(self.rank, header), (source, sent)], aside=True)
            if target.numel():
                yield self._wire.recv(as_bytes(target), source)

        return self._message(call, 0, source, steps)

    # ---------------------------------------------------------------- checking and waiting

    def _issue(self, call: Call, payload: int, steps: Callable[[], Steps], exchanges: int = 1) -> C10dHandle:
        """Start an operation. One that takes several exchanges must be complete before the next is started: ranks that
        wait in different orders would mix them up."""
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

    def _message(self, call: Call, payload: int, peer: int, steps: Callable[[], Iterator[Wait]]) -> Handle:
        def watch(attempt: Attempt) -> None:
            def attempt_and_move(seconds: float) -> bool:
                # The peer may be waiting for this rank's part of something else before it sends.
                return attempt(MOVE_EVERY if move_everything() else seconds)

            self.watch(attempt_and_move, [peer], stance=stance)

        def stance() -> Stance | None:
            return self.stance(call.operation, count, text, peer) if self._wire.waits_for_recv else None

        lane = (call.operation, peer)
        text = call.made_at(self.site)
        self._check_usable()
        finished = self._begin(call, payload)
        counts = self._messages[call.operation]
        count = counts[peer] = counts.get(peer, 0) + 1
        if lane not in self._lanes:
            self._lanes[lane] = Lane(f"sherd-{call.operation}-{peer}")
        message = LaneOperation(steps(), watch, finished)
        self._lanes[lane].add(message)
        return message

    def stance(self, kind: str, count: int, text: str, peer: int = -1) -> Stance:
        """This rank waits in its `count`-th call of a kind; in a collective, for all ranks to reach it."""
        sends, recvs = dict(self._messages["send"]), dict(self._messages["recv"])
        return Stance(kind, peer, count, text, self._number, sends, recvs)

    def _check_usable(self) -> None:
        if self._untold:
            raise self._untold.pop()
        if self._broken is not None:
            raise unusable(self._broken)

    def _begin(self, call: Call, payload: int) -> Callable[[], None]:
        self.counters.add(call.operation, payload, HEADER_BYTES * (self.world - 1) if self.options.check else 0)
        with self._breaking():
            message = call.operation in self._messages
            entered = self._watchdog.enter(self._number, call.made_at(self.site), message)
        return partial(self._watchdog.activity.finish, entered)

    def _agree(self, call: Call) -> None:
        """All ranks make this call, or all of them get an error."""
        if not self.options.check:
            return
        header = self.header(call, self.site)
        headers = torch.empty(self.world * header.numel(), dtype=torch.uint8, device=self._device)
        text = call.made_at(self.site)
        with self._breaking():
            work = self._wire.all_gather(headers, header)
            self._watchdog.wait(work, lambda: self.stance(COLLECTIVE, self._number, text))
        self._wire.met = True
        self.compare(list(enumerate(headers.view(self.world, -1))))

    def header(self, call: Call, site: Site) -> Tensor:
        """What ranks compare of a call before they make it."""
        text = call.made_at(site).encode()[:503]
        return torch.frombuffer(bytearray(_HEADER.pack(call.fingerprint, text)), dtype=torch.uint8).to(self._device)

    def compare(self, headers: Sequence[tuple[int, Tensor]], aside: bool = False) -> None:
        """Raise unless these ranks made the same call, this one's own header among them.

        `aside`: on the thread of a message, whose rank may make other calls before it waits for that one.
        """
        calls = [(rank, *_HEADER.unpack(bytes(header.tolist()))) for rank, header in headers]
        mine = next(fingerprint for rank, fingerprint, _ in calls if rank == self.rank)
        if all(fingerprint == mine for _, fingerprint, _ in calls):
            return
        sides = [f"{self.names[r]} called {text.rstrip(bytes(1)).decode(errors='replace')}" for r, _, text in calls]
        ranks = [rank for rank, *_ in calls]
        raise self._watchdog.report(self._break(faults.diverged(self._number, sides, ranks), untold=aside))

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """A failure leaves ranks out of sync, so this communicator can no longer be used."""
        try:
            yield
        except CommError as error:
            self._break(error)
            if isinstance(error, CodecFailed):  # of which the others do not know
                self._watchdog.report(error)
            raise
        except RuntimeError as error:
            raise self._break(self._watchdog.explain(error, range(self.world))) from error
        except BaseException as error:
            self._watchdog.report(self._break(CommError(f"{type(error).__name__}: {error}")))
            raise


def leave(pid: int, lanes: Collection[Lane], wire: Wire, goodbye: Callable[[], None] = lambda: None) -> None:
    """Say goodbye and release everything of process `pid`, once the operations on the lanes have had a moment to
    complete. A forked child, such as a DataLoader worker, has nothing to release."""
    if os.getpid() == pid:
        close_lanes(list(lanes), 0.0 if wire.faulty else LINGER, wire.break_off, COME_BACK)
        goodbye()
        wire.close()
