"""What ranks tell each other at the end of a round, in one small sum.

Some of it none of them knows alone: which parameters were used anywhere, whether every sum is finite, what all
contributions weigh together, which buckets have late gradients, whether somebody edited a parameter. The rest must be
the same everywhere, and is not if the ranks' programs have come apart: the step, the backwards in its gradient, the
optimizer's hyper-parameters, which parameters require a gradient.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.gradients.gradient import Gradient
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import Diverged

Settings = list[dict[str, Any]]
"""An optimizer's hyper-parameters, group by group."""

_TRAINABLE = float(1 << 24)
"""How many ranks require a gradient of an entry is counted in units of this, on top of how many have used it."""


@dataclass(frozen=True)
class Report:
    """What one rank says."""

    step: int
    backwards: int
    """how many are in the gradient"""
    settings: int
    """a hash of the optimizer's hyper-parameters, below 2**20"""
    finite: bool
    weight: float
    weighed: bool
    edited: bool
    """whether a parameter was edited since the last step"""
    late: Sequence[bool]
    """by bucket: whether a gradient arrived after it was launched"""
    used: Sequence[bool]
    """by entry"""
    trainable: Sequence[bool]
    """by entry"""


@dataclass(frozen=True)
class Agreement:
    """What all ranks say together."""

    finite: bool
    weight: float
    weighing: float
    """the number of ranks that weighed"""
    edited: bool
    same_settings: bool
    uniform: bool
    """whether every rank used every entry that requires a gradient"""
    late: list[bool]
    used: list[bool]


def report(
    buckets: BucketList,
    gradient: Gradient,
    step: int,
    optimizer: Optimizer | None,
    edited: bool,
    late: Iterable[Bucket],
) -> Report:
    """What this rank says about its gradient."""
    late = set(late)
    with bypass_torch_function():
        trainable = [member.parameter.requires_grad for member in buckets.parameters]
    return Report(
        step=step,
        backwards=gradient.backwards,
        settings=0 if optimizer is None else hash_of(settings_of(optimizer)),
        finite=_finite(buckets.table.norms),
        weight=gradient.weights.local,
        weighed=bool(gradient.weights.weighed),
        edited=edited,
        late=[bucket in late for bucket in buckets.buckets],
        used=[member.used_here for member in buckets.parameters],
        trainable=trainable,
    )


def take_over(agreed: Agreement, buckets: BucketList, gradient: Gradient, world: int) -> None:
    """Take over what all ranks say."""
    gradient.finite = agreed.finite
    gradient.weights.agreed(agreed.weight, agreed.weighing, world)
    for member, used in zip(buckets.parameters, agreed.used, strict=True):
        member.used |= used
        member.used_here = False  # who drops a gradient now must not find it used again


def _finite(norms: Tensor) -> bool:
    # The sum is faster than a test of each; where it is not finite, squaring may be the reason.
    return math.isfinite(float(torch.dot(norms, norms))) or bool(torch.isfinite(norms).all())


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


def agree(comm: Communicator, report: Report, buckets: BucketList) -> Agreement:
    """Sum the ranks' reports; raise if their programs have come apart. Collective."""
    known = [float(not report.finite), report.weight, float(report.weighed), float(report.edited)]
    common = [float(number) for number in (report.step, report.backwards, report.settings)]
    entries = [_TRAINABLE * can + has for can, has in zip(report.trainable, report.used, strict=True)]
    parts = [known, common, [number * number for number in common], list(map(float, report.late)), entries]
    with comm.counters.agreeing():
        total = comm.all_reduce(torch.tensor(list(chain.from_iterable(parts)), dtype=torch.float64)).wait()
        found: list[list[float]] = [part.tolist() for part in torch.split(total, [len(part) for part in parts])]
        (bad, weight, weighing, edited), sums, squares, late, entries = found
        same = [_same(one, other, comm.world) for one, other in zip(sums, squares, strict=True)]
        if not same[0] or not same[1]:
            raise _apart(comm, report)
        _compare_trainable(comm, report, entries, buckets)
    used = [count % _TRAINABLE > 0 for count in entries]
    uniform = all(count % _TRAINABLE == count // _TRAINABLE for count in entries)
    return Agreement(bad == 0, weight, weighing, edited > 0, same[2], uniform, [count > 0 for count in late], used)


def agree_on_edits(comm: Communicator, buckets: BucketList, seen: int, assigned: Sequence[str], step: int) -> bool:
    """Whether gradients that were edited are finite everywhere; raise if ranks edited them differently. Collective.

    `seen` is a hash of what this rank saw of them afterwards, below 2**20; `assigned` names those that were not edited
    in place but set, as `p.grad = ...` does.
    """
    finite = _finite(buckets.table.norms)
    mine = torch.tensor([float(not finite), float(seen), float(seen) ** 2], dtype=torch.float64)
    with comm.counters.agreeing():
        bad, one, other = comm.all_reduce(mine).wait().tolist()
        if not _same(one, other, comm.world):
            raise _edited_apart(comm, seen, assigned, step)
    return bool(bad == 0)


def _edited_apart(comm: Communicator, seen: int, assigned: Sequence[str], step: int) -> Diverged:
    everybody = comm.all_gather_object((seen, list(assigned)))
    rank = next(rank for rank, (theirs, _) in enumerate(everybody) if theirs != everybody[0][0])
    names = everybody[0][1] or everybody[rank][1]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what = (
            f"p.grad of {names[0]!r}{others} was set to different values on rank 0 and rank {rank}; all ranks must set "
            f"the same: average it over the ranks first, by torch.distributed.all_reduce(gradient, "
            f"op=torch.distributed.ReduceOp.AVG), and draw noise from the same seed"
        )
    else:
        what = (
            f"p.grad was edited in place differently on rank 0 and rank {rank}; edit it alike on all ranks, by numbers "
            f"that all of them have (to clip, sherd.clip_grad_norm_ and clip_norm= give the same bits everywhere)"
        )
    return Diverged(f"before step {step} {what}", ranks=(0, rank))


def _same(total: float, squares: float, world: int) -> bool:
    """Whether numbers are all the same: exactly if the square of their sum is their count times the squares' sum."""
    return total * total == world * squares


def _apart(comm: Communicator, report: Report) -> Diverged:
    everybody, rank = comm.compare_object((report.step, report.backwards))
    (step, backwards), (other_step, other_backwards) = everybody[0], everybody[rank]
    if step != other_step:
        what = (
            f"rank 0 is in step {step} and rank {rank} in step {other_step}; take the same steps on every rank, and "
            f"let all of them decide together where one is skipped"
        )
    else:
        what = (
            f"in step {step} the gradient has {backwards} backwards on rank 0 and {other_backwards} on rank {rank}; "
            f"call backward and zero_grad alike on every rank (one without data can weigh nothing: "
            f"sherd.weigh(model, 0))"
        )
    return Diverged(f"the ranks have come apart: {what}", ranks=(0, rank))


def _compare_trainable(comm: Communicator, report: Report, counts: Sequence[float], buckets: BucketList) -> None:
    for entry, count in enumerate(counts):
        if count // _TRAINABLE not in (0, comm.world):
            can = comm.all_gather_object(report.trainable[entry])
            yes, no = can.index(True), can.index(False)
            name = buckets.parameters[entry].name
            raise Diverged(
                f"step {report.step}: parameter {name!r} requires a gradient on rank {yes} and not on rank {no}; set "
                f"requires_grad alike on every rank",
                ranks=(yes, no),
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
