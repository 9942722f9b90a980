"""Legitimate edits: parameters are lent to this rank as copies of its own, then written back where they live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sherd.comm import Communicator, labelled
from sherd.engine.edits import EditGuard, compare_values
from sherd.engine.inventory import Inventory
from sherd.engine.stores import ParameterStore


class Editing:
    """Lends parameters and takes them back. All ranks do the same."""

    def __init__(self, comm: Communicator, inventory: Inventory, store: ParameterStore, guard: EditGuard) -> None:
        self._comm = comm
        self._store = store
        self._guard = guard
        self._inventory = inventory
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
                    compare_values(self._comm, self._inventory, indices, "inside full_parameters")
        except BaseException:
            self._store.take_back(indices)
            raise
        finally:
            self._lent.difference_update(indices)
        with labelled("writing parameters back"):
            self._store.write(indices)
        self._guard.accept()
