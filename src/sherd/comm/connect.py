"""Choosing a transport."""

from __future__ import annotations

import itertools
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore

from sherd import observe
from sherd.comm.base import Communicator
from sherd.comm.c10d.communicator import C10dCommunicator, backend_limit
from sherd.comm.exchange import StoreExchange
from sherd.comm.host.communicator import HostCommunicator
from sherd.comm.host.rendezvous import Meeting, meet
from sherd.comm.solo import SoloCommunicator
from sherd.config import CommOptions
from sherd.errors import CommError, Unsupported

log = logging.getLogger("sherd")
_connections = itertools.count()


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
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return SoloCommunicator(options)
    if os.environ.get("SHERD_EVENTS") and type(observe.stream()) is observe.NullStream:
        observe.use(observe.from_env(rank))
    store = PrefixStore(f"sherd/{next(_connections)}", dist.distributed_c10d._get_default_store())
    meeting = meet(rank, rank, StoreExchange(store, rank, world, options.timeout), options)
    if options.group is None:
        options = options.replace(group=_ranks_per_host(meeting))
    problem = _why_not_host(meeting)
    if options.transport == "host" and problem:
        raise Unsupported(f'transport="host" cannot be used: {problem}. Write transport="auto" or "c10d".')
    if options.transport == "c10d" or problem:
        refused = [card for card in meeting.cards if card.refusal]
        if options.transport == "auto" and refused and rank == 0:
            log.warning("sherd uses c10d instead of the faster host transport: %s", problem)
        peers = meeting.link.watch(options.timeout, meeting.link.members)
        meeting.link.close()
        group = dist.new_group(timeout=backend_limit(options))
        return C10dCommunicator(group, options, [card.name for card in meeting.cards], peers)
    return HostCommunicator(meeting.link, options)


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


def _ranks_per_host(meeting: Meeting) -> int:
    """G of the summation tree: hosts of equal size that hold consecutive ranks are its groups."""
    sizes = {len(host) for host in meeting.hosts}
    consecutive = all(host == list(range(host[0], host[0] + len(host))) for host in meeting.hosts)
    return sizes.pop() if len(sizes) == 1 and consecutive else len(meeting.cards)


def _why_not_host(meeting: Meeting) -> str | None:
    for card in meeting.cards:
        if card.refusal:
            return f"on {card.name}, {card.refusal}"
    if len(meeting.hosts) > 1:
        return f"the ranks are on {len(meeting.hosts)} hosts: {meeting.hosts}"
    return None
