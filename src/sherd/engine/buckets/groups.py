"""Which ranks hold which parameters and buffers, where that differs between ranks: what `groups=` says.

A *group* is the ranks that hold the same parameters. They sum gradients, compare edits and share updates among
themselves. Everything that concerns the whole gradient is among all ranks that train together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from sherd.comm import Communicator, SoloCommunicator
from sherd.engine.buckets.order import merged
from sherd.errors import ConfigError, Diverged, nearest

Ranks = tuple[int, ...] | None
"""The ranks that hold something; None: all of them."""
Item = tuple[object, ...]
"""What is compared of a parameter or buffer; its name comes first."""


class Groups:
    """Patterns of names, each with the ranks that hold what it matches."""

    def __init__(self, patterns: Mapping[str, Sequence[int]] | None = None, world: int = 1) -> None:
        self._patterns = {pattern: tuple(ranks) for pattern, ranks in (patterns or {}).items()}
        self._everyone = tuple(range(world))
        for pattern, ranks in self._patterns.items():
            if unknown := [rank for rank in ranks if rank not in self._everyone]:
                raise ConfigError(
                    f"groups: {pattern!r} is to be held by rank {unknown[0]}, but there are {world} ranks; write ranks "
                    f"from 0 to {world - 1}"
                )

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def ranks_of(self, name: str) -> Ranks:
        """The ranks that hold a parameter or buffer. Refuses one that two patterns give to different ranks."""
        found = {pattern: ranks for pattern, ranks in self._patterns.items() if fnmatchcase(name, pattern)}
        for pattern, ranks in found.items():
            first = next(iter(found))
            if ranks != found[first]:
                raise ConfigError(
                    f"groups: {name!r} matches {first!r} with ranks {list(found[first])} and {pattern!r} with ranks "
                    f"{list(ranks)}; give it one group"
                )
        ranks = next(iter(found.values()), self._everyone)
        return None if ranks == self._everyone else ranks

    def check(self, names: Collection[str], rank: int) -> None:
        """Refuse a model that this rank's place in the groups does not fit. Local."""
        for name in names:
            ranks = self.ranks_of(name)
            if ranks is not None and rank not in ranks:
                raise ConfigError(
                    f"rank {rank} holds {name!r}, which groups= gives to ranks {list(ranks)} only; build this rank's "
                    f"model without it, or add rank {rank} to the group"
                )
        for pattern, ranks in self._patterns.items():
            if rank in ranks and not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"rank {rank} is in the group {pattern!r}, which matches no parameter or buffer of its model; "
                    f"{nearest(pattern, names)}"
                )

    def compare(self, comm: Communicator, mine: list[Item]) -> None:
        """Refuse models that differ between ranks in a way that was not declared. Collective."""
        with comm.counters.agreeing():
            by_rank = comm.all_gather_object(mine)
        found: dict[str, dict[int, Item]] = {}
        for rank, items in enumerate(by_rank):
            for item in items:
                found.setdefault(item[0], {})[rank] = item
        for name, having in found.items():
            ranks = self.ranks_of(name) or self._everyone
            if missing := [rank for rank in ranks if rank not in having]:
                raise _missing(name, next(iter(having)), missing[0], self.ranks_of(name))
            first = ranks[0]
            if other := next((rank for rank in ranks if having[rank] != having[first]), None):
                raise Diverged(
                    f"the ranks' models differ: rank {first} has {words(having[first])} where rank {other} has "
                    f"{words(having[other])}; build it the same on every rank that holds it",
                    ranks=(first, other),
                )
        _compare_order([[str(item[0]) for item in items] for items in by_rank])

    def cut(self, comm: Communicator) -> dict[Ranks, Communicator]:
        """The communicators of the groups that this rank is in, in one order on all ranks; None is everyone.
        Collective."""
        found: dict[Ranks, Communicator] = {None: comm}
        for ranks in sorted(set(self._patterns.values()) - {self._everyone}):
            group = SoloCommunicator(comm.options) if len(ranks) == 1 else comm.subgroup(ranks)
            if comm.rank in ranks and group is not None:
                group.counters = comm.counters  # what a rank sends is counted in one place
                found[ranks] = group
        return found


def words(item: Item) -> str:
    """A parameter or buffer as it is compared, in words."""
    name, shape, dtype, trainable, order = item
    memory = "" if order is None else f" with dimensions {order} in memory"
    return f"{name!r} {dtype}{list(shape)}{' frozen' if trainable is False else ''}{memory}"  # type: ignore[call-overload]


def _missing(name: str, having: int, missing: int, ranks: Ranks) -> Diverged:
    what = f"the ranks' models differ: {name!r} is on rank {having} and not on rank {missing}"
    if ranks is None:
        fix = "build the same model on every rank, or add the ranks that hold it to groups="
    else:
        fix = f"groups= says that ranks {list(ranks)} hold it: build it on each of them"
    return Diverged(f"{what}; {fix}", ranks=(having, missing))


def _compare_order(by_rank: Sequence[Sequence[str]]) -> None:
    place = {name: at for at, name in enumerate(merged(by_rank))}
    for rank, names in enumerate(by_rank):
        for before, after in pairwise(names):
            if place[before] > place[after]:
                raise Diverged(
                    f"the ranks' models differ: rank {rank} has {before!r} before {after!r}, and ranks before it have "
                    f"not; register parameters in the same order on every rank",
                    ranks=(0, rank),
                )
