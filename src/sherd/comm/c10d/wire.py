"""The process group that carries the bytes of the c10d transport.

Its own methods are called, not the functions of torch.distributed: those only know registered groups, and cost a few
microseconds more per call.

A gloo group of our own has no timeout once it is connected: gloo's clock runs while a job is suspended, and its errors
name no rank. The watchdog decides when to give up, and then breaks the connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from sherd.comm.c10d.sockets import Connections
from sherd.comm.closing import CLOSED
from sherd.comm.meeting.network import Interface, told
from sherd.comm.trust.seal import Seal
from sherd.comm.trust.sealed_store import SealedStore
from sherd.comm.waiting.side_thread import inside_the_backend

CONNECTED = "connected"  # the key under which the store counts the ranks whose group is connected
FOREVER = timedelta(days=3650)  # its nanoseconds still fit into 63 bits
LINGER = 0.2  # seconds that operations under way have to complete after a communicator is closed
COME_BACK = 1.0  # seconds for the backend to notice that its connections are broken
ALL_CONNECT = 2.0  # seconds for the others to be connected as well, before a group that was never used is dropped
ALL_KNOW = 10.0  # seconds after a fault, when no rank mistakes a broken connection for its cause

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_in_forks(group: Any) -> None:
    """A forked process has the groups of its parent, but not their threads, whose end the groups would wait for if they
    were collected there: so they never are, not even when the process ends."""
    _groups.add(group)


def _keep_for_ever() -> None:
    gc.freeze()  # nor is anything else in a reference cycle: a store, a connection, whatever their threads used
    for group in _groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_for_ever)

NewGroup = Callable[[Sequence[int], timedelta], "Wire"]
"""new_group(ranks, timeout): a wire among some of the ranks; all of these call it."""


@dataclass(eq=False)
class Wire:
    """A process group that nothing else uses, and the store of its ranks. Every operation is asynchronous."""

    group: dist.ProcessGroup  # or a Backend of torch: they have the same methods
    rank: int
    store: Store
    device: torch.device
    world_ranks: Sequence[int]  # for messages
    subgroup: NewGroup
    connections: Connections | None = None  # None where torch.distributed owns the group
    seal: Seal | None = None  # a secret of these ranks
    kept: object = None  # what the group uses without keeping it alive
    met: bool = field(default=False, init=False)  # a collective has completed, so every rank is connected
    faulty: bool = field(default=False, init=False)
    _timer: threading.Timer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        keep_in_forks(self.group)

    @property
    def world(self) -> int:
        return len(self.world_ranks)

    @property
    def waits_for_recv(self) -> bool:
        return self.connections is not None  # gloo sends nothing, however small, before the peer receives

    def fail(self) -> None:
        """Operations under way will not complete. They are woken once the other ranks have their own errors, so that a
        communicator that is never closed is not kept alive by its own threads."""
        if not self.faulty and self.connections is not None:
            self._timer = threading.Timer(ALL_KNOW, self.connections.shut_down)
            self._timer.daemon = True
            self._timer.start()
        self.faulty = True

    def close(self) -> None:
        """Release the group, with its threads and sockets. Operations under way have a moment to complete, but not
        after a fault."""
        if self.group is CLOSED:
            return
        held, self.group = [self.group], CLOSED
        if self._timer is not None:
            self._timer.cancel()
        if self.connections is None:
            dist.destroy_process_group(held[0])
            return
        # The destructor of the group waits for its threads.
        gone = threading.Event()
        waits_for = None if self.met or self.faulty else self.store
        first = self.break_off if self.faulty else None  # on the thread: an error must not wait for it
        try:
            arguments = (held, gone, waits_for, self.world, first)
            threading.Thread(target=_drop, args=arguments, name="sherd-closing", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            self.break_off()
            _drop(held, gone)
        if self.faulty:
            gone.wait(LINGER)
        elif not gone.wait(LINGER + (0.0 if waits_for is None else ALL_CONNECT)):
            self.break_off()
            gone.wait(COME_BACK)

    def break_off(self) -> None:
        """Wake every thread that waits in the backend, with an error."""
        if self.connections is not None:
            self.connections.shut_down()

    def all_gather(self, output: Tensor, input: Tensor) -> dist.Work:
        options = AllgatherOptions()
        options.asyncOp = True
        return self.group._allgather_base(output, input, options)

    def all_to_all(
        self, output: Tensor, input: Tensor, out_splits: Sequence[int] = (), in_splits: Sequence[int] = ()
    ) -> dist.Work:
        options = AllToAllOptions()
        options.asyncOp = True
        return self.group.alltoall_base(output, input, list(out_splits), list(in_splits), options)

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return self.group.broadcast([tensor], options)

    def all_reduce(self, tensor: Tensor, op: Any) -> dist.Work:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = op, True
        return self.group.allreduce([tensor], options)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any) -> dist.Work:
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, True
        return self.group._reduce_scatter_base(output, input, options)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Callable[[], object]:
        """Returns what waits for the message."""
        return self._wait_for(self.group.send([tensor], to, tag))

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Callable[[], object]:
        return self._wait_for(self.group.recv([tensor], source, tag))

    def _wait_for(self, message: dist.Work) -> Callable[[], object]:
        # A message of our own group would otherwise have the timeout for connecting.
        return message.wait if self.connections is None else partial(message.wait, FOREVER)


def _drop(
    held: list[Any],
    gone: threading.Event,
    store: Store | None = None,
    world: int = 0,
    first: Callable[[], None] | None = None,
) -> None:
    """Drop a group: with a store, once all ranks are connected, as those that are not would get an error."""
    with inside_the_backend(gone):
        if first is not None:
            first()
        if store is not None:
            deadline = time.monotonic() + ALL_CONNECT
            with contextlib.suppress(RuntimeError):
                while store.add(CONNECTED, 0) < world and time.monotonic() < deadline:
                    time.sleep(0.005)
        held.clear()


def over_group(group: dist.ProcessGroup, store: Store | None = None, seal: Seal | None = None) -> Wire:
    """Over a group that torch.distributed has registered. `store` is where its ranks meet, by default the group's own,
    which torch gives to the next group of the same name once this one is destroyed."""
    ranks = dist.get_process_group_ranks(group)
    place = store or dist.distributed_c10d._get_process_group_store(group)

    def subgroup(members: Sequence[int], timeout: timedelta) -> Wire:
        world_ranks = [ranks[r] for r in members]
        some = dist.new_group(world_ranks, timeout, use_local_synchronization=True)
        return over_group(some, PrefixStore(some.group_name, place), seal and seal.derived(some.group_name))

    device = torch.device("cpu" if "gloo" in dist.get_backend_config(group) else "cuda")
    return Wire(group, dist.get_rank(group), place, device, ranks, subgroup, seal=seal)


def over_gloo(
    store: Store,
    rank: int,
    world_ranks: Sequence[int],
    timeout: timedelta,
    seal: Seal | None = None,
    interface: Interface | None = None,
) -> Wire:
    """Over a new gloo group, which torch.distributed does not know of. Collective among `world_ranks`, which have
    `timeout` to connect. With a `seal`, gloo trusts only what they write into the store."""
    made: dict[tuple[int, ...], int] = {}

    def subgroup(members: Sequence[int], limit: timedelta) -> Wire:
        key = tuple(members)
        made[key] = made.get(key, 0) + 1
        name = f"{'-'.join(map(str, members))}/{made[key]}"
        place, its = PrefixStore(name, store), seal and seal.derived(name)
        return over_gloo(place, key.index(rank), [world_ranks[r] for r in members], limit, its, interface)

    world = len(world_ranks)
    connections = Connections()
    trusted = store if seal is None else SealedStore(store, seal)
    with told(interface), connections.opened_here(world - 1):
        group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", trusted), rank, world, timeout=timeout)
    group.set_timeout(FOREVER)
    store.add(CONNECTED, 1)
    return Wire(group, rank, store, torch.device("cpu"), world_ranks, subgroup, connections, seal, trusted)


def uses_gloo() -> bool:
    """Whether torch's default backend would move all data of this machine over gloo, or is sherd's own, which uses
    gloo."""
    if dist.get_backend() == "sherd":
        return True
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    beside = {backend for device, backend in backends.items() if device != "cpu"} - {"gloo"}
    return backends.get("cpu") == "gloo" and (not beside or not torch.accelerator.is_available())
