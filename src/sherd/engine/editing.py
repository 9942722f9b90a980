"""Legitimate edits: parameters are lent to this rank as copies of its own, then written back where they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sherd.comm import Communicator, labelled
from sherd.engine.edits import EditGuard, checksum
from sherd.engine.inventory import Inventory
from sherd.engine.stores import ParameterStore
from sherd.errors import Diverged


class Editing:
    """Lends parameters and takes them back. All ranks do the same."""

    def __init__(self, comm: Communicator, inventory: Inventory, store: ParameterStore, guard: EditGuard) -> None:
        self._comm = comm
        self._store = store
        self._guard = guard
        self._names = inventory.names
        self._parameters = inventory.parameters
        self._indices = {id(parameter): index for index, parameter in enumerate(inventory.parameters)}
        self._lent: Counter[int] = Counter()

    @property
    def under_way(self) -> bool:
        """Whether some parameters are lent."""
        return bool(self._lent)

    def lend(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Give this rank copies of its own. A parameter can be lent twice: tied ones are."""
        indices = self._known(parameters)
        if not self._lent:
            self._guard.check()
        self._store.lend([index for index in indices if not self._lent[index]])
        self._lent.update(indices)

    def write_back(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Take rank 0's copies for everybody's, when they were given back as often as they were lent. Collective."""
        indices = self._known(parameters)
        self._lent.subtract(indices)
        self._write([index for index in indices if self._lent[index] <= 0])

    @contextmanager
    def editing(self, module: nn.Module) -> Iterator[None]:
        """Lend all parameters of `module`, compare the ranks' edits and write them back."""
        parameters = list(module.parameters())
        indices = self._known(parameters)
        self.lend(parameters)
        try:
            yield
        except BaseException:
            self._return(indices)
            raise
        self._lent.subtract(indices)
        with labelled("the end of full_parameters"):
            self._compare(indices)
            self._write(indices)

    def _known(self, parameters: Iterable[nn.Parameter | None]) -> list[int]:
        return [self._indices[id(p)] for p in parameters if p is not None and id(p) in self._indices]

    def _return(self, indices: list[int]) -> None:
        self._store.take_back(indices)
        self._lent.subtract(indices)
        self._lent += Counter()

    def _write(self, indices: list[int]) -> None:
        self._lent += Counter()  # drops what is not lent any more
        self._store.write(indices)
        self._guard.accept()

    def _compare(self, indices: list[int]) -> None:
        mine = torch.tensor([checksum(self._parameters[index]) for index in indices], dtype=torch.int64)
        with self._comm.counters.agreeing():
            everybody = self._comm.all_gather(mine).wait().view(self._comm.world, -1)
        different = (everybody != everybody[0]).nonzero()
        if different.numel():
            rank, at = different[0].tolist()
            name = self._names[indices[at]]
            self._store.take_back(indices)
            self._lent += Counter()
            raise Diverged(
                f"parameter {name!r} was edited differently on rank 0 and rank {rank} inside full_parameters, and no "
                f"edit was taken; make the same edits on every rank (random ones: from the same seed)",
                ranks=(0, rank),
            )
