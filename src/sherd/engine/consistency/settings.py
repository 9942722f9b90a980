"""An optimizer's hyper-parameters, which must be the same on all ranks at every step.

They seldom differ by accident: a schedule that follows each rank's own loss is enough, and so is a rank that leaves a
loop early, and takes the next step of its schedule while the others are still in the loop.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sherd.comm import Communicator
from sherd.errors import Diverged

Settings = list[dict[str, Any]]
Schedules = list[tuple[str, int]]
"""The classes of an optimizer's schedulers, and how many steps each has taken."""

_MEAN = "torch.distributed.all_reduce({}, op=torch.distributed.ReduceOp.AVG)"


def settings_of(optimizer: Optimizer) -> Settings:
    """Group by group, what can be compared: numbers and words, and how many parameters there are."""
    return [
        {name: _comparable(value) for name, value in group.items() if name not in ("params", "param_names")}
        | {"parameters": len(group["params"])}
        for group in optimizer.param_groups
    ]


def hash_of(settings: Settings) -> int:
    """A number below 2**20 that tells settings apart, nearly always."""
    return zlib.crc32(repr(settings).encode()) >> 12


def compare_optimizers(
    comm: Communicator, optimizer: Optimizer, names: Mapping[int, str], step: int | None = None
) -> None:
    """Refuse optimizers that differ between the ranks, in a step or at the start. Collective.

    `names` has the parameters' names by identity.
    """
    groups = settings_of(optimizer)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        settings["parameters"] = [names.get(id(parameter), "?") for parameter in group["params"]]
    everybody, rank = comm.compare_object((type(optimizer).__name__, groups))
    if not rank:
        return
    (kind, groups), (other_kind, others) = everybody[0], everybody[rank]
    what, scheduled = _difference(kind, groups, other_kind, others, rank)
    when = "at sherd.distribute" if step is None else f"in step {step}"
    if step is None or not scheduled:
        raise Diverged(f"{when} the ranks' optimizers differ: {what}; use the same on every rank", (0, rank))
    with comm.counters.agreeing():
        schedules = comm.all_gather_object(_schedules_of(optimizer))
    raise Diverged(f"{when} {_cause(schedules[0], schedules[rank], rank, what)}", (0, rank))


def _difference(kind: str, groups: Settings, other_kind: str, others: Settings, rank: int) -> tuple[str, bool]:
    """What differs first, and whether it is a value that a schedule may have set."""
    if kind != other_kind:
        return f"rank 0 has {kind} where rank {rank} has {other_kind}", False
    if len(groups) != len(others):
        return f"rank 0 has {len(groups)} parameter groups where rank {rank} has {len(others)}", False
    for index, (group, other) in enumerate(zip(groups, others, strict=True)):
        for name in (*group, *other):
            if group.get(name) != other.get(name):
                text = f"group {index} has {name}={group.get(name)} on rank 0 and {other.get(name)} on rank {rank}"
                return text, name != "parameters"
    return "in an unrecognised field", False


def _schedules_of(optimizer: Optimizer) -> Schedules:
    """The schedulers of an optimizer, which does not know them. Slow, for errors only."""
    # By their type: to ask an object itself what it is may run code of whoever made it.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    own = [each for each in found if getattr(each, "optimizer", None) is optimizer]
    return sorted((type(each).__name__, int(getattr(each, "last_epoch", 0))) for each in own)


def _cause(first: Schedules, other: Schedules, rank: int, what: str) -> str:
    """Why hyper-parameters differ on rank 0 and `rank`, as far as their schedulers tell, and what to do about it."""
    differ = [(one, two) for one, two in zip(first, other, strict=False) if one != two and one[0] == two[0]]
    if differ:
        (name, taken), (_, others) = differ[0]
        ahead, behind, most, least = (rank, 0, others, taken) if others > taken else (0, rank, taken, others)
        return (
            f"rank {ahead} is ahead of rank {behind} in its schedule: its {name} has taken {most} steps, that of rank "
            f"{behind} {least}, so the ranks' optimizers differ ({what}). A rank that leaves a loop early, by its own "
            f"loss or KL, goes on while the others are still in it; let all ranks decide together: "
            f"{_MEAN.format('kl')} before `if kl > target_kl: break`"
        )
    if any(name == ReduceLROnPlateau.__name__ for name, _ in first):
        return (
            f"the ranks' optimizers differ: {what}, since the ReduceLROnPlateau of each rank follows a metric of its "
            f"own; give all of them the mean: {_MEAN.format('metric')} before scheduler.step(metric)"
        )
    return (
        f"the ranks' optimizers differ: {what}. A schedule that follows a rank's own loss or KL does that, and so does "
        f"a rank that leaves a loop early and is ahead in its schedule; let all ranks decide together, by the mean "
        f"over them: {_MEAN.format('value')}"
    )


def _comparable(value: Any) -> Any:
    """The value, if it means the same in another process; an object of some other kind counts as its type."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "Tensor"
    if isinstance(value, tuple | list):
        return [_comparable(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    # Of a subclass, such as an enum's or numpy's, what it is to those who know only the class above.
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), type(value).__name__)
