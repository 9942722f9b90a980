"""The optimizers' hyper-parameters, which must be the same on all ranks at every step.

Typical causes of a difference are a schedule that follows each rank's own loss, and a rank that leaves a loop early and
advances its schedule while the others are still in the loop.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.consistency.agreement import Settings, settings_of
from sherd.errors import Diverged

Schedules = list[tuple[str, int]]
"""The classes of an optimizer's schedulers, and the number of steps that each has taken."""

_MEAN = "torch.distributed.all_reduce({}, op=torch.distributed.ReduceOp.AVG)"


def compare_optimizers(
    comm: Communicator, optimizers: Sequence[Optimizer], members: Sequence[TrackedParameter], step: int | None = None
) -> None:
    """Refuse optimizers that differ between ranks, in a step or at the start. Collective."""
    names = {id(member.parameter): member.name for member in members}
    by_rank, rank = comm.compare_object([_outline(optimizer, names) for optimizer in optimizers])
    if not rank:
        return
    pairs = zip(by_rank[0], by_rank[rank], strict=True)
    at, ((kind, groups), (other_kind, others)) = next(
        (at, (one, other)) for at, (one, other) in enumerate(pairs) if one != other
    )
    pair = comm.numbers[0], comm.numbers[rank]
    what, scheduled = _difference(kind, groups, other_kind, others, pair)
    if len(optimizers) > 1:
        what = f"of optimizer {at} ({kind}), {what}" if kind == other_kind else f"as optimizer {at}, {what}"
    when = "at sherd.distribute" if step is None else f"in step {step}"
    if step is None or not scheduled:
        raise Diverged(f"{when} the ranks' optimizers differ: {what}; use the same settings on every rank", pair)
    with comm.counters.agreeing():
        schedules = comm.all_gather_object(_schedules_of(optimizers[at]))
    raise Diverged(f"{when} {_cause(schedules[0], schedules[rank], pair, what)}", pair)


def _outline(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[str, Settings]:
    """The class of an optimizer, and the settings and parameters of its groups."""
    groups = settings_of(optimizer)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        settings["parameters"] = [names.get(id(parameter), "?") for parameter in group["params"]]
    return type(optimizer).__name__, groups


def _difference(
    kind: str, groups: Settings, other_kind: str, others: Settings, pair: tuple[int, int]
) -> tuple[str, bool]:
    """The first difference between these two ranks, and whether it is a value that a schedule may have set."""
    one, two = pair
    if kind != other_kind:
        return f"rank {one} has {kind} where rank {two} has {other_kind}", False
    if len(groups) != len(others):
        return f"rank {one} has {len(groups)} parameter groups where rank {two} has {len(others)}", False
    for index, (group, other) in enumerate(zip(groups, others, strict=True)):
        for name in (*group, *other):
            if group.get(name) != other.get(name):
                text = f"group {index} has {name}={group.get(name)} on rank {one} and {other.get(name)} on rank {two}"
                return text, name != "parameters"
    return "in an unrecognised field", False


def _schedules_of(optimizer: Optimizer) -> Schedules:
    """The schedulers of an optimizer, which has no reference to them. Slow, for errors only."""
    # type() and not isinstance(), which may run an object's own code.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    own = [each for each in found if getattr(each, "optimizer", None) is optimizer]
    return sorted((type(each).__name__, int(getattr(each, "last_epoch", 0))) for each in own)


def _cause(first: Schedules, other: Schedules, pair: tuple[int, int], what: str) -> str:
    """Why hyper-parameters differ on these two ranks, judging by their schedulers, and the fix."""
    differ = [(one, two) for one, two in zip(first, other, strict=False) if one != two and one[0] == two[0]]
    if differ:
        (name, taken), (_, others) = differ[0]
        ahead, behind, most, least = (*pair[::-1], others, taken) if others > taken else (*pair, taken, others)
        return (
            f"rank {ahead} is ahead of rank {behind} in its schedule: its {name} has taken {most} steps, that of rank "
            f"{behind} {least}, so the ranks' optimizers differ ({what}). A rank that leaves a loop early, by its own "
            f"loss or KL, runs ahead of the others; let all ranks decide together: "
            f"{_MEAN.format('kl')} before `if kl > target_kl: break`"
        )
    if any(name == ReduceLROnPlateau.__name__ for name, _ in first):
        return (
            f"the ranks' optimizers differ: {what}, since the ReduceLROnPlateau of each rank follows its own metric; "
            f"give all of them the mean: {_MEAN.format('metric')} before scheduler.step(metric)"
        )
    return (
        f"the ranks' optimizers differ: {what}. The cause may be a schedule that follows a rank's own loss or KL, or "
        f"a rank that leaves a loop early and is ahead in its schedule; let all ranks decide together, by their mean: "
        f"{_MEAN.format('value')}"
    )


def compare_unfrozen(comm: Communicator, members: Sequence[TrackedParameter], step: int) -> None:
    """Refuse parameters that were unfrozen on some ranks only. Collective."""
    names = [member.name for member in members]
    with labelled(f"unfreezing {', '.join(names)} before step {step}"):
        by_rank, rank = comm.compare_object(names)
    if rank:
        only = sorted(set(by_rank[rank]) ^ set(by_rank[0]))
        one, two = comm.numbers[0], comm.numbers[rank]
        raise Diverged(
            f"before step {step} rank {one} and rank {two} unfroze different parameters: {only} on one of them only; "
            f"set the same requires_grad on every rank",
            ranks=(one, two),
        )
