"""An engine put together from what a strategy chose: the only place that asks what that was."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.config import StepOptions
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.exchange import Exchange, ReplicaExchange, SliceExchange, WholeExchange
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.choices import AccumulateAt, Choices, Gradients, Parameters
from sherd.engine.engine import Engine, Parts
from sherd.engine.gradients.access import GradAccess, ShardedAccess, WholeAccess
from sherd.engine.gradients.gradient import Window
from sherd.engine.optimizer.elementwise import own_collective, why_not_elementwise
from sherd.engine.optimizer.unsplit import updater_for
from sherd.engine.parameters.flat_stores import PrivateStore
from sherd.engine.parameters.gathered.host_store import HostGatheredStore
from sherd.engine.parameters.gathered.store import GatheredStore
from sherd.engine.parameters.host_store import HostStore
from sherd.engine.parameters.mesh import Mesh
from sherd.engine.parameters.restore import tensors_as_they_are
from sherd.engine.parameters.store import ParameterStore
from sherd.errors import ConfigError
from sherd.layout.packing import bucket_numel
from sherd.patches import backward

log = logging.getLogger("sherd")

_STORES: dict[Parameters, type[ParameterStore]] = {
    Parameters.REPLICAS: PrivateStore,
    Parameters.PRIVATE: PrivateStore,
    Parameters.GATHERED: GatheredStore,
    Parameters.GATHERED_BY_HOST: HostGatheredStore,
    Parameters.HOST: HostStore,
}
_EXCHANGES: dict[Gradients, type[Exchange]] = {
    Gradients.REPLICAS: ReplicaExchange,
    Gradients.WHOLE: WholeExchange,
    Gradients.SLICES: SliceExchange,
}


def settled(choices: Choices, options: StepOptions) -> Choices:
    """What a strategy chose, with what the user said about accumulation."""
    if options.accumulate_at is not None:
        choices = dataclasses.replace(choices, accumulate_at=AccumulateAt(options.accumulate_at))
    if choices.accumulate_at is AccumulateAt.RANK and choices.gradients is Gradients.SLICES:
        # A rank that adds up its own gradient needs room for all of it.
        choices = dataclasses.replace(choices, gradients=Gradients.WHOLE)
    return choices


def check_optimizer(optimizer: Optimizer, choices: Choices, strategy: str) -> None:
    """Refuse an optimizer that cannot work in parts where that is what the strategy asks for."""
    name = type(optimizer).__name__
    if choices.parameters is Parameters.REPLICAS:
        # Not refused: one that divides the work among ranks, and does nothing to gradients, is right here too.
        if (collective := own_collective(optimizer)) and torch.distributed.get_rank() == 0:
            log.warning(
                "%s communicates on its own: its step() calls %s of torch.distributed. sherd has averaged gradients by "
                "then, and the ranks have the same ones; use the optimizer's single-process variant if it has one",
                name,
                collective,
            )
        return
    if why_not := why_not_elementwise(optimizer):
        own_words = f". Its own words: {why_not.own_words}" if why_not.own_words else ""
        raise ConfigError(
            f"{name} cannot be sharded: {why_not.cause}. strategy={strategy!r} updates every parameter in flat "
            f"parts; {why_not.fix}{own_words}"
        )


def assemble(
    comm: Communicator,
    inventory: Inventory,
    choices: Choices,
    options: StepOptions,
    optimizer: Optimizer | None,
    undo: ExitStack,
) -> Engine:
    """The engine of one model on one rank. It has the parameters from `take_over` on.

    `undo` gets what puts the model back as it was, in case `distribute` fails later.
    """
    entries = [member.entry for member in inventory.members]
    numel = bucket_numel(entries, options.bucket_bytes, crosses=comm.tree.group < comm.world)
    buckets = BucketList.pack(inventory.members, comm.world, comm.tree.group, numel, optimizer)
    mesh = Mesh.cut(comm, choices.shard_over)
    undo.callback(mesh.close)
    undo.callback(tensors_as_they_are((*inventory.parameters, *inventory.buffers)))
    parts = Parts(
        mesh=mesh,
        buckets=buckets,
        store=_STORES[choices.parameters](mesh, inventory, buckets, _owner(comm, choices)),
        exchange=_EXCHANGES[choices.gradients](comm, numel, inventory.device),
        access=_access(comm, choices),
        window=Window(options.accumulate),
        adds_up_here=choices.accumulate_at is AccumulateAt.RANK,
    )
    engine = Engine(comm, inventory, options, optimizer, parts)
    undo.callback(backward.forget, engine)
    if optimizer is not None:
        engine.updater = updater_for(optimizer, buckets, _owner(comm, choices), inventory.parameters)
    return engine


def _owner(comm: Communicator, choices: Choices) -> int | None:
    """Whose slices this rank updates; None if it updates everything."""
    return None if choices.parameters is Parameters.REPLICAS else comm.rank


def _access(comm: Communicator, choices: Choices) -> GradAccess:
    return WholeAccess() if choices.gradients is Gradients.REPLICAS else ShardedAccess(comm)
