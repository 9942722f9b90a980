"""A world of one: torch's own order, batches and seeds. Batches are counted, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sherd.comm import Communicator
from sherd.data.iterable import rows
from sherd.data.order import Known
from sherd.data.samplers import Hands, samples_of
from sherd.data.way import Turn, Way


class Alone(Way):
    """Everything is this rank's. With `by_index` samples are counted as a batch sampler draws them, which says how many
    there are whatever a batch is made of; else by the rows of a batch."""

    def __init__(self, comm: Communicator, by_index: bool) -> None:
        super().__init__(comm)
        self._by_index = by_index

    def indices(self, own: Iterable[Any], ahead: int) -> Iterable[Any]:
        return _Drawn(own) if self._by_index else own

    def turn(self, sampling: Any) -> Turn:
        return sampling if isinstance(sampling, Hands) else _ByRows()


class _Drawn:
    """What a batch sampler gives, counted."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Hands:
        drawn = iter(self._sampler)  # now, as torch does: a sampler may draw random numbers
        return Hands(Known(()), ((indices, 1.0, samples_of(indices)) for indices in drawn))

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # as torch would ask it


class _ByRows:
    def take(self, draw: Callable[[], Any]) -> tuple[Any, float, int]:
        batch = draw()
        return batch, 1.0, rows(batch)
