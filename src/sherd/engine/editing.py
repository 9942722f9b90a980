"""Legitimate edits: parameters are lent to this rank as copies of its own, then written back where they live."""

from __future__ import annotations

from collections.abc import Iterator
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
        self._lent: set[int] = set()

    @property
    def under_way(self) -> bool:
        """Whether some parameters are lent."""
        return bool(self._lent)

    @contextmanager
    def editing(self, module: nn.Module, compare: bool) -> Iterator[None]:
        """Lend the parameters of `module`, then write rank 0's values back; with `compare` all ranks' must be the same.

        Edits inside an edit belong to the outer one, as far as it goes.
        """
        indices = [self._indices[id(p)] for p in module.parameters() if id(p) in self._indices]
        indices = [index for index in indices if index not in self._lent]
        if not self._lent:
            self._guard.check()
        self._store.lend(indices)
        self._lent.update(indices)
        try:
            yield
            if compare:
                with labelled("the end of full_parameters"):
                    self._compare(indices)
        except BaseException:
            self._store.take_back(indices)
            raise
        finally:
            self._lent.difference_update(indices)
        with labelled("writing parameters back"):
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
            raise Diverged(
                f"parameter {name!r} was edited differently on rank 0 and rank {rank} inside full_parameters, and no "
                f"edit was taken; make the same edits on every rank (random ones: from the same seed)",
                ranks=(0, rank),
            )
