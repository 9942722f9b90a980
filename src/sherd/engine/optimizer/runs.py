"""Runs: what an optimizer shard steps together.

A *part* is what an owner has of one parameter. A *run* is a row of adjacent parts of one bucket, with the padding
between them, that have the same group, use and state, apart from the state per element: they are stepped as one tensor,
in chunks that fit into the cache. What an optimizer keeps is of two kinds: *per element*, tensors of the parameter's
shape (moments), which are parts of a flat tensor, and everything else (step counters), of which each has its own.

A step that one of them is not used in splits a run for good, since its counters lag behind from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.memory import with_own_storage
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.portions import Chunk, FlatState, State, is_per_element


class Part:
    """What an owner has of one parameter, and its state."""

    def __init__(self, member: TrackedParameter, offset: int, start: int, numel: int, whole: bool) -> None:
        self.member = member
        self.bucket = member.bucket
        self.offset = offset
        """Where it begins in what the owner has of the bucket."""
        self.start = start
        """Its first element in the flattened parameter."""
        self.numel = numel
        self.whole = whole
        """Whether it is all of it, in the parameter's own shape."""
        self.shape = member.entry.shape if whole or not member.entry.shape else (numel,)
        self.state: State = {}

    @property
    def value(self) -> Tensor:
        """Its elements of the parameter."""
        return self.view(self.bucket.values.stepped.detach())

    def view(self, flat: Tensor) -> Tensor:
        """Its elements of a flat tensor."""
        piece = flat[self.offset : self.offset + self.numel]
        return self.member.entry.shaped(with_own_storage(piece)) if self.whole else piece.view(self.shape)

    def outline(self) -> tuple[State, bool]:
        """Its state, with a dtype for each tensor per element and the value of each counter; and whether others that
        have the same can be stepped with it."""
        outline, plain = {}, bool(self.member.entry.shape)
        for key, value in self.state.items():
            if is_per_element(value, self.shape):
                outline[key] = value.dtype
            elif _is_counter(value):
                outline[key] = (value.dtype, value.item())
            else:
                outline[key] = value
                plain &= isinstance(value, int | float | str | None)
        return outline, plain


class Run(NamedTuple):
    """Adjacent parts that are stepped together."""

    group: int
    parts: list[Part]
    chunks: list[Chunk]


def parts_of(bucket: Bucket, owner: int | None) -> list[Part]:
    """The parts of a bucket that `owner` has, or everything, in order."""
    whole = owner is None or bucket.holder is not None
    parts = [Part(m, s.offset, s.region.start, s.numel, whole) for m, s in bucket.segments(owner)]
    if owner in (None, bucket.holder or 0):  # torch also counts the steps of a parameter without elements: so does one
        end = bucket.values.owned.numel()
        empty = (member for member in bucket.members if not member.entry.numel)
        parts += [Part(member, min(member.offset, end), 0, 0, whole) for member in empty]
    return sorted(parts, key=lambda part: (part.offset, part.numel))


def find_runs(
    parts: Iterable[Part],
    groups: Mapping[Tensor, int],
    units: Callable[[int, torch.dtype], int],
    flats: FlatState,
    chunk_numel: int,
) -> list[Run]:
    """The runs of the parts that are in a group; `units` has the `merging_unit` of a group and dtype."""
    runs: list[Run] = []
    last: object = None
    for part in parts:
        group = groups.get(part.member.parameter)
        if group is None:
            last = None
            continue
        outline, plain = part.outline()
        kind = (part.bucket, group, part.member.used, outline)
        unit = units(group, part.bucket.update_dtype) if plain and kind == last else 0
        if unit and not runs[-1].parts[-1].numel % unit:
            runs[-1].parts.append(part)
        else:
            runs.append(Run(group, [part], []))
        last = kind if plain else None
    for run in runs:
        _cut(run, flats, chunk_numel)
    places = {parameter: place for place, parameter in enumerate(groups)}
    return sorted(runs, key=lambda run: min(places[part.member.parameter] for part in run.parts))  # the user's order


def _cut(run: Run, flats: FlatState, chunk_numel: int) -> None:
    first, last = run.parts[0], run.parts[-1]
    outline, plain = first.outline()
    begin, end = first.offset, last.offset + last.numel
    size = chunk_numel if plain else max(end - begin, 1)  # what is neither a tensor nor a number cannot be divided
    for start in range(begin, end, size) or (begin,):
        stop = min(start + size, end)
        shape = (stop - start,) if first.member.entry.shape else ()
        member = next(part.member for part in reversed(run.parts) if part.offset <= start)
        chunk = Chunk(member, start, stop, shape)
        kept = {k: v.clone() if _is_counter(v) else v for k, v in first.state.items()}
        chunk.fill(flats, {k: outline[k] if isinstance(outline[k], torch.dtype) else v for k, v in kept.items()})
        run.chunks.append(chunk)


class Counters:
    """Gives each part of a run its own copy of what the run's first chunk keeps besides tensors per element.

    Tensors without dimensions are elements of one small tensor per key, so that a step costs one copy per run.
    """

    def __init__(self, runs: list[Run], flats: FlatState) -> None:
        self._runs = runs
        self._kinds = [_kinds(run) for run in runs]
        self._rest = [
            (run, key) for run, kinds in zip(runs, self._kinds, strict=True) for key in kinds if not kinds[key]
        ]
        counted: dict[Any, list[tuple[Run, Any]]] = {}
        for run in runs:
            for key, value in run.chunks[0].state.items():
                if _is_counter(value):
                    counted.setdefault((key, value.dtype, value.device), []).append((run, key))
        self._targets: list[tuple[Run, Any, Tensor]] = []
        own: dict[tuple[Part, Any], Tensor] = {}
        self._boards = [self._board(kind, having, own) for kind, having in counted.items()]
        for run in runs:
            for part in run.parts:
                _give(run, part, own, flats)
        self._copy()
        self.replaced = False
        """Whether the last step has replaced something by another object."""

    def _board(self, kind: Any, having: list[tuple[Run, Any]], own: dict[tuple[Part, Any], Tensor]) -> Tensor:
        sizes = [len(run.parts) for run, _ in having]
        board = torch.zeros(sum(sizes), dtype=kind[1], device=kind[2])
        elements = iter(board.unbind())
        for (run, key), target in zip(having, torch.split(board, sizes), strict=True):
            self._targets.append((run, key, target))
            own.update({(part, key): next(elements) for part in run.parts})
        return board

    def _copy(self) -> None:
        if self._targets:
            values = [run.chunks[0].state[key] for run, key, _ in self._targets]
            torch._foreach_copy_([target for *_, target in self._targets], values)
        self._expected = [board.clone() for board in self._boards]

    def follow(self) -> bool:
        """A step was taken: copy what it changed. False if the runs keep other things than before."""
        if any(_kinds(run) != kinds for run, kinds in zip(self._runs, self._kinds, strict=True)):
            return False
        self._copy()
        self.replaced = False
        for run, key in self._rest:
            value = run.chunks[0].state[key]
            if run.parts[0].state[key] is not value:
                self.replaced = True
                for part in run.parts:
                    part.state[key] = value
        return True

    def edited(self) -> bool:
        """Whether the user has changed a counter."""
        return not all(map(torch.equal, self._boards, self._expected))


def _give(run: Run, part: Part, counters: Mapping[tuple[Part, Any], Tensor], flats: FlatState) -> None:
    """Give a part the state that its run has."""
    before = dict(part.state)
    part.state.clear()
    for key, value in run.chunks[0].state.items():
        if is_per_element(value, run.chunks[0].shape):
            old: Any = before.get(key)
            ours = is_per_element(old, part.shape) and old.dtype == value.dtype
            part.state[key] = old if ours else part.view(flats.of(part.bucket, key, value.dtype))
        elif (part, key) in counters:
            part.state[key] = counters[part, key]
        else:
            part.state[key] = value if len(run.parts) == len(run.chunks) == 1 else deepcopy(value)


def _is_counter(value: object) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def _kinds(run: Run) -> dict[Any, Any]:
    """What the run keeps, by key: the dtype of a tensor per element, and whether another one is a counter."""
    shape, state = run.chunks[0].shape, run.chunks[0].state
    return {key: value.dtype if is_per_element(value, shape) else _is_counter(value) for key, value in state.items()}
