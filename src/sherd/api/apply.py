"""A plan, carried out.

Whatever changes something of the user's first says how to put it back. Rank 0's values come last: by then every rank
has said that it refuses nothing, so that no other rank's values are overwritten in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

from torch.optim import Optimizer

from sherd import data, observe
from sherd.api.members import enrol, refuse_foreign
from sherd.api.plan import Plan
from sherd.api.recording import record
from sherd.api.training import Training, find_training, training_of
from sherd.comm import Communicator, labelled
from sherd.data.restore import as_it_is
from sherd.engine.assembly import assemble
from sherd.engine.engine import Engine
from sherd.engine.modules.sync_batch_norm import share_statistics
from sherd.errors import CommError, ConfigError, SherdError
from sherd.patches import optimizer_object, schedulers

T = TypeVar("T")


def carry_out(plan: Plan, comm: Communicator, undo: ExitStack) -> None:
    """Train as planned from now on. Collective."""
    engine = together(comm, lambda: _prepare(plan, comm, undo))
    engine.take_over()
    if observe.recording():
        record(plan, comm)
    for sharding in plan.shardings[:1]:
        data.announce(sharding, comm, plan.options.accumulate)


def together(comm: Communicator, do: Callable[[], T]) -> T:
    """What `do` gives here, if it raised nothing on any rank. Collective.

    An interrupt is nobody else's: it goes by at once, and whoever closes the communicator tells the others.
    """
    try:
        made = do()
    except Exception as error:
        with suppress(CommError):  # that failed, or the others are elsewhere and hear of it now
            _tell(comm, (isinstance(error, ConfigError), f"{type(error).__name__}: {error}"))
        raise
    for rank, theirs in enumerate(_tell(comm, None)):
        if theirs is not None:
            by_choice, why = theirs
            kind = ConfigError if by_choice else SherdError
            raise kind(f"rank {comm.rank}: sherd.distribute was refused on rank {rank}, so on all ranks: {why}")
    return made


def _tell(comm: Communicator, mine: tuple[bool, str] | None) -> list[tuple[bool, str] | None]:
    with labelled("sherd.distribute"), comm.counters.agreeing():
        return comm.all_gather_object(mine)


def _prepare(plan: Plan, comm: Communicator, undo: ExitStack) -> Engine:
    """Everything but the parameters' values."""
    if plan.optimizer is not None:
        undo.callback(_as_it_is(plan.optimizer))
    engine = assemble(comm, plan.inventory, plan.choices, plan.options, plan.optimizer, undo)
    if plan.optimizer is not None:
        optimizer_object.install(plan.optimizer, training_of)
    training = Training(engine, plan.strategy, plan.choices)
    for thing in (*plan.models, plan.optimizer):
        if thing is not None:
            undo.callback(training.disown, thing)
            training.own(thing)
    enrol(plan.model, engine, undo)
    share_statistics(plan.model, engine, undo)
    for index, sharding in enumerate(plan.shardings):
        sharding.apply(undo, trains=index == 0)
    refuse_foreign()
    if plan.options.accumulate > 1:
        schedulers.install(_is_inside_a_window)
    return engine


def _as_it_is(optimizer: Optimizer) -> Callable[[], None]:
    """Gives `optimizer` back the class, the attributes, the groups and the state that it has now."""
    own, state = as_it_is(optimizer), dict(optimizer.state)
    groups = [dict(group) for group in optimizer.param_groups]

    def restore() -> None:
        own()
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)

    return restore


def _is_inside_a_window(optimizer: Optimizer) -> bool:
    training = find_training(optimizer)
    return training is not None and training.engine.window.open
