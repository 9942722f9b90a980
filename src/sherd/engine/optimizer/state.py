"""Optimizer state, cut to the parts of one owner and gathered again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm.base import Communicator
from sherd.engine.buckets.bucket import Bucket, gather
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.portions import FlatState, State, is_per_element
from sherd.engine.optimizer.runs import Part
from sherd.errors import ConfigError


class PerElement(NamedTuple):
    """Stands for a tensor of the parameter's shape where only its form is sent."""

    dtype: torch.dtype


Cut = dict[Any, tuple[bool, Any]]
"""State by key: whether it is per element, and its value."""


def cut_state(part: Part, state: State, group: Mapping[str, Any] | None = None) -> Cut:
    """The part of a parameter's `state`, flat, in memory of its own; with `group`, its hyper-parameters, it is given
    the dtypes of torch's `load_state_dict`."""
    cut: Cut = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            cut[key] = False, deepcopy(value if part.whole else _without_tensors(key, value))
            continue
        piece, per_element = value.detach(), is_per_element(value, part.member.entry.shape)
        if per_element:
            piece = part.member.entry.flattened(piece)[part.start : part.start + part.numel]
        if group is not None:
            own, policy = part.bucket.values.stepped, [{**group, "params": [0]}]
            piece = Optimizer._process_value_according_to_param_policy(own, piece, 0, policy, key)
        cut[key] = per_element, piece.clone()
    return cut


def put_state(part: Part, cut: Cut, flats: FlatState) -> None:
    """Make what `cut_state` returned the state of the part."""
    part.state = {}
    for key, (per_element, value) in cut.items():
        part.state[key] = part.view(flats.of(part.bucket, key, value.dtype)) if per_element else value
        if per_element:
            part.state[key].copy_(part.member.entry.shaped(value) if part.whole else value)


def gather_state(
    comm: Communicator, buckets: Sequence[Bucket], parts: Mapping[TrackedParameter, Part], rest: Mapping[Any, Any]
) -> tuple[dict[TrackedParameter, State], dict[Any, Any]]:
    """The state of the whole parameters in these buckets, which the ranks of `comm` hold, and state that belongs to no
    parameter; on every rank. Collective.

    Besides the result it needs the memory of one bucket and one slice.
    """
    members = [member for bucket in buckets for member in bucket.members]
    mine = {
        entry: _outline(parts[member])
        for entry, member in enumerate(members)
        if member in parts and parts[member].state
    }
    other = {key: value for key, value in rest.items() if not isinstance(key, Tensor)}
    whole: dict[TrackedParameter, State] = {}
    by_rank = comm.all_gather_object((mine, other))
    for outlines, _ in by_rank:
        for entry, outline in outlines.items():
            # The owner of a parameter's first element decides.
            kept = {key: PerElement(value) if cut else value for key, cut, value in outline}
            whole.setdefault(members[entry], kept)
    for bucket in buckets:
        for (key, dtype), having in _tensors(bucket, whole).items():
            own = bucket.values.owned.new_zeros(bucket.described.owned_numel(comm.rank), dtype=dtype)
            for part in (parts[member] for member in having if member in parts):
                kept = part.state[key]
                flat = part.member.entry.flattened(kept) if part.whole else kept
                own[part.offset : part.offset + part.numel] = flat
            gathered = gather(comm, bucket.described, own).wait()
            for member in having:
                whole[member][key] = member.entry.shaped(
                    gathered[member.offset : member.offset + member.entry.numel].clone()
                )
    return whole, by_rank[0][1]


def state_bytes(states: Iterable[Any]) -> int:
    """Bytes of the tensors in these states."""
    kept = (value for values in states if isinstance(values, dict) for value in values.values())
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))


def holds_tensors(value: object) -> bool:
    """Whether a container has tensors inside."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    return any(isinstance(item, Tensor) or holds_tensors(item) for item in inside)


def _tensors(
    bucket: Bucket, whole: Mapping[TrackedParameter, State]
) -> dict[tuple[Any, torch.dtype], list[TrackedParameter]]:
    """The members of the bucket that have a per-element tensor, by key and dtype; in the same order on every rank."""
    found: dict[tuple[Any, torch.dtype], list[TrackedParameter]] = {}
    for member in bucket.members:
        for key, value in whole.get(member, {}).items():
            if isinstance(value, PerElement):
                found.setdefault((key, value.dtype), []).append(member)
    return found


def _outline(part: Part) -> list[tuple[Any, bool, Any]]:
    """The state of a part: keys, whether each is per element, and values, or dtypes if per element. It is sent to
    other hosts, so it is plain data, except for other objects that the optimizer itself keeps."""
    outline = []
    for key, value in part.state.items():
        per_element = is_per_element(value, part.shape)
        own = value.clone() if isinstance(value, Tensor) and not per_element else value  # not the memory around it
        outline.append((key, per_element, value.dtype if per_element else _without_tensors(key, own)))
    return outline


def _without_tensors(key: object, value: Any) -> Any:
    if holds_tensors(value):
        raise ConfigError(
            f"the optimizer keeps tensors inside a {type(value).__name__} in its state {key!r}, which cannot be cut; "
            f"let it keep each tensor under its own key"
        )
    return value
