"""Carrying out a plan.

Every change to a user's object first registers how to undo it. Rank 0's values are sent last: by then every rank has
agreed, so no rank's own values are overwritten by a call that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from sherd import data, observe
from sherd.api.helpers.coordination import Failure, failure_of, raise_any
from sherd.api.members import enrol, refuse_foreign
from sherd.api.plan import Plan
from sherd.api.real_steps import counted, is_inside_a_window, waits
from sherd.api.recording import record
from sherd.api.training import Training, training_of
from sherd.comm import Communicator, labelled
from sherd.data.restore import as_it_is
from sherd.engine.assembly import assemble
from sherd.engine.buckets.precision import Precision
from sherd.engine.engine import Engine
from sherd.engine.modules.casting import Autocasting, Casting
from sherd.engine.modules.sync_batch_norm import share_statistics
from sherd.engine.parameters.mesh import Teams
from sherd.errors import CommError
from sherd.machine import half_kernels, native_half
from sherd.patches import grad_scaler, optimizer_object, schedulers

log = logging.getLogger("sherd")

T = TypeVar("T")


def carry_out(plan: Plan, comm: Communicator, undo: ExitStack) -> None:
    """Carry out the plan: from now on, training is distributed. Collective."""
    engine = together(comm, lambda: _prepare(plan, comm, undo))
    engine.take_over()
    if observe.recording():
        record(plan, comm)
    for sharding in plan.shardings[:1]:
        data.announce(sharding, comm, plan.options.accumulate)
    comm.counters.begin_steps()


def together(comm: Communicator, do: Callable[[], T]) -> T:
    """What `do` returns here, if it raised on no rank; else an error on all ranks, so that none waits. Collective.

    An interrupt concerns this rank alone: it is raised at once, and closing the communicator tells the others.
    """
    try:
        made = do()
    except Exception as error:
        with suppress(CommError):  # it may be what failed, or the others are in another call and fail there
            _tell(comm, failure_of(error))
        raise
    raise_any(comm, "sherd.distribute", _tell(comm, None))
    return made


def _tell(comm: Communicator, mine: Failure | None) -> list[Failure | None]:
    with labelled("sherd.distribute"), comm.counters.agreeing():
        return comm.all_gather_object(mine)


def _prepare(plan: Plan, comm: Communicator, undo: ExitStack) -> Engine:
    """Do everything except taking rank 0's parameter values."""
    for optimizer in plan.optimizers:
        undo.callback(_as_it_is(optimizer))
    teams = Teams.cut(comm, plan.strategy.team(comm))
    undo.callback(teams.close)
    engine = assemble(teams, plan.inventory, plan.policy(teams), plan.options, plan.optimizers, undo)
    for optimizer in plan.optimizers:
        optimizer_object.install(optimizer, training_of)
    training = Training(engine, plan.strategy)
    owners: list[nn.Module | Optimizer] = [*plan.models, *plan.optimizers]
    for thing in owners:
        undo.callback(training.disown, thing)
        training.own(thing)
    enrol(plan.model, engine, undo)
    share_statistics(plan.model, engine, undo)
    _cast(plan, comm, undo)
    for index, sharding in enumerate(plan.shardings):
        sharding.apply(undo, trains=index == 0)
    refuse_foreign()
    if plan.options.accumulate > 1 or plan.options.loss_scale is not None:
        schedulers.install(waits)
    if plan.options.accumulate > 1 or teams.count > 1:
        grad_scaler.install_steps(is_inside_a_window, counted)
    return engine


def _cast(plan: Plan, comm: Communicator, undo: ExitStack) -> None:
    """Cast what modules take and return, if the precision asks for it."""
    half = Precision.of(plan.options).half
    if plan.options.precision != "fp32" and plan.inventory.device.type == "cpu" and comm.rank == 0:
        _warn_of_emulation(half or torch.bfloat16)
    casting: Casting | Autocasting
    if half is not None and plan.kept is not None:
        casting = Casting(plan.models, half, plan.kept)
    elif plan.options.precision == "bf16-autocast":
        casting = Autocasting(plan.models, torch.bfloat16)
    else:
        return
    undo.callback(casting.remove)
    casting.install()


@cache
def _warn_of_emulation(dtype: torch.dtype) -> None:
    """Say once per process that this CPU has no kernels for a dtype."""
    if not native_half(dtype):
        log.warning("precision= will be slow here: this CPU has %s", half_kernels())


def _as_it_is(optimizer: Optimizer) -> Callable[[], None]:
    """A function that later gives `optimizer` back its present class, attributes, groups and state."""
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
