"""A plan, carried out.

Whatever changes something of the user's first says how to put it back. Rank 0's values come last: by then every rank
has said that it refuses nothing, so that no other rank's values are overwritten in vain.
"""

from __future__ import annotations

from contextlib import ExitStack

from sherd import data, observe
from sherd.api import optimizer as optimizers
from sherd.api.foreign import refuse_foreign_steps
from sherd.api.membership import enrol
from sherd.api.plan import Plan
from sherd.api.recording import record
from sherd.api.schedulers import guard_schedulers
from sherd.api.together import together
from sherd.api.training import Training
from sherd.api.wrappers import refuse_wrappers
from sherd.comm import Communicator
from sherd.engine.assembly import assemble
from sherd.engine.engine import Engine
from sherd.engine.modules.sync_batch_norm import share_statistics


def carry_out(plan: Plan, comm: Communicator, undo: ExitStack) -> None:
    """Train as planned from now on. Collective."""
    engine = together(comm, lambda: _prepare(plan, comm, undo))
    engine.take_over()
    if observe.recording():
        record(plan, comm)
    for sharding in plan.shardings[:1]:
        data.announce(sharding, comm, plan.options.accumulate)


def _prepare(plan: Plan, comm: Communicator, undo: ExitStack) -> Engine:
    """Everything but the parameters' values."""
    if plan.optimizer is not None:
        undo.callback(optimizers.as_it_is(plan.optimizer))
    engine = assemble(comm, plan.inventory, plan.choices, plan.options, plan.optimizer, undo)
    if plan.optimizer is not None:
        optimizers.adopt(plan.optimizer)
    training = Training(engine, plan.strategy, plan.choices)
    for thing in (*plan.models, plan.optimizer):
        if thing is not None:
            undo.callback(training.disown, thing)
            training.own(thing)
    enrol(plan.model, engine, undo)
    share_statistics(plan.model, engine, undo)
    for index, sharding in enumerate(plan.shardings):
        sharding.apply(undo, trains=index == 0)
    refuse_foreign_steps()
    refuse_wrappers()
    if plan.options.accumulate > 1:
        guard_schedulers()
    return engine
