"""The user's optimizer on the parameters that a rank owns whole, for optimizers that are not elementwise.

Muon orthogonalises a matrix, Adafactor averages its rows and columns: they need all of a parameter at once, but no
other parameter with it. So each parameter has one owner, which steps it in its own shape, and keeps its state as the
optimizer makes it, whatever that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.comm.base import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.elementwise import small_shape
from sherd.engine.optimizer.portions import Loaded, Mastered, Portion, State, is_per_element
from sherd.engine.optimizer.runs import Part
from sherd.engine.optimizer.shard import OptimizerShard
from sherd.engine.optimizer.state import Cut


class WholeShard(OptimizerShard):
    """Steps the parameters that its owner has of its `buckets`, each whole."""

    merges = False

    def __init__(
        self, optimizer: Optimizer, buckets: BucketList, owner: int | None, known: Iterable[nn.Parameter] = ()
    ) -> None:
        self._own: list[tuple[int, TrackedParameter, Portion]] = []
        self._standing: dict[int, StandIn] = {}
        self._made_early = [_first_state(optimizer, group) for group in optimizer.param_groups]  # in `__init__`
        super().__init__(optimizer, buckets, owner, known)

    def _portions(self) -> list[tuple[int, TrackedParameter, Portion]]:
        return self._own

    def _find_runs(self) -> None:
        used = [member.used for member in self._users.members.values()]
        if not self._stale and used == self._used:
            return
        of = self._users.of
        places = {parameter: place for place, parameter in enumerate(of)}  # the user's order
        parts = sorted(self._all(), key=lambda part: places[part.member.parameter])
        self._own = [(of[part.member.parameter], part.member, _portion(part)) for part in parts]
        self._own += [(group, each.member, each) for group, each in self._stand_ins(parts)]
        self._used, self._stale = used, False

    def _stand_ins(self, parts: Iterable[Part]) -> Iterator[tuple[int, StandIn]]:
        """For each group of which this rank steps nothing: what an optimizer counts in a group, all ranks count."""
        of, known = self._users.of, self._users.members
        having, stepping = set(), set()
        for part in parts:
            having.add(of[part.member.parameter])
            if part.member.used:
                stepping.add(of[part.member.parameter])
        for index, group in enumerate(self._optimizer.param_groups):
            members = [known[parameter] for parameter in group["params"] if parameter in known]
            used = next((member for member in members if member.used), None)
            if index not in stepping and (used is not None or (members and index not in having)):
                before = self._standing.get(index)
                early = self._made_early[index] if index < len(self._made_early) else None
                self._standing[index] = StandIn(used or members[0], used is not None, before, early)
                yield index, self._standing[index]

    def _put_state(self, part: Part, cut: Cut) -> None:
        entry = part.member.entry
        part.state = {key: entry.shaped(value) if each else value for key, (each, value) in cut.items()}

    def _gather_state(
        self, comm: Communicator, buckets: Sequence[Bucket]
    ) -> tuple[dict[TrackedParameter, State], dict[Any, Any]]:
        return gather_whole_state(comm, buckets, self._parts, self._rest)


class WholeParameter(Portion):
    """A whole parameter, in memory."""

    def __init__(self, part: Part) -> None:
        self.member, self._part = part.member, part
        self._home = part.value
        self._value = self._home.detach()

    def copied(self, first: bool) -> int:
        return 0  # its state stays where it was made

    def prefetch(self) -> None:
        pass

    def load(self) -> Loaded:
        part, grad = self._part, None
        if self.member.used:
            # A new view each time, dropped after the step: an optimizer that kept it would keep the memory.
            grad = self.member.entry.shaped(part.bucket.owned_sum[part.offset : part.offset + part.numel])
        return Loaded(self._value, grad, part.state)

    def store(self, loaded: Loaded) -> None:
        if self._value.data_ptr() != self._home.data_ptr():  # p.data = p.data - ...
            self._home.copy_(self._value)
            self._value.data = self._home
        self._part.state = loaded.state
        if loaded.grad is not None:
            for key, value in loaded.state.items():
                if isinstance(value, Tensor) and _share_memory(value, loaded.grad):
                    loaded.state[key] = value.clone()  # the next sum will be there


def _first_state(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[Tensor, State] | None:
    """A parameter of the group for which there is state already, and that state: its class makes it in `__init__`."""
    having = (each for each in group["params"] if each.numel() and optimizer.state.get(each))
    return next(((each, deepcopy(dict(optimizer.state[each]))) for each in having), None)


def _portion(part: Part) -> Portion:
    whole = WholeParameter(part)
    if part.bucket.values.master is None:
        return whole
    return Mastered(whole, part.bucket, part.offset, part.offset + part.numel)


class StandIn(Portion):
    """A small tensor that is stepped in a group of which this rank owns nothing, with a gradient of zeros if any other
    rank has one. Nobody reads it."""

    def __init__(
        self, member: TrackedParameter, used: bool, before: StandIn | None, early: tuple[Tensor, State] | None
    ) -> None:
        self.member, self._used = member, used
        shape, like = small_shape(len(member.entry.shape)), member.bucket.values.stepped
        self._value = torch.zeros(shape, dtype=like.dtype, device=like.device)
        same = before is not None and before._value.shape == shape and before._value.dtype == like.dtype
        self.state: State = before.state if before is not None and same else {}
        if early is not None and not self.state:
            of, state = early
            self.state = {
                key: value.new_full(shape, value.flatten()[0].item()) if is_per_element(value, of.shape) else value
                for key, value in deepcopy(state).items()
            }

    def copied(self, first: bool) -> int:
        return 0  # its state stays where it was made

    def prefetch(self) -> None:
        pass

    def load(self) -> Loaded:
        return Loaded(self._value, torch.zeros_like(self._value) if self._used else None, self.state)

    def store(self, loaded: Loaded) -> None:
        self.state = loaded.state


def _share_memory(some: Tensor, others: Tensor) -> bool:
    return bool(some.numel()) and some.untyped_storage().data_ptr() == others.untyped_storage().data_ptr()


class _Kept(NamedTuple):
    """A tensor of the state, as its owner describes it to the others."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_element: bool


def gather_whole_state(
    comm: Communicator, buckets: Sequence[Bucket], parts: Mapping[TrackedParameter, Part], rest: Mapping[Any, Any]
) -> tuple[dict[TrackedParameter, State], dict[Any, Any]]:
    """The state of the parameters in these buckets, which ranks of `comm` own whole, and state that belongs to no
    parameter; on every rank. Collective.

    Small values travel together, and each tensor by itself.
    """
    members = [member for bucket in buckets for member in bucket.members]
    mine = {
        place: [(key, *_outline(parts[member], value)) for key, value in parts[member].state.items()]
        for place, member in enumerate(members)
        if member in parts and parts[member].state
    }
    other = {key: value for key, value in rest.items() if not isinstance(key, Tensor)}
    by_rank = comm.all_gather_object((mine, other))
    outlines: dict[int, list[Any]] = {place: outline for theirs, _ in by_rank for place, outline in theirs.items()}
    whole: dict[TrackedParameter, State] = {}
    for place in sorted(outlines):
        member = members[place]
        state = whole[member] = {}
        for key, is_sent, value in outlines[place]:
            state[key] = _sent(comm, member, parts.get(member), key, _Kept(*value)) if is_sent else value
    return whole, by_rank[0][1]


def _outline(part: Part, value: Any) -> tuple[bool, Any]:
    """Whether it is sent by itself, and what is told of it first."""
    if isinstance(value, Tensor) and value.dim():
        return True, (tuple(value.shape), value.dtype, is_per_element(value, part.shape))
    return False, value.clone() if isinstance(value, Tensor) else value  # not the memory around it


def _sent(comm: Communicator, member: TrackedParameter, part: Part | None, key: Any, kept: _Kept) -> Tensor:
    flattened = member.entry.flattened if kept.per_element else torch.flatten
    source = None if part is None else flattened(part.state[key].detach())
    flat = member.bucket.values.owned.new_empty(torch.Size(kept.shape).numel(), dtype=kept.dtype)
    assert member.bucket.holder is not None, "it is owned whole"
    comm.broadcast(flat, member.bucket.holder, source=source).wait()
    return member.entry.shaped(flat) if kept.per_element else flat.view(kept.shape)
