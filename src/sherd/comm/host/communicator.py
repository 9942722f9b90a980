"""The host transport's operations."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sherd.comm.base import Backing, Communicator
from sherd.comm.calls import Call
from sherd.comm.closing import CLOSED
from sherd.comm.codec import Codec, wire_bytes
from sherd.comm.handle import Handle
from sherd.comm.host.board import Board, State
from sherd.comm.host.cores import spins_pay
from sherd.comm.host.joining.link import Link
from sherd.comm.host.joining.rendezvous import meet
from sherd.comm.host.memory import PAGE, Location, SharedBlock, SharedMemory, round_up
from sherd.comm.host.operation import Headers, Operation, SteppedOperation, Steps
from sherd.comm.host.remote_reader import RemoteReader
from sherd.comm.host.scheduler import Scheduler
from sherd.comm.host.transfer import results
from sherd.comm.host.transfer.channel import Channels
from sherd.comm.host.transfer.small import Finish, SmallCalls, SmallPlan
from sherd.comm.host.transfer.staging import SMALL_BYTES, SMALL_CHUNKS, Staging, is_small
from sherd.comm.host.transfer.streams import Streams
from sherd.comm.host.waiting import Waiter
from sherd.comm.meeting.peers import Peers
from sherd.comm.memo import Memo
from sherd.comm.solo import SoloCommunicator
from sherd.comm.summation import combine, cut_for, one_phase
from sherd.comm.waiting.progress import take_part
from sherd.config import CommOptions
from sherd.errors import CommError

HEADER_BYTES = 64
MAX_PLANS = 256
_EMPTY = torch.empty(0)


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
        self._plans = Memo[Call, SmallPlan | None](MAX_PLANS)
        self._memory: SharedMemory = beside._memory if beside else SharedMemory()
        self.counters = beside.counters if beside else self.counters
        self._board = Board(self._share("board", Board.nbytes(world)), rank, world)
        self._peers = link.watch(options.timeout, range(world), check)
        numbers = numbers or self._all
        # Not in a part of a larger communicator, whose network thread needs the interpreter.
        self._crowd = max(crowd, world)
        spin = lock is None and spins_pay(self._crowd)
        self._waiter = waiter = Waiter(self._board, self._peers, self.names, numbers, options, spin)
        self._scheduler = Scheduler(self._board, waiter, self.lock)
        self._check = self._scheduler.check
        small = self._ring("small", SMALL_BYTES, SMALL_CHUNKS)
        large = self._ring("large", options.chunk_bytes, options.chunks)
        headers = Headers(self._board, self.names, numbers, options.check)
        self._small_calls = SmallCalls(headers, small)
        remote = RemoteReader([card.pid for card in link.cards], self._board, waiter) if link.reads_remote else None
        self._streams = Streams(headers, small, large, self._memory, remote)
        channels = self._share("channels", Channels.nbytes(world))
        self._channels = Channels(channels, self._board, self._memory, self._scheduler, self.names, numbers)
        waiter.made = weakref.WeakMethod(self._channels.made)
        # Called by close(), when nothing refers to this communicator any more, or at the end of the process.
        self._why: list[BaseException] = []
        self._leave = weakref.finalize(self, _leave, os.getpid(), self._why, self._board, self._peers, link)
        _note_the_exit()

    # ---------------------------------------------------------------- shared memory, groups and life

    def shares(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in a `shared_tensor`."""
        return self._memory.is_common(tensor)

    def fail(self, error: CommError) -> None:
        """Give up because of a failure outside this host, and tell its other ranks."""
        self._scheduler.fail(error)

    def shared_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.agree(f"shared_tensor({dtype}{list(shape)})").wait()
        self._free_what_was_dropped()
        numel = torch.Size(shape).numel()
        block = self._share("tensor", numel * dtype.itemsize, keep=True)
        owner = memoryview(block.memory)
        self._memory.add(block, common=True, owner=owner)
        return block.tensor(0, numel, dtype, owner).view(shape)

    def backing(self, tensor: Tensor) -> Backing | None:
        return self._memory.backing(tensor)

    def shared_buffers(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        self.agree(f"shared_buffers({dtype}{list(shape)})").wait()
        self._free_what_was_dropped()
        numel = torch.Size(shape).numel()
        stride = round_up(numel * dtype.itemsize, PAGE)
        block = self._share("buffers", stride * self.world)
        owner = memoryview(block.memory)
        self._memory.add(block, common=False, owner=owner)
        return [block.tensor(r * stride, numel, dtype, owner).view(shape) for r in range(self.world)]

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
        self._board = self._waiter = self._small_calls = self._streams = self._channels = CLOSED

    def _ring(self, label: str, chunk_bytes: int, chunks: int) -> Staging:
        block = self._share(label, Staging.nbytes(self.world, chunk_bytes, chunks))
        return Staging(block, self._board, chunk_bytes, chunks)

    def _share(self, label: str, nbytes: int, keep: bool = False) -> SharedBlock:
        return self._link.share(label, nbytes, self.options.timeout, self._check, keep)

    # ---------------------------------------------------------------- operations

    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        cut, tree = target.numel(), self.tree
        self._count(call, (self.world - 1) * wire_bytes(cut, source, codec))
        if codec is not None or is_small(source.numel() * source.element_size()):
            self._put_own(source, own)
            own = None
        if codec is None:
            finish: Finish = lambda parts, out: combine(tree, parts, out, op)  # noqa: E731
            small = self._start_small(call, source, target, cut, self._all, finish)
            if small is not None:
                return small
        o, reduce = self._new(call), results.reducing(tree, target, op)
        return self._issue(o, self._streams.scatter(o, source, cut, codec, reduce, own=own))

    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        cut = target.numel() // self.world
        self._count(call, (self.world - 1) * wire_bytes(cut, source))
        small = self._start_small(call, source, target, cut, self._all, results.concatenate)
        if small is not None:
            return small
        o = self._new(call)
        take, room = results.spreading(target, cut), results.room_in(source, target, cut)
        return self._issue(o, self._streams.scatter(o, source, cut, None, take, room=room))

    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        cut = source.numel()
        if codec is None and self.shares(target):
            call = self.naming(call, target)
            self._count(call, 0)
            o = self._new(call)
            return self._issue(o, self._streams.publish(o, source, target[self.rank * cut : (self.rank + 1) * cut]))
        self._count(call, (self.world - 1) * wire_bytes(cut, source, codec))
        if codec is None:
            small = self._start_small(call, source, target, cut, self._all, results.concatenate)
            if small is not None:
                return small
        o = self._new(call)
        take, room = results.spreading(target, cut), results.room_in(source, target, cut)
        return self._issue(o, self._streams.gather(o, source, cut, self._all, codec, take, room))

    def start_publish(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        if not self.shares(target):
            return self.start_all_gather(call, source, target, None)
        place = target[self.rank * source.numel() : (self.rank + 1) * source.numel()]
        if place.data_ptr() != source.data_ptr():
            place.copy_(source)
        return self.start_barrier(self.naming(call, target))

    def start_broadcast(self, call: Call, target: Tensor, root: int) -> Handle:
        numel, receives = target.numel(), self.rank != root
        self._count(call, 0 if receives else (self.world - 1) * wire_bytes(numel, target))
        finish = results.copy_first if receives else results.keep_target
        small = self._start_small(call, target, target, numel, (root,), finish)
        if small is not None:
            return small

        def take(start: int, stop: int, parts: list[Tensor]) -> None:
            if receives and parts[0].data_ptr() != target[start:stop].data_ptr():
                target[start:stop].copy_(parts[0])

        o, room = self._new(call), results.room_in(target, target, 0)
        return self._issue(o, self._streams.gather(o, target, numel, (root,), None, take, room))

    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        numel, tree = source.numel(), self.tree
        if one_phase(numel * source.element_size(), codec):
            self._count(call, (self.world - 1) * wire_bytes(numel, source))
            finish: Finish = lambda parts, out: combine(tree, parts, out, op)  # noqa: E731
            small = self._start_small(call, source, target, numel, self._all, finish)
            if small is not None:
                return small
            o, reduce = self._new(call), results.reducing(tree, target, op)
            return self._issue(o, self._streams.gather(o, source, numel, self._all, None, reduce))
        cut = cut_for(numel, self.world, codec)
        self._count(call, (self.world - 1) * (wire_bytes(cut, source, codec) + wire_bytes(cut, target, codec)))
        mine = target[self.rank * cut : (self.rank + 1) * cut]
        o, reduce, spread = self._new(call), results.reducing(tree, mine, op), results.spreading(target, cut)
        return self._issue(o, self._streams.scatter_gather(o, source, mine, cut, codec, reduce, spread))

    def start_barrier(self, call: Call) -> Handle:
        self._count(call, 0)
        o = self._start_small(call, _EMPTY, _EMPTY, 0, (), results.keep_target)
        if o is None:
            stepped = self._new(call)
            o = self._issue(stepped, self._streams.gather(stepped, _EMPTY, 0, (), None, results.ignoring))
        o.result = _EMPTY
        return o

    def start_send(self, call: Call, source: Tensor, to: int) -> Handle:
        self._scheduler.check()
        self._count(call, wire_bytes(source.numel(), source))
        return self._channels.send(call, self.site, source, to)

    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle:
        self._scheduler.check()
        self._count(call, 0)
        return self._channels.recv(call, self.site, target, source)

    # ---------------------------------------------------------------- private

    def _count(self, call: Call, payload: int) -> None:
        self.counters.add(call.operation, payload, HEADER_BYTES)

    def _new(self, call: Call) -> SteppedOperation:
        self._scheduler.admit()
        self._number += 1
        return SteppedOperation(self._scheduler, self._number, call, self.site)

    def _issue(self, operation: SteppedOperation, steps: Steps) -> Operation:
        operation.steps = steps
        return self._scheduler.issue(operation)

    def _start_small(
        self, call: Call, source: Tensor, target: Tensor, cut: int, contributors: Sequence[int], finish: Finish
    ) -> Operation | None:
        """Take the short path, if the contribution is small and there is room for it."""
        if call not in self._plans:
            numel, dtype = source.numel(), source.dtype
            self._plans[call] = self._small_calls.plan(call, numel, dtype, cut, contributors, finish)
        plan = self._plans[call]
        if plan is None:
            return None
        self._scheduler.admit()
        o = self._small_calls.start(self._scheduler, self._number + 1, plan, self.site, source, target)
        if o is None:
            return None
        self._number += 1
        return self._scheduler.add(o)

    def naming(self, call: Call, target: Tensor) -> Call:
        """The same call, naming its output if ranks share that: they must agree on which one it is."""
        if not self.shares(target):
            return call
        location = self._memory.find(target)
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
