"""The optimizer shard: the user's optimizer, stepping this owner's part of the parameters.

The user's object stays as it is, with the user's parameters in its groups, for schedulers and hands to change. An
*inner* optimizer of the same class does the work: its groups have the same hyper-parameters and hold chunks of this
owner's segments, and it keeps their state. Only for optimizers that are elementwise (see `elementwise`): for these a
cut changes no bit.

The inner object is made anew from the user's for each step, so that nothing in it can be out of date; its state lasts.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.comm.base import Communicator
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.state import Chunk, cut_chunks, cut_state, gather_state, state_bytes
from sherd.errors import ConfigError, SherdError

CHUNK_NUMEL = 256 * 1024
"""Elements stepped at once. Parameter, gradient, two moments and a temporary of 256Ki floats are 5 MB and stay in the
cache through all passes of an update. Measured on 16Mi floats in segments of 2Mi, one thread, 32 MB of L3; ms per step:

    elements           64Ki   128Ki   256Ki   512Ki   whole segments
    AdamW              49.9    44.5    43.3    45.0     91.8
    SGD, momentum      17.5    14.9    14.5    12.9     13.5
    the same, decay    18.0    16.4    15.0    15.3     18.5
    AdamW fused        15.2    13.8    13.4    13.5     12.6
    AdamW foreach       -      89.5    87.6    87.2     83.7

Two processes at once give the same order. Fused makes one pass and gains nothing by chunks; foreach goes through the
whole list in each pass. Stepping a few chunks per call would help foreach, but optimizers that count in a group count
calls."""


class Condition(enum.Enum):
    """Whether the parameters and the state that a shard keeps belong together."""

    CLEAN = "clean"
    STEPPING = "being stepped"
    TORN = "torn"
    """a step failed in the middle, and state must be loaded"""


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerShard:
    """Steps what `owner` has of the parameters in `buckets`, from the values and to the sums that these keep.

    State that the optimizer has already is taken over. The optimizer may hold other `known` parameters too, which are
    not stepped as long as they are not trained.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: BucketList,
        owner: int,
        known: Iterable[nn.Parameter] = (),
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._owner = owner
        self._chunk_numel = chunk_numel
        self._known: set[Tensor] = set(known)
        self._members: dict[Tensor, TrackedParameter] = {}
        self._chunks: dict[TrackedParameter, list[Chunk]] = {}
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._held: list[dict[str, Any]] = []  # group by group: the chunks, and their names where there are names
        self._grouped: list[Tensor | None] = []
        self.condition = Condition.CLEAN
        self._frozen: list[Tensor] = []  # in a group, but not trained: torch would find no gradient and skip them too
        self.follow(buckets)

    def follow(self, buckets: BucketList) -> None:
        """Step what is in these buckets from now on: more than before, at the most."""
        self._buckets = buckets
        joined: dict[Tensor, TrackedParameter] = {
            member.parameter: member for member in buckets.parameters if member.parameter not in self._members
        }
        self._members.update(joined)
        new = {member.bucket for member in joined.values()}
        self._chunks.update(cut_chunks((b for b in buckets.buckets if b in new), self._owner, self._chunk_numel))
        kept = {p: self._state.pop(p) for p in joined if p in self._state}  # loaded while frozen
        self._take({}, kept)
        self._grouped = []
        self._follow()

    def step(self) -> None:
        """One update. Torch skips a parameter that has no gradient, and so does this: one that nobody has used."""
        if self.condition is not Condition.CLEAN:
            raise SherdError(f"the optimizer's shard is {self.condition.value} and cannot be stepped; load its state")
        self._follow()
        stepped = [chunk for member, cut in self._chunks.items() if member.used for chunk in cut]
        inner = self._inner()
        for chunk in stepped:
            # Another tensor each time, and none afterwards: an optimizer that keeps it holds on to the memory.
            own = chunk.member.bucket.slice[chunk.offset : chunk.offset + chunk.value.numel()]
            chunk.value.grad = own.view(chunk.value.shape)
        self.condition = Condition.STEPPING
        try:
            step_unhooked(inner)
            self.condition = Condition.CLEAN
        finally:
            if self.condition is Condition.STEPPING:
                self.condition = Condition.TORN
            for chunk in stepped:
                chunk.value.grad = None
        self._state = inner.state
        # Optimizers that adapt their own rate or count their own steps change groups and attributes.
        _update(vars(self._optimizer), inherited(inner))
        for group, inner_group in zip(self._optimizer.param_groups, inner.param_groups, strict=True):
            _update(group, hyper_parameters(inner_group))

    def whole_state(self, comm: Communicator) -> dict[Any, Any]:
        """The state of whole parameters, by parameter, as the user's object would keep it. Collective."""
        if (comm.rank, comm.world) != (self._owner, self._buckets.layout.world):
            raise ConfigError(
                f"owner {self._owner} of {self._buckets.layout.world} got the communicator of rank {comm.rank} of "
                f"{comm.world}; pass the one whose ranks are the owners"
            )
        self._follow()
        whole, other = gather_state(comm, self._buckets, self._chunks, self._state)
        state: dict[Any, Any] = {}
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            member = self._members.get(parameter)
            if kept := self._state.get(parameter) if member is None else whole.get(member):
                state[parameter] = kept
        return {**state, **other}

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """The state of whole parameters on every rank, as torch's own `state_dict` gives it. Collective."""
        # In the user's object for a moment, so that its class and its hooks make the dict.
        self._optimizer.state.update(self.whole_state(comm))
        try:
            return self._kind.state_dict(self._optimizer)
        finally:
            self._optimizer.state.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this owner's part of what torch's own `state_dict` gave. Local; keeps nothing of the caller's."""
        self._follow()
        loaded: dict[str, Any] = {}

        def catch(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            # The last hook, so it sees what the user's hooks made of it. torch then checks and loads the groups, but
            # not the state: it would cast it all to the parameters' dtype and put it on their device, uncut.
            loaded.update(given)
            return {**given, "state": {}}

        hook = self._optimizer.register_load_state_dict_pre_hook(catch)
        try:
            self._kind.load_state_dict(self._optimizer, dict(state))
        finally:
            hook.remove()
        self._state = defaultdict(dict)
        if loaded:  # not if the class has a load_state_dict that is all its own; _follow takes over what it loaded
            ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
            self._take(dict(zip(ids, parameters, strict=True)), loaded["state"])
        self._follow()
        # As torch's load_state_dict ends: classes bring the state of older versions up to date there.
        self.condition = Condition.CLEAN
        inner = self._inner()
        inner.__setstate__({"state": self._state, "param_groups": inner.param_groups})
        self._state = inner.state

    def state_bytes(self) -> int:
        """Bytes of the state tensors that this owner keeps."""
        return state_bytes(self._state)

    @property
    def users(self) -> tuple[Optimizer, type[Optimizer]]:
        """The user's optimizer, and the class that it was made of."""
        return self._optimizer, self._kind

    def coming(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """By group: what this owner steps and keeps no state for yet."""
        self._follow()
        groups = zip(self._optimizer.param_groups, self._held, strict=True)
        return [(group, [each for each in held["params"] if not self._state.get(each)]) for group, held in groups]

    def state_entries(self) -> int:
        """How many tensors this owner keeps state for: when there are more, so are the bytes."""
        return len(self._state)

    def _inner(self) -> Optimizer:
        groups = zip(self._optimizer.param_groups, self._held, strict=True)
        live = [{**hyper_parameters(group), **held} for group, held in groups]
        return inner_optimizer(self._kind, inherited(self._optimizer), live, self._state)

    def _follow(self) -> None:
        """Take over what was done to the user's object since the last time: groups, parameters, state."""
        groups = self._optimizer.param_groups
        grouped = [parameter for group in groups for parameter in (None, *group["params"])]
        same = len(grouped) == len(self._grouped) and all(map(is_, grouped, self._grouped))
        if not same or any(parameter.requires_grad for parameter in self._frozen):
            self._held = [self._held_of(index, group) for index, group in enumerate(groups)]
            self._grouped = grouped
            self._frozen = [each for each in grouped if each is not None and each not in self._members]
        if self._optimizer.state:
            self._take({}, self._optimizer.state)
            self._optimizer.state.clear()

    def _held_of(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        cut: list[Sequence[Chunk]] = []
        for position, parameter in enumerate(group["params"]):
            if parameter not in self._members and parameter not in self._known and parameter.requires_grad:
                raise ConfigError(
                    f"the optimizer's group {index} has at position {position} a parameter of shape "
                    f"{tuple(parameter.shape)} that was not distributed; the optimizer's parameters must belong to the "
                    f"distributed model: build it from model.parameters()"
                )
            member = self._members.get(parameter)
            cut.append(() if member is None else self._chunks.get(member, ()))
        held: dict[str, Any] = {"params": [chunk.value for chunks in cut for chunk in chunks]}
        if "param_names" in group:
            held["param_names"] = [name for name, chunks in zip(group["param_names"], cut, strict=True) for _ in chunks]
        return held

    def _take(self, parameters: Mapping[Any, Tensor], state: Mapping[Any, Any]) -> None:
        """Cut `state` to this owner's chunks; `parameters` says which parameter a key stands for, if not itself."""
        groups = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}
        for key, values in state.items():
            parameter = parameters.get(key, key)
            member = self._members.get(parameter)
            if member is None:
                self._state[parameter] = deepcopy(values)
            elif values and (chunks := self._chunks.get(member)):
                parts = cut_state(chunks, member.entry, values, groups.get(parameter, {}))
                self._state.update({chunk.value: part for chunk, part in zip(chunks, parts, strict=True)})


def inner_optimizer(
    kind: type[Optimizer], attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: defaultdict[Any, Any]
) -> Optimizer:
    """An optimizer made without `__init__`, whose arguments nobody knows any more."""
    inner = kind.__new__(kind)
    hooks: dict[str, Any] = {name: OrderedDict() for name in _STEP_HOOKS}
    vars(inner).update({**attributes, **hooks, "param_groups": groups, "state": state})
    return inner


def inherited(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an inner optimizer has in common with the user's.

    Not the user's hooks, which belong to the user's step, nor methods that were replaced on the object, as a scheduler
    does with `step`.
    """
    kind = type(optimizer)
    own = ("param_groups", "state", *_STEP_HOOKS)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in own and not callable(getattr(kind, name, None))
    }


def step_unhooked(optimizer: Optimizer, kind: type[Optimizer] | None = None, *arguments: Any) -> Any:
    """`optimizer.step()`, as `kind` has it, without torch's wrapper, which would run hooks."""
    step: Any = (kind or type(optimizer)).step
    if getattr(step, "hooked", False):  # asked first, since other decorators leave a __wrapped__ too
        step = step.__wrapped__
    return step(optimizer, *arguments)


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Copy what is not the same object already."""
    target.update({name: value for name, value in source.items() if target.get(name, target) is not value})
