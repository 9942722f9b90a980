"""An optimizer's hyper-parameters, which must be the same on all ranks at every step.

They seldom are by accident: a schedule that follows each rank's own loss is enough to make them differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.errors import Diverged

Settings = list[dict[str, Any]]


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


def compare_optimizers(comm: Communicator, optimizer: Optimizer, names: Mapping[int, str], when: str) -> None:
    """Refuse optimizers that differ between the ranks. `names` has the parameters' names by identity. Collective."""
    groups = settings_of(optimizer)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        settings["parameters"] = [names.get(id(parameter), "?") for parameter in group["params"]]
    everybody, rank = comm.compare_object((type(optimizer).__name__, groups))
    if rank:
        (kind, groups), (other_kind, others) = everybody[0], everybody[rank]
        what = _difference(kind, groups, other_kind, others, rank)
        raise Diverged(f"{when} the ranks' optimizers differ: {what}; use the same on every rank", ranks=(0, rank))


def _difference(kind: str, groups: Settings, other_kind: str, others: Settings, rank: int) -> str:
    if kind != other_kind:
        return f"rank 0 has {kind} where rank {rank} has {other_kind}"
    if len(groups) != len(others):
        return f"rank 0 has {len(groups)} parameter groups where rank {rank} has {len(others)}"
    for index, (group, other) in enumerate(zip(groups, others, strict=True)):
        for name in (*group, *other):
            if group.get(name) != other.get(name):
                return f"group {index} has {name}={group.get(name)} on rank 0 and {other.get(name)} on rank {rank}"
    return "in a way that has no name"


def _comparable(value: Any) -> Any:
    """The value, if it means the same in another process; an object of some other kind counts as its type."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "Tensor"
    if isinstance(value, tuple | list):
        return [_comparable(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
