"""Optimizer state, cut to the chunks of one owner and gathered again.

A *chunk* is what an optimizer shard steps as one tensor: a part of a segment. What an optimizer keeps for a parameter
is of two kinds: *per element*, tensors of the parameter's shape (moments), which are cut with it, and everything else
(step counters), of which each chunk has its own copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm.base import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.errors import ConfigError
from sherd.layout.entry import Entry
from sherd.layout.placement import BLOCK, padded

State = dict[Any, Any]
"""What an optimizer keeps for one tensor, by key."""


class Chunk(NamedTuple):
    """A part of one segment, small enough for the cache."""

    member: TrackedParameter
    offset: int
    """where it begins in the owner's slice of the bucket"""
    start: int
    """its first element in the flattened parameter"""
    value: Tensor


class PerElement(NamedTuple):
    """Stands for a tensor of the parameter's shape where only its form is sent."""

    dtype: torch.dtype


def cut_chunks(buckets: Iterable[Bucket], owner: int, chunk_numel: int) -> dict[TrackedParameter, list[Chunk]]:
    """The chunks of `owner` by parameter, in element order. Each is a view of what it owns."""
    if chunk_numel < 1 or chunk_numel % BLOCK:
        # Fused kernels round the last elements, those that do not fill a vector, differently from the rest: a cut
        # between blocks changes no bit, elsewhere it would.
        raise ConfigError(
            f"chunk_numel={chunk_numel} must be a positive multiple of a block; write {padded(chunk_numel) or BLOCK}"
        )
    chunks: dict[TrackedParameter, list[Chunk]] = {}
    for bucket in buckets:
        # Member, offset in the slice, start in the parameter, elements.
        pieces = [
            (member, segment.offset + cut, segment.region.start + cut, segment.numel - cut)
            for member, segment in bucket.segments(owner)
            for cut in range(0, segment.numel, chunk_numel)
        ]
        if owner == 0:  # torch also counts the steps of a parameter without elements, so one owner must
            pieces += [(member, 0, 0, 0) for member in bucket.members if not member.entry.numel]
        for member, offset, start, left in pieces:
            # A parameter without dimensions stays so: torch's step counters have none either and look the same.
            shape = (min(left, chunk_numel),) if member.entry.shape else ()
            value = bucket.values.owned.detach()[offset : offset + min(left, chunk_numel)].view(shape)
            chunks.setdefault(member, []).append(Chunk(member, offset, start, value))
    return chunks


def cut_state(chunks: Sequence[Chunk], entry: Entry, state: State, group: Mapping[str, Any]) -> list[State]:
    """For each chunk of a parameter its part of `state`, with the dtypes of torch's `load_state_dict`.

    The parts share no memory with `state`. `group` has the parameter's hyper-parameters.
    """
    parts: list[State] = [{} for _ in chunks]
    policy = [{**group, "params": [0]}]
    for key, value in state.items():
        per_element = isinstance(value, Tensor) and value.shape == entry.shape
        flat = entry.flattened(value.detach()) if per_element else value  # once, since it may copy all of it
        for chunk, part in zip(chunks, parts, strict=True):
            if not isinstance(value, Tensor):
                part[key] = deepcopy(_without_tensors(key, value))
                continue
            own = chunk.value
            piece = flat[chunk.start : chunk.start + own.numel()].view(own.shape) if per_element else value
            cast = Optimizer._process_value_according_to_param_policy(own, piece, 0, policy, key)
            part[key] = cast.clone() if cast is piece else cast
    return parts


def gather_state(
    comm: Communicator,
    buckets: BucketList,
    chunks: Mapping[TrackedParameter, Sequence[Chunk]],
    state: Mapping[Any, State],
) -> tuple[dict[TrackedParameter, State], dict[Any, Any]]:
    """The state of whole parameters, and state that belongs to no parameter; on every rank. Collective.

    Besides the result it needs the memory of one bucket and one slice.
    """
    entries = {member: entry for entry, member in enumerate(buckets.parameters)}
    mine = {
        entries[member]: _outline(cut[0], state[cut[0].value])
        for member, cut in chunks.items()
        if state.get(cut[0].value)
    }
    other = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    whole: dict[TrackedParameter, State] = {}
    by_rank = comm.all_gather_object((mine, other))
    for outlines, _ in by_rank:
        for entry, outline in outlines.items():
            # The owner of a parameter's first element decides.
            kept = {key: PerElement(value) if cut else value for key, cut, value in outline}
            whole.setdefault(buckets.parameters[entry], kept)
    for bucket in buckets.buckets:
        for (key, dtype), having in _tensors(bucket, whole).items():
            own = bucket.values.owned.new_zeros(bucket.described.slice_numel, dtype=dtype)
            for chunk in (chunk for member in having for chunk in chunks.get(member, ())):
                own[chunk.offset : chunk.offset + chunk.value.numel()] = state[chunk.value][key].reshape(-1)
            gathered = comm.all_gather(own).wait()
            for member in having:
                whole[member][key] = member.entry.shaped(
                    gathered[member.offset : member.offset + member.entry.numel].clone()
                )
    return whole, by_rank[0][1]


def state_bytes(state: Mapping[Any, Any]) -> int:
    """Bytes of the tensors in `state`."""
    kept = (value for values in state.values() if isinstance(values, dict) for value in values.values())
    return sum(value.numel() * value.element_size() for value in kept if isinstance(value, Tensor))


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


def _outline(chunk: Chunk, state: State) -> list[tuple[Any, bool, Any]]:
    """The state of a chunk: keys, whether each is per element, and values, or dtypes if per element. It is sent to
    other hosts, so it is plain data, except for other objects that the optimizer itself keeps."""
    outline = []
    for key, value in state.items():
        per_element = isinstance(value, Tensor) and value.shape == chunk.value.shape
        outline.append((key, per_element, value.dtype if per_element else _without_tensors(key, value)))
    return outline


def _without_tensors(key: object, value: Any) -> Any:
    if holds_tensors(value):
        raise ConfigError(
            f"the optimizer keeps tensors inside a {type(value).__name__} in its state {key!r}, which cannot be cut; "
            f"let it keep each tensor under its own key"
        )
    return value
