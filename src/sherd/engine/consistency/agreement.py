"""What ranks report to each other at the end of a round, in one small all-reduce.

Some of it no rank knows alone: which parameters were used on any rank, whether every sum is finite, the sum of all
weights, which buckets have late gradients, whether any rank edited a parameter. The rest differs only if the ranks are
out of sync: the step, the backwards in its gradient, the optimizer's hyper-parameters, which parameters require a
gradient.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.gradient import Gradient
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import Diverged

Settings = list[dict[str, Any]]
"""An optimizer's hyper-parameters, group by group."""

_TRAINABLE = 1 << 24
"""One number counts the ranks that used an entry, plus this for each rank on which it requires a gradient."""


@dataclass(frozen=True)
class Report:
    """What one rank reports."""

    gradients: Sequence[Gradient]
    """one per optimizer: its step, the number of backwards in it, and their weights"""
    settings: int
    """a hash of the optimizers' hyper-parameters, below 2**20"""
    finite: bool
    edited: bool
    """whether a parameter was edited since the last step"""
    late: Sequence[bool]
    """by bucket of the layout: whether a gradient arrived after it was launched"""
    used: bytearray
    """by entry of the layout: 1 or 0"""
    trainable: bytearray
    """by entry of the layout: 1 or 0"""
    scale: float | None = None
    """of losses, if they are scaled"""


@dataclass(frozen=True)
class Agreement:
    """The combined reports of all ranks."""

    finite: bool
    weights: Sequence[tuple[float, float]]
    """by gradient: the sum of the ranks' weights, and the number of ranks that weighed"""
    edited: bool
    same_settings: bool
    uniform: bool
    """whether every rank used every entry that requires a gradient"""
    late: list[bool]
    used: list[bool] | None
    """by entry; None if all were used"""


def report(
    buckets: BucketList,
    gradients: Sequence[Gradient],
    edited: bool,
    late: Iterable[Bucket],
    scale: float | None = None,
) -> Report:
    """This rank's report on its gradients."""
    late, partly = set(late), buckets.partly_held
    with bypass_torch_function():
        trainable = bytearray([member.parameter.requires_grad for member in buckets.parameters])
    used = bytearray([member.used_here for member in buckets.parameters])
    return Report(
        gradients=gradients,
        settings=hash_of([settings_of(each.optimizer, partly) for each in gradients if each.optimizer is not None]),
        finite=_finite(buckets.table.norms),
        edited=edited,
        late=[bucket in late for bucket in buckets.slots],
        used=_by_entry(used, buckets),
        trainable=_by_entry(trainable, buckets),
        scale=scale,
    )


def _by_entry(flags: bytearray, buckets: BucketList) -> bytearray:
    """Flags of this rank's parameters, with zeros for those that it does not hold."""
    if buckets.entries is buckets.parameters:
        return flags
    own = iter(flags)
    return bytearray([0 if member is None else next(own) for member in buckets.entries])


def apply(agreed: Agreement, buckets: BucketList, gradients: Sequence[Gradient], world: int) -> None:
    """Apply what the ranks agreed on."""
    reached = None  # the optimizers of which something was used; None: of all
    if buckets.grouped:
        reached = _look_elsewhere(agreed, buckets, gradients)
    elif agreed.used is not None and len(gradients) > 1:
        reached = {m.bucket.optimizer for m, used in zip(buckets.parameters, agreed.used, strict=True) if used}
    for gradient, (weight, weighing) in zip(gradients, agreed.weights, strict=True):
        if reached is None or gradient.optimizer in reached:
            gradient.weights.agreed(weight, weighing, world)
        else:
            gradient.weights.withdraw()
    for member, used in zip(buckets.parameters, _held(agreed, buckets), strict=False):
        member.used |= used
        member.used_here = False  # or the parameter would count as used again after zero_grad()


def _held(agreed: Agreement, buckets: BucketList) -> Iterable[bool]:
    """What was used of the parameters that this rank holds."""
    if agreed.used is None:
        return repeat(True)
    return (used for member, used in zip(buckets.entries, agreed.used, strict=True) if member is not None)


def _look_elsewhere(
    agreed: Agreement, buckets: BucketList, gradients: Sequence[Gradient]
) -> set[Optimizer | None] | None:
    """Note which gradients have parts that only other ranks hold; the optimizers of which something was used."""
    reached: set[Optimizer | None] = set()
    for each, used in zip(buckets.catalogue, agreed.used or repeat(True), strict=False):
        gradient = gradients[each.optimizer or 0]
        if each.member is None:
            gradient.elsewhere |= used
        if used:
            reached.add(gradient.optimizer if each.member is None else each.member.bucket.optimizer)
    return reached if len(gradients) > 1 else None


def _finite(norms: Tensor) -> bool:
    # The dot product is faster than a test of each norm; it can overflow even if all norms are finite.
    return math.isfinite(float(torch.dot(norms, norms))) or bool(torch.isfinite(norms).all())


def settings_of(optimizer: Optimizer, partly: Collection[int] = ()) -> Settings:
    """The comparable settings of each group: numbers, strings, and the number of parameters. Not counted are those that
    are `partly` held, on some ranks only; they are given by id."""
    return [
        {name: _comparable(value) for name, value in group.items() if name not in ("params", "param_names")}
        | {"parameters": len(group["params"]) - (sum(id(p) in partly for p in group["params"]) if partly else 0)}
        for group in optimizer.param_groups
    ]


def hash_of(settings: Sequence[Settings]) -> int:
    """A number below 2**20 that almost always differs for different settings."""
    return zlib.crc32(repr(settings).encode()) >> 12


def agree(comm: Communicator, report: Report, buckets: BucketList) -> Agreement:
    """Sum the ranks' reports; raise if the ranks are out of sync. Collective."""
    world, entries = comm.world, len(report.used)
    counts = [number for each in report.gradients for number in (each.steps, each.backwards)]
    weights = [number for each in report.gradients for number in (each.weights.local, each.weights.weighed or 0)]
    common = (report.settings, *counts, *(() if report.scale is None else (report.scale,)))
    squared = [number * number for number in common]
    parts: list[Sequence[float]] = [(not report.finite, report.edited), weights, common, squared, report.late]
    numbers = torch.tensor([*chain.from_iterable(parts)], dtype=torch.float64)
    mine = torch.zeros(len(numbers) + entries, dtype=torch.float64)
    mine[: len(numbers)] = numbers
    if entries:
        used, trainable = (torch.frombuffer(flags, dtype=torch.uint8) for flags in (report.used, report.trainable))
        mine[len(numbers) :].copy_(trainable).mul_(_TRAINABLE).add_(used)
    with comm.counters.agreeing():
        total = comm.all_reduce(mine).wait()
        found = [part.tolist() for part in torch.split(total[: len(numbers)], [len(part) for part in parts])]
        (bad, edited), weights, sums, squares, late = found
        same = [_same(one, other, world) for one, other in zip(sums, squares, strict=True)]
        if not all(same[1:]):
            raise _apart(comm, report)
        users = total[len(numbers) :]
        uniform = bool((users == _holders(buckets, world) * (_TRAINABLE + 1)).all())  # in nearly every step
        every: list[float] = [] if uniform else users.tolist()
        _compare_trainable(comm, report, every, buckets)
    return Agreement(
        finite=bad == 0,
        weights=list(zip(weights[::2], weights[1::2], strict=True)),
        edited=edited > 0,
        same_settings=same[0],
        uniform=uniform or all(count % _TRAINABLE == count // _TRAINABLE for count in every),
        late=[count > 0 for count in late],
        used=None if uniform else [count % _TRAINABLE > 0 for count in every],
    )


class Edits(Protocol):
    """What the program did to gradients on this rank."""

    @property
    def seen(self) -> Mapping[Ranks, int]:
        """By group of ranks: a hash below 2**20 of the edited gradients."""

    assigned: list[TrackedParameter]
    """those that were set, as `p.grad = ...` does, and not edited in place"""


def agree_on_edits(comm: Communicator, buckets: BucketList, edits: Edits, edited: bool, step: int) -> bool | None:
    """Whether edited gradients are finite on all ranks, or None if none was `edited`; raise if ranks that hold the same
    edited them differently. Collective."""
    seen = [float(edits.seen.get(ranks, 0)) for ranks in buckets.groups]
    flags = [float(not _finite(buckets.table.norms)), *([float(edited)] if buckets.grouped else [])]
    mine = torch.tensor([*flags, *seen, *(hash**2 for hash in seen)], dtype=torch.float64)
    with comm.counters.agreeing():
        total = comm.all_reduce(mine).wait().tolist()
        found, sums = total[: len(flags)], total[len(flags) :]
        for ranks, one, other in zip(buckets.groups, sums[: len(seen)], sums[len(seen) :], strict=True):
            if not _same(one, other, len(ranks or range(comm.world))):
                raise _edited_apart(comm, ranks or range(comm.world), edits, step)
    return None if found[1:] == [0.0] else bool(found[0] == 0)


def _edited_apart(comm: Communicator, ranks: Sequence[int], edits: Edits, step: int) -> Diverged:
    group = None if len(ranks) == comm.world else tuple(ranks)
    assigned = [member.name for member in edits.assigned if member.ranks == group]
    by_rank = comm.all_gather_object((edits.seen.get(group, 0), assigned))
    first = ranks[0]
    rank = next(rank for rank in ranks if by_rank[rank][0] != by_rank[first][0])
    names = by_rank[first][1] or by_rank[rank][1]
    one, two = comm.numbers[first], comm.numbers[rank]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what = (
            f"p.grad of {names[0]!r}{others} was set to different values on rank {one} and rank {two}; all ranks "
            f"must set the same: average it over the ranks first with torch.distributed.all_reduce(gradient, "
            f"op=torch.distributed.ReduceOp.AVG), and draw noise from the same seed"
        )
    else:
        what = (
            f"p.grad was edited in place differently on rank {one} and rank {two}; make the same edits on every "
            f"rank, with the same numbers (to clip, sherd.clip_grad_norm_ and clip_norm= give the same bits on all "
            f"ranks)"
        )
    return Diverged(f"before step {step} {what}", ranks=(one, two))


def _same(total: float, squares: float, world: int) -> bool:
    """Whether all numbers are equal: true exactly if the squared sum is the count times the sum of squares."""
    return total * total == world * squares


def _apart(comm: Communicator, report: Report) -> Diverged:
    scales, rank = comm.compare_object(report.scale)
    if scales[rank] != scales[0]:
        one, two = comm.numbers[0], comm.numbers[rank]
        return Diverged(
            f"the ranks are out of sync: the loss scale is {scales[0]:g} on rank {one} and {scales[rank]:g} on rank "
            f"{two}; all models of a process share one scale, so distribute and step the same scaled models on every "
            f"rank",
            ranks=(one, two),
        )
    by_rank, rank = comm.compare_object([(each.label, each.backwards) for each in report.gradients])
    first, other = ([label for label, _ in each] for each in (by_rank[0], by_rank[rank]))
    one, two = comm.numbers[0], comm.numbers[rank]
    if first != other:
        what = (
            f"rank {one} is in {' and '.join(first)} and rank {two} in {' and '.join(other)}; take the same steps on "
            f"every rank, and decide on all ranks together whether to skip one"
        )
    else:
        pairs = zip(by_rank[0], by_rank[rank], strict=True)
        step, here, there = next((label, here, there) for (label, here), (_, there) in pairs if here != there)
        what = (
            f"in {step} the gradient has {here} backwards on rank {one} and {there} on rank {two}; "
            f"call backward and zero_grad equally often on every rank (a rank without data can call "
            f"sherd.weigh(model, 0))"
        )
    return Diverged(f"the ranks are out of sync: {what}", ranks=(one, two))


def _holders(buckets: BucketList, world: int) -> int | Tensor:
    """How many ranks hold each entry."""
    return buckets.holders if buckets.grouped else world


def _compare_trainable(comm: Communicator, report: Report, counts: Sequence[float], buckets: BucketList) -> None:
    for entry, count in enumerate(counts):
        listed = buckets.catalogue[entry]
        ranks = listed.ranks or range(comm.world)
        if count // _TRAINABLE not in (0, len(ranks)):
            can = comm.all_gather_object(bool(report.trainable[entry]))
            yes, no = (comm.numbers[next(r for r in ranks if can[r] is wanted)] for wanted in (True, False))
            member = listed.member
            optimizer = report.gradients[listed.optimizer or 0].optimizer if member is None else member.bucket.optimizer
            step = next(each.label for each in report.gradients if each.optimizer is optimizer)
            raise Diverged(
                f"{step}: parameter {listed.entry.name!r} requires a gradient on rank {yes} and not on rank {no}; set "
                f"the same requires_grad on every rank",
                ranks=(yes, no),
            )


def _comparable(value: Any) -> Any:
    """The value, if it means the same in another process; any other object counts as its type."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "Tensor"
    if isinstance(value, tuple | list):
        return [_comparable(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    # A value of a subclass, such as an enum or a numpy scalar, counts as its plain Python value.
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), type(value).__name__)
