"""Portions of an update: each is loaded, stepped and stored.

The default portion is a chunk of a run, in memory: what it loads are views. Others nest around it: a portion of your
own is given the one inside, and changes what is loaded or what is done before and after, as a journal or an offload to
a file does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.masters import follow_edits

State = dict[Any, Any]
"""What an optimizer keeps for one tensor, by key."""


class Loaded(NamedTuple):
    """What an optimizer steps as one parameter."""

    value: Tensor
    grad: Tensor | None
    """None if no rank has used it"""
    state: State
    """the step changes it"""


class Portion:
    """A portion around another one, to which it passes everything on. A subclass does more."""

    def __init__(self, inner: Portion) -> None:
        self.inner = inner

    def prefetch(self) -> None:
        """Start to bring in what `load` will need. Called before the previous batch is loaded."""
        self.inner.prefetch()

    def load(self) -> Loaded:
        """What is to be stepped."""
        return self.inner.load()

    def store(self, loaded: Loaded) -> None:
        """Keep what the step has made of it. `state` may be another dict than the one that was loaded."""
        self.inner.store(loaded)

    def copied(self, first: bool) -> int:
        """Elements of tensors that a step, perhaps the `first` one, makes and then copies or drops: only so many such
        portions are stepped at once as fit into little memory."""
        return self.inner.copied(first)


class FlatState:
    """State per element: one flat tensor for each bucket, key and dtype, as long as what is owned of the bucket."""

    def __init__(self) -> None:
        self._flats: dict[tuple[Bucket, Any, torch.dtype], Tensor] = {}

    def of(self, bucket: Bucket, key: Any, dtype: torch.dtype) -> Tensor:
        """The flat tensor, which is zero at first."""
        found = self._flats.get((bucket, key, dtype))
        if found is None:
            owned = bucket.values.owned
            found = self._flats[bucket, key, dtype] = owned.new_zeros(owned.numel(), dtype=dtype)
        return found

    def kept(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Any, Tensor]]:
        """What there is for these buckets, by key; in the same order on ranks that keep the same."""
        for bucket in buckets:
            its = [(key, flat) for (of, key, _), flat in self._flats.items() if of is bucket]
            yield from ((bucket, key, flat) for key, flat in sorted(its, key=lambda each: str(each[0])))


class Chunk(Portion):
    """Elements `begin` to `end` of what the owner has of a bucket, small enough for the cache."""

    def __init__(self, member: TrackedParameter, begin: int, end: int, shape: tuple[int, ...]) -> None:
        self.member = member
        """The parameter that it begins in; all that it spans are used alike."""
        self.bucket, self.begin, self.end, self.shape, self.used = member.bucket, begin, end, shape, member.used
        self._home = self.bucket.values.stepped.detach()[begin:end].view(shape)
        self._value = self._home.detach()
        self._views: State = {}
        self.state: State = {}

    def fill(self, flats: FlatState, state: State) -> None:
        """Begin with this state, in which a dtype stands for a tensor per element."""
        self._flats = flats
        self.state = {key: self._view(key, v) if isinstance(v, torch.dtype) else v for key, v in state.items()}

    def copied(self, first: bool) -> int:
        return self.end - self.begin if first and not self.state else 0

    def prefetch(self) -> None:
        pass

    def load(self) -> Loaded:
        # A new view each time, dropped after the step: an optimizer that kept it would keep the memory.
        grad = self.bucket.owned_sum[self.begin : self.end].view(self.shape) if self.used else None
        return Loaded(self._value, grad, self.state)

    def store(self, loaded: Loaded) -> None:
        if self._value.data_ptr() != self._home.data_ptr():  # p.data = p.data - ...
            self._home.copy_(self._value)
            self._value.data = self._home
        self.state = loaded.state
        for key, value in self.state.items():
            if value is not self._views.get(key, self) and is_per_element(value, self.shape):
                self.state[key] = self._view(key, value.dtype).copy_(value)

    def _view(self, key: Any, dtype: torch.dtype) -> Tensor:
        view = self._flats.of(self.bucket, key, dtype)[self.begin : self.end]
        self._views[key] = view
        return view


class Mastered(Portion):
    """A portion of which the master is stepped, elements `begin` to `end` of a bucket's: what is stored is rounded into
    the parameter."""

    def __init__(self, inner: Portion, bucket: Bucket, begin: int, end: int) -> None:
        super().__init__(inner)
        self._values = bucket.values
        self._master = bucket.values.stepped.detach()[begin:end]
        self._rounded = bucket.values.owned.detach()[begin:end]
        self._converts = bucket.sum_dtype != self._master.dtype

    def copied(self, first: bool) -> int:
        return self._master.numel() if self._converts else super().copied(first)

    def load(self) -> Loaded:
        if self._values.edited:
            follow_edits(self._master, self._rounded)
        loaded = super().load()
        if self._converts and loaded.grad is not None:
            loaded = loaded._replace(grad=loaded.grad.to(self._master.dtype))
        return loaded

    def store(self, loaded: Loaded) -> None:
        super().store(loaded)
        self._rounded.copy_(self._master)


def is_per_element(value: object, shape: tuple[int, ...]) -> bool:
    """Whether it is state per element of a tensor of this shape. A tensor without dimensions has none: torch's step
    counters have no dimensions either and look the same."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape
