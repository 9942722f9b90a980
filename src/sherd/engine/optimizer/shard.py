"""The optimizer shard: the user's optimizer on this owner's part of the parameters.

The user's object stays as it is, with the user's parameters in its groups, for schedulers and the program to change. An
*inner* optimizer of the same class does the work: its groups have the same hyper-parameters and hold chunks of this
owner's runs. Only for elementwise optimizers (see `elementwise`): for these a cut changes no bit; and for those that
are so apart from the norms of layers, which the ranks gather in a step (see `layers`).

A new inner object is made from the user's for each step, so that nothing in it is out of date; its state is kept. Where
a rank owns everything, `optimizer.state` has views of it, and the user may change them or put others in their place.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.comm.base import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.elementwise import merging_unit
from sherd.engine.optimizer.groups import Groups
from sherd.engine.optimizer.inner import (
    hyper_parameters,
    inherited,
    inner_optimizer,
    step_unhooked,
    take_over_changes,
)
from sherd.engine.optimizer.layers import LayerTable, PartsOfLayers
from sherd.engine.optimizer.portions import Chunk, FlatState, Loaded, Mastered, Portion, State
from sherd.engine.optimizer.runs import Counters, Part, Run, find_runs, parts_of
from sherd.engine.optimizer.shown import ShownState
from sherd.engine.optimizer.state import Cut, cut_state, gather_state, put_state, state_bytes
from sherd.engine.parameters.masters import make_masters
from sherd.errors import ConfigError, SherdError
from sherd.layout.placement import BLOCK, padded
from sherd.optim.layerwise import Layerwise, is_layerwise
from sherd.patches.process import heap

CHUNK_NUMEL = 256 * 1024
"""Elements stepped at once. Parameter, gradient, two moments and a temporary of 256Ki floats are 5 MB and stay in the
cache through all passes of an update. Measured on 16Mi floats in segments of 2Mi, one thread, 32 MB of L3; ms per step:

    elements           64Ki   128Ki   256Ki   512Ki   whole segments
    AdamW              49.9    44.5    43.3    45.0     91.8
    SGD, momentum      17.5    14.9    14.5    12.9     13.5
    the same, decay    18.0    16.4    15.0    15.3     18.5
    AdamW fused        15.2    13.8    13.4    13.5     12.6
    AdamW foreach       -      89.5    87.6    87.2     83.7

Two processes at once give the same order. Fused makes one pass and gains nothing from chunks; foreach goes through the
whole list in each pass. Stepping a few chunks per call would help foreach, but would break optimizers that count calls
in a group."""


AT_ONCE = 2 * CHUNK_NUMEL
"""Elements of one inner step where that makes something for each of them: state in a first step, which is then copied
to where it is kept, or a gradient in more bits. In one step of all chunks, the state of a GPT of 98 M parameters on two
ranks was there twice: 24 bytes per parameter at the peak instead of 18."""


BETWEEN_TRIMS = 8
"""After how many batches of a first step what they freed goes back to the kernel. Counters, which stay, lie between
it, and glibc does not use it again: of a GPT of 98 M parameters 120 MB on each of two ranks, 25 on each of eight."""


class Condition(enum.Enum):
    """Whether the parameters and the state that a shard keeps belong together."""

    CLEAN = "clean"
    STEPPING = "being stepped"
    TORN = "torn"
    """a step failed in the middle, and state must be loaded"""


class OptimizerShard:
    """Steps `owner`'s part of the parameters in its `buckets`, or all of them, using their values and sums.

    State that the optimizer already has is taken over. The optimizer may also hold other `known` parameters, which are
    not stepped until they are trained.
    """

    merges = True
    """Whether small parameters are stepped together, as one flat tensor."""
    reads_sums = True
    """Whether `step` reads the gradient from `owned_sum` of its buckets; else from `p.grad`."""
    takes_closure = False
    """Whether `step` may call the closure more than once, as LBFGS does."""
    needs_closure = False
    """Whether `step` requires a closure: it needs the loss."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: BucketList,
        owner: int | None,
        known: Iterable[nn.Parameter] = (),
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        if chunk_numel < 1 or chunk_numel % BLOCK:
            # Fused kernels round the last elements, those that do not fill a vector, differently from the rest: a cut
            # between blocks changes no bit, elsewhere it would.
            right = padded(chunk_numel) or BLOCK
            raise ConfigError(f"chunk_numel={chunk_numel} must be a positive multiple of a block; write {right}")
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._owner = owner
        self.gathers_state = owner is not None
        """Whether `state_dict` is collective."""
        self._layerwise = is_layerwise(optimizer)
        # Such a one cuts parts itself, after it has seen which of them are a layer's.
        self._chunk_numel = 1 << 62 if self._layerwise else chunk_numel
        self._users = Groups(optimizer, known)
        self._parts: dict[TrackedParameter, Part] = {}  # in the order of their memory
        self._rest: dict[Any, Any] = {}  # state of what is not trained, and what belongs to no parameter
        self._flats = FlatState()
        self._runs: list[Run] = []
        self._counters = Counters([], self._flats)
        self._used: list[bool] = []
        self._shown = ShownState(optimizer)
        self._table: LayerTable | None = None  # of norms that ranks gather, if layers are cut
        self._stale = True  # whether the runs must be found again
        self._fresh = True  # whether they were not stepped yet
        self._first = True  # whether nothing was
        self._units = cache(lambda group, dtype: merging_unit(optimizer, optimizer.param_groups[group], dtype))
        self.condition = Condition.CLEAN
        for index, group in enumerate(optimizer.param_groups if self.merges else ()):
            for dtype in {parameter.dtype for parameter in group["params"]}:
                self._units(index, dtype)  # before the state goes, which some classes create in `__init__`
        self.follow(buckets)

    def follow(self, buckets: BucketList) -> None:
        """Step the parameters in these buckets from now on; parameters may only be added."""
        self._buckets = buckets
        joined = self._users.follow(buckets)
        new = {member.bucket for member in joined.values()}
        make_masters(new)
        owners = {b: None if self._owner is None else b.described.owner_of(self._owner) for b in buckets.buckets}
        parts = (part for b in buckets.buckets if b in new for part in parts_of(b, owners[b]))
        self._parts.update({part.member: part for part in parts})
        if self._layerwise and self._owner is not None:
            ours = [bucket for bucket in buckets.buckets if bucket.optimizer in (None, self._optimizer)]
            self._table = LayerTable(buckets, ours)
        self._take({}, {p: self._rest.pop(p) for p in joined if p in self._rest})  # loaded while frozen
        self._read_users_object()

    # ---------------------------------------------------------------- a step

    def step(self, closure: Any = None) -> None:
        """One update. Like torch, it skips parameters without a gradient: those that no rank has used."""
        self.run()

    def run(self, wrap: Callable[[Portion], Portion] | None = None, batch: int | None = None) -> None:
        """One update, in portions that `wrap` nests in others; all in one batch, or in batches of so many, unless the
        norms of all layers must be known first.

        Each batch is one inner step, from the same hyper-parameters and attributes: what an optimizer counts per step
        is counted once.
        """
        if self.condition is not Condition.CLEAN:
            raise SherdError(f"the optimizer's shard is {self.condition.value} and cannot be stepped; load its state")
        self._read_users_object()
        self._find_runs()
        found = self._portions()
        portions = [(group, m, each if wrap is None else wrap(each)) for group, m, each in found]
        if batch is None and not self._layerwise:
            ends: Sequence[int] = _cut(each.copied(self._fresh) for *_, each in found)
        else:
            size = max(len(portions), 1) if self._layerwise else batch or 1
            ends = range(size, len(portions) + size, size)
        batches = [portions[start:end] for start, end in pairwise([0, *ends])] or [[]]
        self.condition = Condition.STEPPING
        changed: dict[int, dict[str, Any]] = {}
        try:
            for number, each in enumerate(batches):
                for *_, portion in chain(() if number else each, *batches[number + 1 : number + 2]):
                    portion.prefetch()
                last = number + 1 == len(batches)
                self._step_batch(each, changed, last)
                if self._first and number and (last or not number % BETWEEN_TRIMS):
                    heap.return_freed()
            self.condition = Condition.CLEAN
        finally:
            if self.condition is Condition.STEPPING:
                self.condition = Condition.TORN
        self._fresh = self._first = False
        if not self._counters.follow():  # state is created in the first step
            self._counters = Counters(self._runs, self._flats)
            self._stale = True
        if self._rest or not self._shown.is_by(self._counters):
            self._show()

    def _portions(self) -> list[tuple[int, TrackedParameter, Portion]]:
        """What is to be stepped, with its group and the parameter that it begins in."""
        return [(run.group, chunk.member, _with_master(chunk)) for run in self._runs for chunk in run.chunks]

    def _step_batch(
        self, batch: Sequence[tuple[int, TrackedParameter, Portion]], changed: dict[int, dict[str, Any]], last: bool
    ) -> None:
        """Step a batch. `changed` has what earlier ones have made of the groups that they had tensors of."""
        loaded = [(group, member, portion.load()) for group, member, portion in batch]
        inner = self._inner(loaded, copied=not last)
        for *_, (value, grad, _) in loaded:
            value.grad = grad
        try:
            if isinstance(inner, Layerwise) and self._layerwise:
                inner.advance(PartsOfLayers({each.value: self._parts[m] for _, m, each in loaded}, self._table))
            else:
                step_unhooked(inner)
        finally:
            for *_, (value, _, _) in loaded:
                value.grad = None
        for (*_, portion), (*_, each) in zip(batch, loaded, strict=True):
            portion.store(each._replace(state=inner.state.pop(each.value, {})))
        for index in {group for group, *_ in batch}:
            changed[index] = hyper_parameters(inner.param_groups[index])
        if last:
            self._rest = dict(inner.state)
            for index, group in changed.items():  # an optimizer may pass over a group without tensors
                inner.param_groups[index].update(group)
            take_over_changes(self._optimizer, inner)

    def _inner(self, loaded: Iterable[tuple[int, TrackedParameter, Loaded]], copied: bool = False) -> Optimizer:
        """An inner optimizer of these tensors, with the user's attributes and hyper-parameters or copies of them."""
        attributes, rest = inherited(self._optimizer), self._rest
        groups = [hyper_parameters(group) for group in self._optimizer.param_groups]
        if copied:
            attributes, rest, groups = deepcopy(attributes), deepcopy(rest), deepcopy(groups)
        for group, users in zip(groups, self._optimizer.param_groups, strict=True):
            group["params"] = []
            if "param_names" in users:
                group["param_names"] = []
        state: defaultdict[Any, Any] = defaultdict(dict, rest)
        for index, member, each in loaded:
            group, users = groups[index], self._optimizer.param_groups[index]
            group["params"].append(each.value)
            if "param_names" in users:
                place = next(i for i, parameter in enumerate(users["params"]) if parameter is member.parameter)
                group["param_names"].append(users["param_names"][place])
            if each.state:  # `if p not in self.state` must find that it has none
                state[each.value] = each.state
        return inner_optimizer(self._kind, attributes, groups, state)

    # ---------------------------------------------------------------- state dicts

    def whole_state(self, comm: Communicator) -> dict[Any, Any]:
        """The state of whole parameters, by parameter, as the user's object would have it. Collective if cut."""
        if self._owner is None:
            return dict(self._optimizer.state)
        if (comm.rank, comm.world) != (self._owner, self._buckets.layout.world):
            raise ConfigError(
                f"owner {self._owner} of {self._buckets.layout.world} got the communicator of rank {comm.rank} of "
                f"{comm.world}; pass the one whose ranks are the owners"
            )
        self._read_users_object()
        whole: dict[TrackedParameter, State] = {}
        other: dict[Any, Any] = {}
        for ranks in self._buckets.groups:
            its = [bucket for bucket in self._buckets.buckets if bucket.ranks == ranks]
            if ranks is None:
                whole, other = self._gather_state(comm, its)
            elif its:
                whole |= self._gather_state(its[0].comm, its)[0]
        state: dict[Any, Any] = {}
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            member = self._users.members.get(parameter)
            if kept := self._rest.get(parameter) if member is None else whole.get(member):
                state[parameter] = kept
        return {**state, **other}

    def _gather_state(
        self, comm: Communicator, buckets: Sequence[Bucket]
    ) -> tuple[dict[TrackedParameter, State], dict[Any, Any]]:
        return gather_state(comm, buckets, self._parts, self._rest)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """The state of whole parameters on every rank, as torch's own `state_dict` returns it. Collective if cut."""
        if self._owner is None:
            return self._kind.state_dict(self._optimizer)
        # In the user's object for a moment, so that its class and hooks build the dict.
        self._optimizer.state.update(self.whole_state(comm))
        try:
            return self._kind.state_dict(self._optimizer)
        finally:
            self._optimizer.state.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this owner's part of what torch's own `state_dict` returned. Local; shares no memory with the caller."""
        self._read_users_object()
        loaded: dict[str, Any] = {}

        def catch(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            # The last hook, so it sees the result of the user's hooks. Torch then checks and loads the groups, but not
            # the state: it would cast it all to the parameters' dtype and move it to their device, uncut.
            loaded.update(given)
            return {**given, "state": {}}

        hook = self._optimizer.register_load_state_dict_pre_hook(catch)
        try:
            self._kind.load_state_dict(self._optimizer, dict(state))
        finally:
            hook.remove()
        self._flats, self._rest, self._stale = FlatState(), {}, True  # the caller may still have views of the old ones
        for part in self._parts.values():
            part.state = {}
        if loaded:  # empty if the class has its own load_state_dict; then _read_users_object takes over what it loaded
            ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
            self._take(dict(zip(ids, parameters, strict=True)), loaded["state"], cast=True)
        else:
            self._read_users_object()
        # As at the end of torch's load_state_dict: classes convert the state of older versions there.
        self.condition = Condition.CLEAN
        every = [(part, Loaded(part.value, None, part.state)) for part in self._all()]
        inner = self._inner((self._users.of[part.member.parameter], part.member, each) for part, each in every)
        inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
        for part, each in every:
            part.state = inner.state.pop(each.value, {})
        self._rest = dict(inner.state)
        self._show()

    def _all(self) -> list[Part]:
        """The parts that are in a group."""
        return [part for part in self._parts.values() if part.member.parameter in self._users.of]

    def kept(self) -> Iterable[Part]:
        """What this owner keeps, by parameter."""
        return self._parts.values()

    def flat_state(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Any, Tensor]]:
        """What this owner keeps per element of these buckets, by key, as one tensor each."""
        return self._flats.kept(buckets)

    def state_bytes(self) -> int:
        """Bytes of the state tensors that this owner keeps."""
        return state_bytes(chain((part.state for part in self._parts.values()), self._rest.values()))

    @property
    def users(self) -> tuple[Optimizer, type[Optimizer]]:
        """The user's optimizer and its original class."""
        return self._optimizer, self._kind

    def coming(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """By group: the tensors that this owner steps and has no state for yet."""
        self._read_users_object()
        found: list[tuple[dict[str, Any], list[Tensor]]] = [(group, []) for group in self._optimizer.param_groups]
        for part in self._all():
            if not part.state:
                found[self._users.of[part.member.parameter]][1].append(part.value)
        return found

    def state_entries(self) -> int:
        """How many tensors this owner has state for: `state_bytes` changes when this does."""
        return sum(bool(part.state) for part in self._parts.values()) + len(self._rest)

    # ---------------------------------------------------------------- the user's object

    def _read_users_object(self) -> None:
        """Take over changes to the user's object since the last time: groups, parameters, state."""
        self._stale |= self._users.read()
        state = self._optimizer.state
        if self._owner is not None:
            if state:
                self._take({}, state)
                state.clear()
        elif self._shown.changed(self._counters):
            self._take({}, self._shown.replaced(self._parts.values()))
            self._rest = {key: value for key, value in state.items() if key not in self._users.members}
            self._stale = True

    def _find_runs(self) -> None:
        used = [member.used for member in self._parts]
        if self._stale or used != self._used:
            parts = self._parts.values()
            self._runs = find_runs(parts, self._users.of, self._units, self._flats, self._chunk_numel)
            self._counters = Counters(self._runs, self._flats)
            self._used, self._stale, self._fresh = used, False, True

    def _take(self, parameters: Mapping[Any, Tensor], state: Mapping[Any, Any], cast: bool = False) -> None:
        """Cut `state` to this owner's parts; `parameters` maps keys that are not parameters to parameters."""
        groups = self._optimizer.param_groups
        found: list[tuple[Part, State]] = []
        for key, values in state.items():
            parameter = parameters.get(key, key)
            member = self._users.members.get(parameter)
            if member is None:
                self._rest[parameter] = deepcopy(values)
            elif member in self._parts and (values or self._owner is None):
                found.append((self._parts[member], values))
        cuts = (
            (p, cut_state(p, kept, groups[self._users.of.get(p.member.parameter, 0)] if cast else None))
            for p, kept in found
        )
        for part, cut in cuts if cast else list(cuts):  # a list, since the user may have exchanged what we have
            self._put_state(part, cut)
        self._stale |= bool(found)

    def _put_state(self, part: Part, cut: Cut) -> None:
        put_state(part, cut, self._flats)

    def _show(self) -> None:
        if self._owner is None:
            self._shown.show(self._parts.values(), self._rest, self._counters)


def _cut(sizes: Iterable[int]) -> list[int]:
    """Where batches end, so that each has at most about `AT_ONCE` of these elements."""
    ends, place, filled = [], 0, 0
    for place, size in enumerate(sizes, 1):
        filled += size
        if filled >= AT_ONCE:
            ends.append(place)
            filled = 0
    return ends if not place or ends[-1:] == [place] else [*ends, place]


def _with_master(chunk: Chunk) -> Portion:
    return chunk if chunk.bucket.values.master is None else Mastered(chunk, chunk.bucket, chunk.begin, chunk.end)
