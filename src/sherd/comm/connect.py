"""Choosing a transport."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from sherd import observe
from sherd.comm.base import Communicator
from sherd.comm.c10d.communicator import C10dCommunicator, backend_limit
from sherd.comm.c10d.wire import Wire, backend_of, over_gloo, over_group
from sherd.comm.cluster.communicator import ClusterCommunicator
from sherd.comm.exchange import StoreExchange
from sherd.comm.host.communicator import HostCommunicator
from sherd.comm.host.rendezvous import Meeting, meet
from sherd.comm.solo import SoloCommunicator
from sherd.config import CommOptions
from sherd.errors import CommError, Unsupported

log = logging.getLogger("sherd")
_connections = itertools.count()
NewWire = Callable[[], Wire]


def connect(options: CommOptions | None = None) -> Communicator:
    """A communicator among all ranks of this job. Collective.

    Uses torch.distributed as it is initialised, or initialises it from torchrun's variables; without those, it is a
    world of one. Options that are not given come from SHERD_* variables.
    """
    options = options or CommOptions.from_env()
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return SoloCommunicator(options)
        _initialise(options.timeout)
    store = PrefixStore(f"sherd/{next(_connections)}", dist.distributed_c10d._get_default_store())

    def new_group(limit: timedelta) -> Wire:
        return over_group(dist.new_group(timeout=limit, backend=backend_of()), store)

    return join(store, dist.get_rank(), range(dist.get_world_size()), options, new_group)


def join(
    store: Store,
    rank: int,
    world_ranks: Sequence[int],
    options: CommOptions,
    new_group: Callable[[timedelta], Wire] | None = None,
) -> Communicator:
    """A communicator among the ranks that call it, which meet in `store`: `rank` is the number of this one among them,
    `world_ranks` are their names. `new_group` makes the process group of the c10d transport (default: gloo, unknown to
    torch.distributed)."""
    world = len(world_ranks)
    if world == 1:
        return SoloCommunicator(options)
    if os.environ.get("SHERD_EVENTS") and type(observe.stream()) is observe.NullStream:
        observe.use(observe.from_env(world_ranks[rank]))
    meeting = meet(rank, world_ranks[rank], StoreExchange(store, rank, world, options.timeout), options)
    if options.group is None:
        options = options.replace(group=_ranks_per_host(meeting) or world)

    def new_wire() -> Wire:
        limit = backend_limit(options)
        return new_group(limit) if new_group else over_gloo(store, rank, world_ranks, limit)

    communicator = _choose(meeting, options, new_wire)
    hosts = [[meeting.cards[r].name for r in host] for host in meeting.hosts]
    observe.emit("comm.connect", transport=communicator.transport, world=world, hosts=hosts)
    return communicator


def _choose(meeting: Meeting, options: CommOptions, new_wire: NewWire) -> Communicator:
    wanted = _best(meeting, options) if options.transport == "auto" else options.transport
    problem = {"host": _why_not_host(meeting), "cluster": _why_not_cluster(meeting, options)}.get(wanted)
    if problem:
        raise Unsupported(f'transport="{wanted}" cannot be used: {problem}. Write transport="auto" or "c10d".')
    return {"host": _host, "cluster": _cluster, "c10d": _flat}[wanted](meeting, options, new_wire)


def _best(meeting: Meeting, options: CommOptions) -> str:
    """The fastest transport that works; where that is c10d for a reason that could be changed, it is said."""
    refusal = _refusal(meeting)
    if not refusal and len(meeting.hosts) == 1:
        return "host"
    if not refusal and (len(meeting.hosts) == len(meeting.cards) or options.order == "transport"):
        return "c10d"
    problem = refusal or _why_not_cluster(meeting, options)
    if problem and meeting.link.rank == 0:
        log.warning("sherd uses c10d instead of faster shared memory: %s", problem)
    return "c10d" if problem else "cluster"


def _host(meeting: Meeting, options: CommOptions, _: NewWire) -> Communicator:
    return HostCommunicator(meeting.link, options)


def _flat(meeting: Meeting, options: CommOptions, new_wire: NewWire) -> Communicator:
    flat = _over_network(meeting, options, new_wire())
    meeting.link.close()
    return flat


def _cluster(meeting: Meeting, options: CommOptions, new_wire: NewWire) -> Communicator:
    """Shared memory among the ranks of this host, a group of its own for each column, and the flat way for the rest."""
    return ClusterCommunicator.over(_over_network(meeting, options, new_wire()), meeting.link, options)


def _over_network(meeting: Meeting, options: CommOptions, wire: Wire) -> C10dCommunicator:
    peers = meeting.link.watch(options.timeout, meeting.link.members)
    return C10dCommunicator(wire, options, [card.name for card in meeting.cards], peers, _ranks_per_host(meeting))


def _initialise(timeout: float) -> None:
    """Start torch.distributed from torchrun's variables; a rank that does not come is named."""
    limit = timedelta(seconds=timeout)
    try:
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=limit)))
        store.set_timeout(limit)
        StoreExchange(PrefixStore("sherd/hello", store), rank, world, timeout)("hello", os.getpid())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except (DistError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CommError(
            f"rank {os.environ.get('RANK')} could not join the others at MASTER_ADDR:MASTER_PORT = {address} within "
            f"{timeout:g} s: {error}. They may have given up before; look at their output first. "
            "`sherd run` and torchrun set these variables."
        ) from error


def _ranks_per_host(meeting: Meeting) -> int | None:
    """Of hosts of equal size that hold consecutive ranks: they are the groups of the summation tree."""
    sizes = {len(host) for host in meeting.hosts}
    consecutive = all(host == list(range(host[0], host[0] + len(host))) for host in meeting.hosts)
    return sizes.pop() if len(sizes) == 1 and consecutive else None


def _why_not_host(meeting: Meeting) -> str | None:
    if len(meeting.hosts) > 1 and not _refusal(meeting):
        return f"the ranks are on {len(meeting.hosts)} hosts: {meeting.hosts}"
    return _refusal(meeting)


def _why_not_cluster(meeting: Meeting, options: CommOptions) -> str | None:
    ranks = _ranks_per_host(meeting)
    if ranks is None:
        return f"the hosts must hold as many consecutive ranks each, and these hold {meeting.hosts}"
    if options.group != ranks:
        return f"sums are taken host by host, and group={options.group} is not the {ranks} ranks of a host"
    if options.order == "transport":
        return 'it sums by the tree, and order="transport" was asked for'
    if len(meeting.hosts) == 1:
        return "all ranks are on one host"
    return _refusal(meeting)


def _refusal(meeting: Meeting) -> str | None:
    """Why memory cannot be shared on one of the hosts."""
    return next((f"on {card.name}, {card.refusal}" for card in meeting.cards if card.refusal), None)
