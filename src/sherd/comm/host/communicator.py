"""The host transport's operations."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm.base import Backing, Communicator
from sherd.comm.calls import Call
from sherd.comm.closing import CLOSED, opened
from sherd.comm.codec import Codec, wire_bytes
from sherd.comm.handle import EMPTY, Handle
from sherd.comm.host.board import Board, State
from sherd.comm.host.cores import spins_pay
from sherd.comm.host.joining.link import Link
from sherd.comm.host.joining.rendezvous import meet
from sherd.comm.host.memory import PAGE, Location, SharedBlock, SharedMemory, round_up
from sherd.comm.host.operation import Headers, Operation, SteppedOperation, Steps, Stream
from sherd.comm.host.remote_reader import RemoteReader
from sherd.comm.host.scheduler import Scheduler
from sherd.comm.host.transfer import results
from sherd.comm.host.transfer.channel import Channels
from sherd.comm.host.transfer.short_paths import Finish, LentCalls, LentPlan, SmallCalls, SmallPlan
from sherd.comm.host.transfer.staging import SMALL_BYTES, SMALL_CHUNKS, Staging
from sherd.comm.host.transfer.streams import Streams
from sherd.comm.host.waiting import Waiter
from sherd.comm.meeting.peers import Peers
from sherd.comm.memo import Memo
from sherd.comm.solo import SoloCommunicator
from sherd.comm.summation import combiner, cut_for, one_phase
from sherd.comm.waiting.progress import take_part
from sherd.config import CommOptions
from sherd.errors import CommError

HEADER_BYTES = 64
MAX_PLANS = 256


@dataclass(slots=True)
class Plan:
    """What stays the same each time a call is made: bytes that it sends, and the short paths that it may take."""

    payload: int
    small: SmallPlan | None = None
    lent: LentPlan | None = None


_NO_PLAN = Plan(0)


class HostCommunicator(Communicator):
    """Ranks of one machine. Build it with `sherd.comm.connect`, or over a `Link` whose members are its ranks."""

    transport = "host"
    shares_memory = True
    trusts_memory = True

    def __init__(
        self,
        link: Link,
        options: CommOptions,
        beside: HostCommunicator | None = None,
        numbers: Sequence[int] | None = None,
        lock: threading.RLock | None = None,
        check: Callable[[], None] = lambda: None,
        crowd: int = 0,
    ) -> None:
        """`beside` is a communicator over the same link, whose shared memory and counters this one uses too. In a part
        of a larger communicator, `numbers` are the ranks as errors list them, and `lock` is that communicator's.
        `check` raises once waiting for the others is pointless, until they have a board to say so. `crowd` is how many
        ranks this host is known to have, where that is more."""
        rank, world = link.members.index(link.rank), len(link.members)
        super().__init__(rank, world, options)
        self.lock = lock or self.lock
        self.names = [card.name for card in link.cards]
        self._link = link
        self._check = check
        self._all = range(world)
        self._number = 0
        self._shared_calls = Memo[tuple[Call, Location], Call](MAX_PLANS)
        self._plans = Memo[Call, Plan](MAX_PLANS)
        self._memory: SharedMemory = beside._memory if beside else SharedMemory()
        self.counters = beside.counters if beside else self.counters
        block = self._share("board", Board.nbytes(world))
        self._board = Board(block, rank, world, self.names, numbers or self._all)
        self._peers = link.watch(options.timeout, range(world), check)
        # Not in a part of a larger communicator, whose network thread needs the interpreter.
        self._crowd = max(crowd, world)
        spin = lock is None and spins_pay(self._crowd)
        self._waiter = waiter = Waiter(self._board, self._peers, options, spin)
        self._scheduler = Scheduler(self._board, waiter, self.lock)

        def check_while_joining() -> None:
            check()
            waiter.check()

        self._check = check_while_joining
        small = self._ring("small", SMALL_BYTES, SMALL_CHUNKS)
        large = self._ring("large", options.chunk_bytes, options.chunks)
        headers = Headers(self._board, options.check)
        self._small_calls = SmallCalls(headers, small, self._scheduler)
        remote = RemoteReader([card.pid for card in link.cards], self._board, waiter) if link.reads_remote else None
        self._streams = Streams(headers, small, large, self._memory, remote)
        self._lent_calls = LentCalls(headers, self._memory, self._streams, self._scheduler)
        channels = self._share("channels", Channels.nbytes(world))
        self._channels = Channels(channels, self._board, self._memory, self._scheduler)
        self._check = self._scheduler.check
        waiter.made = weakref.WeakMethod(self._channels.made)
        # Called by close(), when nothing refers to this communicator any more, or at the end of the process.
        self._why: list[BaseException] = []
        self._leave = weakref.finalize(self, _leave, os.getpid(), self._why, self._board, self._peers, link)
        _note_the_exit()
        opened(self)

    # ---------------------------------------------------------------- shared memory, groups and life

    def shares(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in a `shared_tensor`."""
        return self._memory.find_common(tensor) is not None

    def fail(self, error: CommError) -> None:
        """Give up because of a failure outside this host, and tell its other ranks."""
        self._scheduler.fail(error)

    def shared_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._allocate("tensor", shape, dtype, 1)[0]

    def backing(self, tensor: Tensor) -> Backing | None:
        return self._memory.backing(tensor)

    def shared_buffers(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return self._allocate("buffers", shape, dtype, self.world)

    def _allocate(self, what: str, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> list[Tensor]:
        self.agree(f"shared_{what}({dtype}{list(shape)})").wait()
        self._free_what_was_dropped()
        common, numel = what == "tensor", torch.Size(shape).numel()
        stride = round_up(numel * dtype.itemsize, PAGE)
        block = self._share(what, stride * count, keep=common)
        owner = memoryview(block.memory)
        self._memory.add(block, common, owner)
        return [block.tensor(each * stride, numel, dtype, owner).view(shape) for each in range(count)]

    def _free_what_was_dropped(self) -> None:
        """Unmap shared memory in which no rank has tensors any more. All ranks call this, before they allocate: a rank
        that has dropped its own tensors may still have to read what another lends."""
        mine = self._memory.in_use()
        if mine:
            with self.counters.agreeing():
                anybody = self.all_reduce(torch.tensor(mine, dtype=torch.uint8), op="max").wait()
            self._memory.keep([bool(used) for used in anybody])

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_group(ranks)
        options = self.options.replace(group=min(self.tree.group, len(ranks) or 1))
        link = self.meet(ranks, options)
        if self.rank not in ranks or len(ranks) == 1:
            link.close()
            return SoloCommunicator(self.options) if self.rank in ranks else None
        return HostCommunicator(link, options, crowd=self._crowd)

    def meet(self, ranks: Sequence[int], options: CommOptions) -> Link:
        """A link among some of these ranks; each rank outside them gets one of its own. Collective."""
        self.agree(f"subgroup({list(ranks)})").wait()
        # Ranks outside the group take part too, each in a group of its own, because the exchange is among all ranks.
        group = "inside" if self.rank in ranks else f"outside-{self.rank}"
        world_rank = self._link.cards[self.rank].rank
        exchange = lambda _, value: self.all_gather_object(value)  # noqa: E731
        return meet(self.rank, world_rank, exchange, options, group, self._check).link

    def use_here(self) -> None:
        take_part(self._scheduler)
        self._waiter.use_here()

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            self._why.append(error)
        self._leave()  # first: others may be reading the tensors of operations under way
        self._scheduler.close()
        self._memory.forget()
        # The caller may keep this object, but not the memory.
        self._plans.clear()
        self._board = self._waiter = self._small_calls = self._lent_calls = self._streams = self._channels = CLOSED

    def _ring(self, label: str, chunk_bytes: int, chunks: int) -> Staging:
        block = self._share(label, Staging.nbytes(self.world, chunk_bytes, chunks))
        return Staging(block, self._board, chunk_bytes, chunks)

    def _share(self, label: str, nbytes: int, keep: bool = False) -> SharedBlock:
        return self._link.share(label, nbytes, self.options.timeout, self._check, keep)

    # ---------------------------------------------------------------- operations

    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        cut = target.numel()
        plan = self._plans.get(call)
        if plan is None:
            payload, finish = wire_bytes(cut, source, codec), combiner(self.tree, op, source.dtype, target.dtype)
            plan = self._plan(call, payload, source, cut, self._all, None if codec else finish)
            if codec is None:
                plan.lent = self._lent_calls.plan(call, source, cut, finish)
        if codec is not None:
            self._put_own(source, own)
            own = None

        def stream(o: SteppedOperation) -> Steps:
            return self._streams.scatter(o, source, cut, codec, results.reducing(self.tree, target, op), own=own)

        return self._start(call, plan, source, target, stream, own)

    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        cut = target.numel() // self.world
        plan = self._plans.get(call)
        if plan is None:
            plan = self._plan(call, wire_bytes(cut, source), source, cut, self._all, results.concatenate)

        def stream(o: SteppedOperation) -> Steps:
            take, room = results.spreading(target, cut), results.room_in(source, target, cut)
            return self._streams.scatter(o, source, cut, None, take, room=room)

        return self._start(call, plan, source, target, stream)

    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        cut = source.numel()
        if codec is None and self.shares(target):
            named, place = self.naming(call, target), target[self.rank * cut : (self.rank + 1) * cut]
            return self._start(named, _NO_PLAN, source, target, lambda o: self._streams.publish(o, source, place))
        plan = self._plans.get(call)
        if plan is None:
            payload = wire_bytes(cut, source, codec)
            plan = self._plan(call, payload, source, cut, self._all, None if codec else results.concatenate)

        def stream(o: SteppedOperation) -> Steps:
            take, room = results.spreading(target, cut), results.room_in(source, target, cut)
            return self._streams.gather(o, source, cut, self._all, codec, take, room)

        return self._start(call, plan, source, target, stream)

    def start_publish(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        named = self.naming(call, target)
        if named is call:
            return self.start_all_gather(call, source, target, None)
        start = self.rank * source.numel()
        if target.data_ptr() + start * target.element_size() != source.data_ptr():
            target[start : start + source.numel()].copy_(source)
        return self.start_barrier(named)

    def start_reduce(
        self, call: Call, source: Tensor, target: Tensor, root: int, op: str, own: Tensor | None = None
    ) -> Handle:
        numel, here = source.numel(), self.rank == root
        plan = self._plans.get(call)
        if plan is None:
            finish = combiner(self.tree, op, source.dtype, target.dtype) if here else results.keep_target
            plan = self._plan(call, 0, source, numel, self._all, finish)
            plan.payload = 0 if here else wire_bytes(numel, source)
            plan.lent = self._lent_calls.plan_whole(call, source, numel if here else 0, finish)

        def stream(o: SteppedOperation) -> Steps:
            if own is not None:
                source.copy_(own)  # it is not read by anybody else
            take = results.reducing(self.tree, target, op) if here else results.ignoring
            return self._streams.gather(o, source, numel, self._all, None, take)

        return self._start(call, plan, source, target, stream, own)

    def start_broadcast(self, call: Call, target: Tensor, root: int, source: Tensor | None = None) -> Handle:
        numel, receives = target.numel(), self.rank != root
        if self.shares(target):
            named, given, place = self.naming(call, target), EMPTY, EMPTY
            if not receives:
                given, place = target if source is None else source, target
            return self._start(named, _NO_PLAN, given, target, lambda o: self._streams.publish(o, given, place))
        if source is not None:
            target.copy_(source)
        plan = self._plans.get(call)
        if plan is None:
            finish = results.copy_first if receives else results.keep_target
            plan = self._plan(call, 0 if receives else wire_bytes(numel, target), target, numel, (root,), finish)

        def take(start: int, stop: int, parts: list[Tensor]) -> None:
            if receives and parts[0].data_ptr() != target[start:stop].data_ptr():
                target[start:stop].copy_(parts[0])

        def stream(o: SteppedOperation) -> Steps:
            return self._streams.gather(o, target, numel, (root,), None, take, results.room_in(target, target, 0))

        return self._start(call, plan, target, target, stream)

    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, tree = source.numel(), self.tree
        whole = one_phase(numel * source.element_size(), codec)
        cut = numel if whole else cut_for(numel, self.world, codec)
        plan = self._plans.get(call)
        if plan is None:
            finish = combiner(tree, op, source.dtype, target.dtype)
            payload = wire_bytes(cut, source, codec) + (0 if whole else wire_bytes(cut, target, codec))
            plan = self._plan(call, payload, source, cut, self._all, finish if whole else None)
            if not whole and codec is None and target.dtype == source.dtype:
                plan.lent = self._lent_calls.plan(call, source, cut, finish, in_place=True)

        def stream(o: SteppedOperation) -> Steps:
            if whole:
                return self._streams.gather(o, source, numel, self._all, None, results.reducing(tree, target, op))
            mine = target[self.rank * cut : (self.rank + 1) * cut]
            reduce, spread = results.reducing(tree, mine, op), results.spreading(target, cut)
            return self._streams.scatter_gather(o, source, mine, cut, codec, reduce, spread)

        return self._start(call, plan, source, target, stream)

    def start_barrier(self, call: Call) -> Handle:
        plan = self._plans.get(call)
        if plan is None:
            plan = self._plan(call, 0, EMPTY, 0, (), results.keep_target)
        handle = self._start(call, plan, EMPTY, EMPTY, self._barrier_stream)
        handle.result = EMPTY
        return handle

    def _barrier_stream(self, o: SteppedOperation) -> Steps:
        return self._streams.gather(o, EMPTY, 0, (), None, results.ignoring)

    def start_send(self, call: Call, source: Tensor, to: int) -> Handle:
        self._scheduler.check()
        self.counters.add(call.operation, wire_bytes(source.numel(), source), HEADER_BYTES)
        return self._channels.send(call, self.site, source, to)

    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle:
        self._scheduler.check()
        self.counters.add(call.operation, 0, HEADER_BYTES)
        return self._channels.recv(call, self.site, target, source)

    # ---------------------------------------------------------------- private

    def _plan(
        self, call: Call, payload: int, source: Tensor, cut: int, gives: Sequence[int], finish: Finish | None
    ) -> Plan:
        """What is the same whenever this call is made. `payload` is for each of the other ranks. The ranks in `gives`
        contribute; `finish` makes the result of small contributions, None if these go no short path."""
        plan = self._plans[call] = Plan((self.world - 1) * payload)
        if finish is not None:
            plan.small = self._small_calls.plan(call, source, cut, gives, finish)
        return plan

    def _start(
        self, call: Call, plan: Plan, source: Tensor, target: Tensor, stream: Stream, own: Tensor | None = None
    ) -> Handle:
        """Take a short path, if there is one for this contribution and room for it right now; else start a stream."""
        self.counters.add(call.operation, plan.payload, HEADER_BYTES)
        scheduler, site = self._scheduler, self.site
        scheduler.admit()
        self._number = number = self._number + 1
        o: Operation | None = None
        if plan.small is not None:
            o = self._small_calls.start(number, plan.small, site, source, target, own)
        elif plan.lent is not None:
            o = self._lent_calls.start(number, plan.lent, site, source, target, own, stream)
        if o is not None:
            return scheduler.add(o)
        stepped = SteppedOperation(scheduler, number, call, site)
        stepped.steps = stream(stepped)
        return scheduler.issue(stepped)

    def naming(self, call: Call, target: Tensor) -> Call:
        """The same call, naming its output if ranks share that: they must agree on which one it is."""
        location = self._memory.find_common(target)
        if location is None:
            return call
        shared = self._shared_calls.get((call, location))
        if shared is None:
            text = f"{call.text} into shared tensor {location[0]} at byte {location[1]}"
            shared = self._shared_calls[call, location] = Call(call.operation, text)
        return shared


def _leave(pid: int, why: list[BaseException], board: Board, peers: Peers, link: Link) -> None:
    """Tell the others that this rank is gone, and why if it is because of an error."""
    if os.getpid() != pid:
        return  # a forked child, such as a DataLoader worker: the rank itself is still there
    # An uncaught error is why a process ends, but not why a communicator was dropped long after it.
    uncaught = getattr(sys, "last_value", None) if _exiting else None
    error = why[0] if why else uncaught
    board.leave_word(State.LEFT, f"{type(error).__name__}: {error}" if error is not None else "")
    peers.close()
    link.close()


_exiting: list[bool] = []


@functools.cache
def _note_the_exit() -> None:
    """To be called after a finalizer was made, so that this hook runs before all finalizers."""
    atexit.register(_exiting.append, True)
