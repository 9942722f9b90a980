"""The optimizer shard: the user's optimizer on this owner's part of the parameters.

The user's object stays as it is, with the user's parameters in its groups, for schedulers and the program to change. An
*inner* optimizer of the same class does the work: its groups have the same hyper-parameters and hold chunks of this
owner's segments, and it keeps their state. Only for elementwise optimizers (see `elementwise`): for these a cut changes
no bit.

A new inner object is made from the user's for each step, so that nothing in it is out of date; its state is kept.
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

Two processes at once give the same order. Fused makes one pass and gains nothing from chunks; foreach goes through the
whole list in each pass. Stepping a few chunks per call would help foreach, but would break optimizers that count calls
in a group."""


class Condition(enum.Enum):
    """Whether the parameters and the state that a shard keeps belong together."""

    CLEAN = "clean"
    STEPPING = "being stepped"
    TORN = "torn"
    """a step failed in the middle, and state must be loaded"""


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerShard:
    """Steps `owner`'s part of the parameters in `buckets`, using their values and sums.

    State that the optimizer already has is taken over. The optimizer may also hold other `known` parameters, which are
    not stepped until they are trained.
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
        self._held: list[dict[str, Any]] = []  # by group: the chunks, and their names if it has names
        self._grouped: list[Tensor | None] = []
        self.condition = Condition.CLEAN
        self._frozen: list[Tensor] = []  # in a group, but not trained: without a gradient torch skips them
        self.follow(buckets)

    def follow(self, buckets: BucketList) -> None:
        """Step the parameters in these buckets from now on; parameters may only be added."""
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
        self._read_users_object()

    def step(self) -> None:
        """One update. Like torch, it skips parameters without a gradient: those that no rank has used."""
        if self.condition is not Condition.CLEAN:
            raise SherdError(f"the optimizer's shard is {self.condition.value} and cannot be stepped; load its state")
        self._read_users_object()
        stepped = [chunk for member, cut in self._chunks.items() if member.used for chunk in cut]
        inner = self._inner()
        for chunk in stepped:
            # A new tensor each time, removed afterwards: an optimizer that kept it would keep the memory.
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
        # Optimizers that adapt their rate or count their steps change groups and attributes.
        _update(vars(self._optimizer), inherited(inner))
        for group, inner_group in zip(self._optimizer.param_groups, inner.param_groups, strict=True):
            _update(group, hyper_parameters(inner_group))

    def whole_state(self, comm: Communicator) -> dict[Any, Any]:
        """The state of whole parameters, by parameter, as the user's object would have it. Collective."""
        if (comm.rank, comm.world) != (self._owner, self._buckets.layout.world):
            raise ConfigError(
                f"owner {self._owner} of {self._buckets.layout.world} got the communicator of rank {comm.rank} of "
                f"{comm.world}; pass the one whose ranks are the owners"
            )
        self._read_users_object()
        whole, other = gather_state(comm, self._buckets, self._chunks, self._state)
        state: dict[Any, Any] = {}
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            member = self._members.get(parameter)
            if kept := self._state.get(parameter) if member is None else whole.get(member):
                state[parameter] = kept
        return {**state, **other}

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """The state of whole parameters on every rank, as torch's own `state_dict` returns it. Collective."""
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
        self._state = defaultdict(dict)
        if loaded:  # empty if the class has its own load_state_dict; then _read_users_object takes over what it loaded
            ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
            self._take(dict(zip(ids, parameters, strict=True)), loaded["state"])
        self._read_users_object()
        # As at the end of torch's load_state_dict: classes convert the state of older versions there.
        self.condition = Condition.CLEAN
        inner = self._inner()
        inner.__setstate__({"state": self._state, "param_groups": inner.param_groups})
        self._state = inner.state

    def state_bytes(self) -> int:
        """Bytes of the state tensors that this owner keeps."""
        return state_bytes(self._state)

    @property
    def users(self) -> tuple[Optimizer, type[Optimizer]]:
        """The user's optimizer and its original class."""
        return self._optimizer, self._kind

    def coming(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """By group: the tensors that this owner steps and has no state for yet."""
        self._read_users_object()
        groups = zip(self._optimizer.param_groups, self._held, strict=True)
        return [(group, [each for each in held["params"] if not self._state.get(each)]) for group, held in groups]

    def state_entries(self) -> int:
        """How many tensors this owner has state for: `state_bytes` changes when this does."""
        return len(self._state)

    def _inner(self) -> Optimizer:
        groups = zip(self._optimizer.param_groups, self._held, strict=True)
        live = [{**hyper_parameters(group), **held} for group, held in groups]
        return inner_optimizer(self._kind, inherited(self._optimizer), live, self._state)

    def _read_users_object(self) -> None:
        """Take over changes to the user's object since the last time: groups, parameters, state."""
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
        """Cut `state` to this owner's chunks; `parameters` maps keys that are not parameters to parameters."""
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
    """An optimizer made without `__init__`, whose arguments are unknown."""
    inner = kind.__new__(kind)
    hooks: dict[str, Any] = {name: OrderedDict() for name in _STEP_HOOKS}
    vars(inner).update({**attributes, **hooks, "param_groups": groups, "state": state})
    return inner


def inherited(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an inner optimizer shares with the user's.

    Not the user's hooks, which belong to the user's step, nor methods replaced on the object, as a scheduler replaces
    `step`.
    """
    kind = type(optimizer)
    own = ("param_groups", "state", *_STEP_HOOKS)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in own and not callable(getattr(kind, name, None))
    }


def step_unhooked(optimizer: Optimizer, kind: type[Optimizer] | None = None, *arguments: Any) -> Any:
    """The `step` of `kind` on `optimizer`, without torch's wrapper, which would run hooks."""
    step: Any = (kind or type(optimizer)).step
    if getattr(step, "hooked", False):  # checked first, since other decorators leave a __wrapped__ too
        step = step.__wrapped__
    return step(optimizer, *arguments)


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Copy the values that are not already the same object."""
    target.update({name: value for name, value in source.items() if target.get(name, target) is not value})
