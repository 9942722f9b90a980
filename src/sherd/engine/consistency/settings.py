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
from sherd.engine.buckets.groups import Groups
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.consistency.agreement import Settings, settings_of
from sherd.engine.gradients.gradient import Trained
from sherd.errors import Diverged

Schedules = list[tuple[str, int]]
"""The classes of an optimizer's schedulers, and the number of steps that each has taken."""

_MEAN = "torch.distributed.all_reduce({}, op=torch.distributed.ReduceOp.AVG)"


Outline = tuple[str, Settings]
"""The class of an optimizer, and the settings of its groups, with the names of their parameters."""


def compare_optimizers(
    comm: Communicator, optimizers: Sequence[Optimizer], inventory: Inventory, step: int | None = None
) -> None:
    """Refuse optimizers that differ between ranks, in a step or at the start. Collective."""
    names = {id(member.parameter): member.name for member in inventory.members}
    by_rank, rank = comm.compare_object([_outline(optimizer, names) for optimizer in optimizers])
    first = 0
    if rank and inventory.groups:
        by_rank, first, rank = _compare_by_group(by_rank, inventory.groups)
    if not rank:
        return
    pairs = zip(by_rank[first], by_rank[rank], strict=True)
    at, ((kind, groups), (other_kind, others)) = next(
        (at, (one, other)) for at, (one, other) in enumerate(pairs) if one != other
    )
    pair = comm.numbers[first], comm.numbers[rank]
    what, scheduled = _difference(kind, groups, other_kind, others, pair)
    if len(optimizers) > 1:
        what = f"of optimizer {at} ({kind}), {what}" if kind == other_kind else f"as optimizer {at}, {what}"
    when = "at sherd.distribute" if step is None else f"in step {step}"
    if step is None or not scheduled:
        raise Diverged(f"{when} the ranks' optimizers differ: {what}; use the same settings on every rank", pair)
    with comm.counters.agreeing():
        schedules = comm.all_gather_object(_schedules_of(optimizers[at]))
    raise Diverged(f"{when} {_cause(schedules[first], schedules[rank], pair, what)}", pair)


def _compare_by_group(by_rank: Sequence[list[Outline]], groups: Groups) -> tuple[list[list[Outline]], int, int]:
    """The first two ranks whose optimizers differ in what both hold, and their outlines with nothing else in them; 0
    and 0 if none do."""
    for rank, mine in enumerate(by_rank):
        named = {groups.ranks_of(name) for _, outline in mine for group in outline for name in group["parameters"]}
        for first in sorted({0, *(ranks[0] for ranks in named if ranks is not None)}):
            both = [*by_rank]
            for each in (first, rank):
                both[each] = [(kind, _common(outline, (first, rank), groups)) for kind, outline in by_rank[each]]
            if both[first] != both[rank]:
                return both, first, rank
    return [*by_rank], 0, 0


def _common(outline: Settings, two: tuple[int, int], groups: Groups) -> Settings:
    """The settings with the parameters that both ranks hold."""

    def is_held(name: str) -> bool:
        ranks = groups.ranks_of(name)
        return ranks is None or all(rank in ranks for rank in two)

    return [{**group, "parameters": [*filter(is_held, group["parameters"])]} for group in outline]


def _outline(optimizer: Optimizer, names: Mapping[int, str]) -> Outline:
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


def compare_unfrozen(comm: Communicator, members: Sequence[TrackedParameter], trained: Trained) -> set[str]:
    """Refuse parameters that were unfrozen on some of their ranks only; the names of what this rank does not hold.
    Collective."""
    names, step, groups = [member.name for member in members], trained.steps, trained.inventory.groups
    note = "Where ranks hold different parameters, unfreeze some on every rank before a backward" if groups else ""
    with labelled(f"unfreezing {', '.join(names)} before step {step}", note):
        by_rank, rank = comm.compare_object(names)
    if groups:
        return _unfrozen_by_group(by_rank, groups, step) - set(names)
    if rank:
        only = sorted(set(by_rank[rank]) ^ set(by_rank[0]))
        one, two = comm.numbers[0], comm.numbers[rank]
        raise Diverged(
            f"before step {step} rank {one} and rank {two} unfroze different parameters: {only} on one of them only; "
            f"set the same requires_grad on every rank",
            ranks=(one, two),
        )
    return set()


def _unfrozen_by_group(by_rank: Sequence[Sequence[str]], groups: Groups, step: int) -> set[str]:
    """What was unfrozen on any rank, and so on all that hold it."""
    for name in sorted({name for names in by_rank for name in names}):
        did = [rank for rank, names in enumerate(by_rank) if name in names]
        if missing := [rank for rank in groups.ranks_of(name) or range(len(by_rank)) if rank not in did]:
            raise Diverged(
                f"before step {step} {name!r} was unfrozen on rank {did[0]} and not on rank {missing[0]}; set the same "
                f"requires_grad on every rank that holds it",
                ranks=(did[0], missing[0]),
            )
    return {name for names in by_rank for name in names}
