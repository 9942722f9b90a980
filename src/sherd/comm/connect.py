"""Choosing a transport."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from sherd import observe
from sherd.comm.base import Communicator
from sherd.comm.c10d.communicator import C10dCommunicator, backend_limit
from sherd.comm.c10d.wire import Wire, keep_in_forks, over_gloo, over_group, uses_gloo
from sherd.comm.cluster.communicator import ClusterCommunicator
from sherd.comm.host.communicator import HostCommunicator
from sherd.comm.host.joining.rendezvous import Meeting, meet
from sherd.comm.meeting import network
from sherd.comm.meeting.handshake import Handshake
from sherd.comm.meeting.meeting_place import from_environment
from sherd.comm.solo import SoloCommunicator
from sherd.comm.trust.seal import Seal
from sherd.comm.trust.sealed_store import SealedStore
from sherd.config import CommOptions
from sherd.errors import Unsupported

log = logging.getLogger("sherd")
_connections = itertools.count()
# For groups that were made here: the store that their ranks met in, and the one that torch.distributed got.
_stores: weakref.WeakKeyDictionary[Any, tuple[Store, Store]] = weakref.WeakKeyDictionary()
NewWire = Callable[[Handshake, timedelta, Seal | None], Wire]
"""new_wire(handshake, timeout, seal): what carries the bytes of the c10d transport."""


class Plan(NamedTuple):
    """What is known when a transport is chosen."""

    handshake: Handshake
    meeting: Meeting
    options: CommOptions
    new_wire: NewWire


def connect(options: CommOptions | None = None) -> Communicator:
    """A communicator among all ranks of this job. Collective.

    Uses torch.distributed as it is initialised, or initialises it from torchrun's variables; without those it is a
    world of one. Options that are not given come from SHERD_* variables.
    """
    options = options or CommOptions.from_env()
    if dist.is_initialized():
        store, rank, world = _default_store(), dist.get_rank(), dist.get_world_size()
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _solo(options)
    else:
        store, rank, world = from_environment(options.timeout)
    if world == 1:
        return _solo(options)
    place = PrefixStore(f"sherd/{next(_connections)}", store)
    with Handshake(place, rank, range(world), options) as handshake:
        _settle_network(handshake)
        if not dist.is_initialized():
            handshake.during("torch.distributed", partial(_initialise, store, handshake, options.timeout))
        return _join(handshake, options, partial(_gloo, place) if uses_gloo() else partial(_default_backend, place))


def _solo(options: CommOptions) -> Communicator:
    observe.open_from_env(0)
    return SoloCommunicator(options)


def join(store: Store, rank: int, world_ranks: Sequence[int], options: CommOptions) -> Communicator:
    """A communicator among the ranks that call this, which meet in `store`: `rank` is the number of this one among
    them, `world_ranks` are their numbers in the world. torch.distributed does not know of it."""
    if len(world_ranks) == 1:
        return SoloCommunicator(options)
    with Handshake(store, rank, world_ranks, options) as handshake:
        return _join(handshake, options, partial(_gloo, store))


def _gloo(store: Store, handshake: Handshake, limit: timedelta, seal: Seal | None) -> Wire:
    """A group of our own, which torch.distributed does not know of."""
    world_ranks = [hello.rank for hello in handshake.hellos]
    return over_gloo(store, handshake.rank, world_ranks, limit, seal, handshake.interface())


def _default_backend(store: Store, handshake: Handshake, limit: timedelta, seal: Seal | None) -> Wire:
    """What torch.distributed was initialised with, as on accelerators."""
    return over_group(dist.new_group(timeout=limit), store, seal)


def _initialise(store: Store, handshake: Handshake, timeout: float) -> None:
    """Start torch.distributed."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # gloo trusts what it finds in a store. Kept in `_stores`: torch keeps only the C++ half of it alive.
    trusted = SealedStore(store, handshake.seal) if handshake.token and backend == "gloo" else store
    rank, world, limit = handshake.rank, handshake.world, timedelta(seconds=timeout)
    dist.init_process_group(backend, store=trusted, rank=rank, world_size=world, timeout=limit)
    _stores[dist.group.WORLD] = store, trusted
    keep_in_forks(dist.group.WORLD)


def _settle_network(handshake: Handshake) -> None:
    """Choose the interface, for the other groups of this job too, and warn where anyone could join."""
    interface = handshake.interface()
    if interface:
        os.environ[network.IFNAME] = interface.name
    if handshake.token is None and not handshake.together and handshake.rank == 0:
        where = f"interface {os.environ.get(network.IFNAME, 'of the network')}"
        log.warning(
            "There is no SHERD_TOKEN, so anyone who can reach %s of these machines can join or break this run; set it "
            "to the same random characters on every machine (see docs/security.md)",
            where,
        )


def _default_store() -> Store:
    ours = _stores.get(dist.group.WORLD)
    return ours[0] if ours else dist.distributed_c10d._get_default_store()


def _join(handshake: Handshake, options: CommOptions, new_wire: NewWire) -> Communicator:
    """Ranks that have said hello find out who shares a host, and choose a transport."""
    me = handshake.hellos[handshake.rank]
    observe.open_from_env(me.rank)
    meeting = meet(handshake.rank, me.rank, handshake.exchange, options, check=handshake.check)
    if options.group is None:
        options = options.replace(group=_ranks_per_host(meeting) or handshake.world)
    communicator = _choose(Plan(handshake, meeting, options, new_wire))
    try:
        handshake.exchange("connected", True)  # no rank goes on with one that failed on the way
    except BaseException as error:
        communicator.close(error)
        raise
    communicator.hosts, communicator.store = meeting.hosts, handshake.store
    hosts = [[meeting.cards[r].name for r in host] for host in meeting.hosts]
    if isinstance(communicator, HostCommunicator):  # which watches the others itself
        handshake.let_go()
    observe.emit("comm.connect", transport=communicator.transport, world=handshake.world, hosts=hosts)
    return communicator


def _choose(plan: Plan) -> Communicator:
    meeting, options = plan.meeting, plan.options
    wanted = _best(meeting, options) if options.transport == "auto" else options.transport
    problem = {"host": _why_not_host(meeting), "cluster": _why_not_cluster(meeting, options)}.get(wanted)
    if problem:
        raise Unsupported(f'transport="{wanted}" cannot be used: {problem}. Write transport="auto" or "c10d".')
    return {"host": _host, "cluster": _cluster, "c10d": _flat}[wanted](plan)


def _best(meeting: Meeting, options: CommOptions) -> str:
    """The fastest transport that works; if that is c10d for a reason that could be removed, rank 0 warns."""
    refusal = _refusal(meeting)
    if not refusal and len(meeting.hosts) == 1:
        return "host"
    if not refusal and (len(meeting.hosts) == len(meeting.cards) or options.order == "transport"):
        return "c10d"
    problem = refusal or _why_not_cluster(meeting, options)
    if problem and meeting.link.rank == 0:
        log.warning("sherd uses c10d instead of shared memory, which is faster: %s", problem)
    return "c10d" if problem else "cluster"


def _host(plan: Plan) -> Communicator:
    return HostCommunicator(plan.meeting.link, plan.options, check=plan.handshake.check)


def _flat(plan: Plan) -> Communicator:
    flat = _over_network(plan)
    plan.meeting.link.close()
    return flat


def _cluster(plan: Plan) -> Communicator:
    """Shared memory among the ranks of this host, a group for each column, and one among all ranks for the rest."""
    flat = _over_network(plan)
    during = partial(plan.handshake.during, "columns")
    return ClusterCommunicator(flat, plan.meeting.link, plan.options, during, plan.handshake.check)


def _over_network(plan: Plan) -> C10dCommunicator:
    handshake, meeting, options, new_wire = plan
    secret = _secret(plan)
    wire = handshake.during("gloo", lambda: new_wire(handshake, backend_limit(options), secret))
    names = [card.name for card in meeting.cards]
    return C10dCommunicator(wire, options, names, handshake.presence.peers, _ranks_per_host(meeting), handshake.guard)


def _secret(plan: Plan) -> Seal | None:
    """A key that only these ranks have: from their token, or handed out inside their one host."""
    handshake, meeting, options, _ = plan
    if handshake.token is not None:
        return handshake.seal
    if len(meeting.hosts) > 1 or _refusal(meeting):
        return None
    return Seal(meeting.link.secret(options.timeout, handshake.check))


def _ranks_per_host(meeting: Meeting) -> int | None:
    """If hosts have the same size and hold consecutive ranks: then they are the groups of the summation tree."""
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
        return f"each host must hold the same number of consecutive ranks, and these hold {meeting.hosts}"
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
