"""Legitimate edits: parameters are lent to this rank as copies of its own, then written back where they live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sherd.comm import labelled
from sherd.engine.consistency.edits import EditGuard
from sherd.engine.parameters.inventory import Inventory
from sherd.engine.parameters.stores import ParameterStore


class Editing:
    """Lends parameters and takes them back. All ranks do the same."""

    def __init__(self, inventory: Inventory, store: ParameterStore, guard: EditGuard) -> None:
        self._store = store
        self._guard = guard
        self._indices = {id(parameter): index for index, parameter in enumerate(inventory.parameters)}

    @property
    def under_way(self) -> bool:
        """Whether some parameters are lent."""
        return bool(self._guard.lent)

    @contextmanager
    def editing(self, module: nn.Module, compare: bool) -> Iterator[None]:
        """Lend the parameters of `module`, then write rank 0's values back; with `compare` all ranks' must be the same.

        Edits inside an edit belong to the outer one, as far as it goes.
        """
        lent = self._guard.lent
        indices = [self._indices[id(p)] for p in module.parameters() if id(p) in self._indices]
        indices = [index for index in indices if index not in lent]
        self._guard.check()
        if compare and self._guard.compares and not lent:
            with labelled("the beginning of full_parameters"):
                self._guard.compare_if_any("before full_parameters")
        self._store.lend(indices)
        lent.update(indices)
        try:
            yield
            if compare:
                with labelled("the end of full_parameters"):
                    self._guard.compare_values(indices, "inside full_parameters")
        except BaseException:
            self._store.take_back(indices)
            raise
        finally:
            lent.difference_update(indices)
        with labelled("writing parameters back"):
            self._store.write(indices)
        self._guard.written(indices)
