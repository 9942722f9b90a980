"""The parameters of all ranks, as every rank knows them: also those that it does not hold.

All ranks pack them alike, so that what they tell each other about a parameter or a bucket has the same place for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.order import merged
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.layout.entry import Entry


@dataclass(frozen=True)
class Listed:
    """A parameter of any rank."""

    entry: Entry
    trained: bool
    ranks: Ranks
    """that hold it"""
    optimizer: int | None
    """the index of the optimizer that has it"""
    place: int
    """the index of its group among those of all optimizers; of one in none, their number"""
    member: TrackedParameter | None
    """the parameter itself, where this rank holds it"""
    work: int = 0
    """what a step of it costs, where it is owned whole"""
    holder: int | None = None
    """the rank that owns all of it, where it is owned whole"""


def listed(
    members: Sequence[TrackedParameter],
    optimizers: Sequence[Optimizer],
    work: Mapping[TrackedParameter, int] | None = None,
) -> list[Listed]:
    """The parameters of this rank; `work` has what a step costs of those that are to be owned whole."""
    groups = [(at, group) for at, optimizer in enumerate(optimizers) for group in optimizer.param_groups]
    places = {id(p): place for place, (_, group) in enumerate(groups) for p in group["params"]}
    found = []
    for member in members:
        place = places.get(id(member.parameter), len(groups))
        optimizer = groups[place][0] if place < len(groups) else None
        trained = member.parameter.requires_grad
        cost = 0 if work is None else work.get(member, 0)
        found.append(Listed(member.entry, trained, member.ranks, optimizer, place, member, cost))
    return found


def gather(comm: Communicator, mine: Sequence[Listed]) -> list[Listed]:
    """The parameters of all ranks, in one order. Collective."""
    plain = [
        (e.name, e.shape, e.dtype, e.order, e.placement.value, *facts)
        for each in mine
        for e, facts in ((each.entry, (each.trained, each.ranks, each.optimizer, each.place, each.work)),)
    ]
    with comm.counters.agreeing():
        by_rank = comm.all_gather_object(plain)
    own = {each.entry.name: each for each in mine}
    found: dict[str, Listed] = {}
    for name, shape, dtype, order, placement, *facts in (item for items in by_rank for item in items):
        if name not in found:
            entry = Entry(name, tuple(shape), dtype, placement, None if order is None else tuple(order))
            trained, ranks, optimizer, place, work = facts
            other = Listed(entry, trained, None if ranks is None else tuple(ranks), optimizer, place, None, work)
            found[name] = own.get(name, other)
    return [found[name] for name in merged([[item[0] for item in items] for items in by_rank])]
