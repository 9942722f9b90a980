"""An engine put together as its policy says: the only place that asks where parameters live and who owns what."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch.optim import Optimizer

from sherd.comm import Communicator, SoloCommunicator
from sherd.config import StepOptions
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.catalogue import gather, listed
from sherd.engine.buckets.exchange import Exchange, ReplicaExchange, SliceExchange, WholeExchange
from sherd.engine.buckets.groups import Groups, Ranks
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.consistency.torn import Torn
from sherd.engine.consistency.unchanged import Unchanged
from sherd.engine.engine import Engine, Parts
from sherd.engine.gradients.access import ShardedAccess, WholeAccess
from sherd.engine.gradients.gradient import Trained
from sherd.engine.gradients.own import OwnGradients
from sherd.engine.gradients.scaled_roots import shared
from sherd.engine.optimizer.elementwise import own_collective, why_not_elementwise, why_not_whole
from sherd.engine.optimizer.forecast import work_of
from sherd.engine.optimizer.probe import BY_CLOSURE
from sherd.engine.optimizer.unsplit import updater_for
from sherd.engine.parameters.flat_stores import PrivateStore
from sherd.engine.parameters.gathered.host_store import HostGatheredStore
from sherd.engine.parameters.gathered.store import GatheredStore
from sherd.engine.parameters.grouped_store import GroupedStore
from sherd.engine.parameters.host_store import HostStore
from sherd.engine.parameters.mesh import Mesh, Teams
from sherd.engine.parameters.restore import tensors_as_they_are
from sherd.engine.parameters.store import ParameterStore
from sherd.engine.policy import AccumulateAt, ExchangePolicy, Home, Keeps, Merges, Owns
from sherd.engine.summed import SummedGradients
from sherd.errors import ConfigError
from sherd.layout.entry import Entry
from sherd.layout.packing import SMALL_MODEL_BUCKET_BYTES, SMALL_MODEL_BYTES, bucket_numel, total_bytes
from sherd.layout.placement import Placement
from sherd.patches import backward

log = logging.getLogger("sherd")

_STORES: dict[Home, type[ParameterStore]] = {
    Home.PRIVATE: PrivateStore,
    Home.GATHERED: GatheredStore,
    Home.GATHERED_BY_HOST: HostGatheredStore,
    Home.HOST: HostStore,
}
_EXCHANGES: dict[tuple[Keeps, Owns], type[Exchange]] = {
    (Keeps.WHOLE, Owns.EVERYTHING): ReplicaExchange,
    (Keeps.WHOLE, Owns.SLICE): WholeExchange,
    (Keeps.SLICES, Owns.SLICE): SliceExchange,
}


def settle(policy: ExchangePolicy, options: StepOptions) -> None:
    """Follow what the user said about accumulation."""
    if options.accumulate_at is not None:
        policy.accumulate_at = AccumulateAt(options.accumulate_at)
    if policy.accumulate_at is AccumulateAt.RANK:
        policy.keeps = Keeps.WHOLE  # a rank that adds up its own gradient needs room for all of it


def check_optimizer(
    optimizer: Optimizer, policy: ExchangePolicy, strategy: str, name: str = "", converts: bool = False
) -> None:
    """Refuse an optimizer that can work neither in parts nor on whole parameters of different owners, where that is
    what the strategy asks for."""
    name = name or type(optimizer).__name__
    if why := policy.refuses(optimizer):
        raise ConfigError(f"{name} cannot be used under strategy={strategy!r}: {why}")
    why_not = why_not_elementwise(optimizer)
    if converts and why_not is not None and why_not.cause == BY_CLOSURE.cause:
        raise ConfigError(
            f"{name} evaluates the loss several times in a step, while masters are stepped; precision= cannot be used "
            f'with it: write precision="bf16-autocast"'
        )
    if policy.owns is Owns.EVERYTHING:
        # Not refused: one that divides the work among ranks, and does nothing to gradients, is right here too.
        if (collective := own_collective(optimizer)) and torch.distributed.get_rank() == 0:
            log.warning(
                "%s communicates on its own: its step() calls %s of torch.distributed. sherd has averaged gradients by "
                "then, and the ranks have the same ones; use the optimizer's single-process variant if it has one",
                name,
                collective,
            )
        return
    if why_not_elementwise(optimizer) and (why_not := why_not_whole(optimizer)):
        own_words = f". Its own words: {why_not.own_words}" if why_not.own_words else ""
        raise ConfigError(
            f"{name} cannot be sharded: {why_not.cause}. strategy={strategy!r} updates every parameter on the rank "
            f"that owns it, in flat parts or whole; {why_not.fix}{own_words}"
        )


def check_groups(groups: Groups, policy: ExchangePolicy, teams: int, strategy: str) -> None:
    """Refuse ranks that hold different parameters where those are gathered on use, or averaged between teams."""
    if groups and teams > 1:
        raise ConfigError(
            f"groups= does not work with strategy={strategy!r}, which averages the parameters of ranks that train "
            f'apart; write strategy="zero2"'
        )
    if groups and policy.home in (Home.GATHERED, Home.GATHERED_BY_HOST):
        raise ConfigError(
            f"groups= does not work with parameters that are gathered on use, as strategy={strategy!r} has them "
            f'where ranks do not share one copy; write strategy="zero2"'
        )


def check_precision(options: StepOptions, policy: ExchangePolicy, teams: int, strategy: str, optimizers: int) -> None:
    """Refuse masters where gradients are not summed in every step, or nothing would step them."""
    if options.converts and (teams > 1 or not policy.sums(0)):
        raise ConfigError(
            f"precision={options.precision!r} does not work with strategy={strategy!r}, whose ranks do not sum "
            f'gradients in every step; write precision="bf16-autocast", or strategy="zero2"'
        )
    if options.converts and not optimizers:
        raise ConfigError(
            f"precision={options.precision!r} needs the optimizer, which steps fp32 masters instead of the 16-bit "
            f"parameters; pass it: sherd.distribute(model, optimizer, precision={options.precision!r})"
        )


def check_scaling(options: StepOptions, policy: ExchangePolicy, world: int, strategy: str) -> None:
    """Refuse to scale losses where gradients are not summed in every step: that is where the scale leaves them."""
    apart = policy.drift is not None or (world > 1 and not policy.sums(0))
    if options.loss_scale is not None and apart:
        raise ConfigError(
            f"loss_scale= does not work with strategy={strategy!r}, whose ranks train apart: an overflow on one would "
            f'have to hold back all others; write strategy="zero2"'
        )


def assemble(
    teams: Teams,
    inventory: Inventory,
    policy: ExchangePolicy,
    options: StepOptions,
    optimizers: Sequence[Optimizer],
    undo: ExitStack,
) -> Engine:
    """The engine of one model on one rank. It has the parameters from `take_over` on.

    `undo` gets what puts the model back as it was, in case `distribute` fails later.
    """
    comm = teams.team
    owner = None if policy.owns is Owns.EVERYTHING else comm.rank  # whose slices this rank updates
    whole = [] if owner is None else [each for each in optimizers if why_not_elementwise(each)]
    catalogue = listed(inventory.members, optimizers, _own_whole(inventory, optimizers, whole))
    if inventory.groups:
        catalogue = gather(comm, catalogue)
    entries = [each.entry for each in catalogue]
    ends_first = _ends_first(teams, entries, inventory.device, options)
    nbytes = options.bucket_bytes or policy.bucket_bytes or (SMALL_MODEL_BUCKET_BYTES if ends_first else None)
    numel = bucket_numel(entries, nbytes, crosses=comm.tree.group < comm.world)
    buckets = BucketList.pack(inventory.members, comm.world, comm.tree.group, numel, optimizers, catalogue, comm.rank)
    groups = _cut_groups(comm, inventory.groups, undo)
    for bucket in buckets.every:
        bucket.comm = groups[bucket.ranks]
        bucket.divisor = None if bucket.ranks is None else comm.world
    mesh = Mesh.cut(comm, policy.shard_over or comm.world)
    undo.callback(mesh.close)
    undo.callback(tensors_as_they_are((*inventory.parameters, *inventory.buffers)))
    store = _store(policy, mesh, groups, inventory, buckets, owner)
    trained = Trained(inventory, buckets, optimizers, options.loss_reduction, options.accumulate)
    unchanged = Unchanged(comm, inventory, store, checksums=options.check == "edits")
    torn = Torn(inventory, comm.number, optimizers)
    kind = _EXCHANGES[policy.keeps, policy.owns]
    exchanges = {each: kind(each, numel, inventory.device, policy.reduce) for each in groups.values()}
    access = WholeAccess() if owner is None else ShardedAccess(comm, buckets.grouped)
    adds_up_here = policy.accumulate_at is AccumulateAt.RANK
    scaling = None if options.loss_scale is None else shared(options.loss_scale)
    summed = SummedGradients(comm, trained, exchanges, access, unchanged, torn, adds_up_here, not ends_first, scaling)
    if scaling is not None:
        scaling.follow(summed)
        undo.callback(scaling.leave, summed)
    own = OwnGradients(trained, SoloCommunicator(comm.options), has_others=teams.count > 1)
    for path in (summed, own):
        undo.callback(backward.forget, path)
    engine = Engine(options, Parts(teams, mesh, groups, policy, store, trained, unchanged, torn, summed, own))
    trained.shards = {
        each: updater_for(each, buckets, owner, policy.merges is Merges.ALWAYS, inventory.parameters, each in whole)
        for each in optimizers
    }
    return engine


def _ends_first(teams: Teams, entries: Sequence[Entry], device: torch.device, options: StepOptions) -> bool:
    """Whether gradients are exchanged when a backward has ended, instead of while it runs.

    Ranks of one host move their data themselves. So nothing is hidden behind a backward, and a small model spends
    more time in hooks than it can gain from the cache. It is the same over every transport: a gradient that autograd
    makes in two parts would otherwise be reduced as one here and as two there.
    """
    tree = teams.everyone.tree  # in a warm-up all teams sum
    by_themselves = device.type == "cpu" and tree.group == tree.world
    small = total_bytes(entries) <= SMALL_MODEL_BYTES
    # `p.grad` must not show a scaled gradient. One that arrives twice would be added up by autograd, in its own dtype.
    plain = options.loss_scale is None and all(entry.roles.sum == entry.dtype for entry in entries)
    return by_themselves and small and plain and options.bucket_bytes is None


def _own_whole(
    inventory: Inventory, optimizers: Sequence[Optimizer], whole: Sequence[Optimizer]
) -> dict[TrackedParameter, int]:
    """Let the parameters of these optimizers have one owner each; gives what a step of each costs. Those that are in no
    group, as frozen ones may be, might be given to one of them later."""
    if not whole:
        return {}
    having = {id(p): each for each in optimizers for group in each.param_groups for p in group["params"]}
    work: dict[TrackedParameter, int] = {}
    for optimizer in whole:
        its = [m for m in inventory.members if having.get(id(m.parameter), whole[0]) is optimizer]
        for member in its:
            member.entry = replace(member.entry, placement=Placement.LAYER)
        work.update(work_of(optimizer, its))
    return work


def _cut_groups(comm: Communicator, groups: Groups, undo: ExitStack) -> dict[Ranks, Communicator]:
    """The communicators of the groups that this rank is in. Collective."""
    cut = groups.cut(comm)
    for ranks, group in cut.items():
        if ranks is not None:
            undo.callback(group.close)
    return cut


def _store(
    policy: ExchangePolicy,
    mesh: Mesh,
    groups: Mapping[Ranks, Communicator],
    inventory: Inventory,
    buckets: BucketList,
    owner: int | None,
) -> ParameterStore:
    """Where the parameters live: one store, or one for each group of ranks that hold the same. Collective."""
    if not inventory.groups:
        return _STORES[policy.home](mesh, inventory, buckets.every, owner)
    stores: dict[Communicator, ParameterStore] = {}
    for ranks, comm in groups.items():
        # Ranks of a group on several hosts have no memory in common unless it is made of whole hosts.
        home = Home.PRIVATE if policy.home is Home.HOST and not comm.shares_memory else policy.home
        its = replace(inventory, members=tuple(member for member in inventory.members if member.ranks == ranks))
        held = [bucket for bucket in buckets.every if bucket.ranks == ranks]
        place = None if owner is None else comm.rank
        stores[comm] = _STORES[home](Mesh.cut(comm, comm.world), its, held, place)
    return GroupedStore(mesh, inventory, buckets.every, owner, stores)
