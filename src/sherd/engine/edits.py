"""Parameters that somebody changed behind the engine's back.

A shared parameter that every rank edits is edited once per rank, and one that leaves the store is never updated again;
neither may pass unnoticed. Before each step the engine checks that every parameter is still the same object, at the
same address, at the version of the last legitimate change; with checksums, that its values are the same too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sherd.engine.inventory import Inventory
from sherd.engine.stores import ParameterStore
from sherd.errors import SherdError


class EditGuard:
    """Knows what parameters looked like after the last legitimate change."""

    def __init__(self, inventory: Inventory, store: ParameterStore, rank: int, checksums: bool) -> None:
        self._rank = rank
        self._store = store
        self._names = (*inventory.names, *inventory.frozen_names)
        self._parameters = (*inventory.trainable, *inventory.frozen)
        self._trainable = len(inventory.trainable)
        self._places = _places(inventory.model)
        self.checksums = checksums
        self.accept()

    def accept(self) -> None:
        """Parameters are as they should be."""
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        self._sums = [checksum(p) for p in self._parameters] if self.checksums else []

    def check(self) -> None:
        """Raise if a parameter was replaced, moved or edited."""
        for registry, key, parameter, name in self._places:
            if registry.get(key) is not parameter:
                self._refuse(
                    name,
                    "was replaced by another object",
                    "write into it inside `with sherd.full_parameters(model):`, or load_state_dict without assign=True",
                )
        for index in range(self._trainable, len(self._parameters)):
            if self._parameters[index].requires_grad:
                self._refuse(
                    self._names[index],
                    "was frozen when the model was distributed and is not any more",
                    "unfreeze it before sherd.distribute",
                )
        for index, parameter in enumerate(self._parameters):
            moved = parameter.data_ptr() != self._addresses[index] and self._store.owns_memory
            if moved or parameter.dtype != self._dtypes[index]:
                self._refuse(
                    self._names[index],
                    "was moved out of the memory that its ranks train",
                    "call model.to(...) before sherd.distribute",
                )
            if parameter._version != self._versions[index] and self._store.shared:
                self._refuse_edit(index)
        for index, (parameter, before) in enumerate(zip(self._parameters, self._sums, strict=bool(self._sums))):
            if self._store.shared and checksum(parameter) != before:
                self._refuse_edit(index)

    def _refuse_edit(self, index: int) -> None:
        self._refuse(
            self._names[index],
            "was edited outside full_parameters; it is shared by the ranks of this host, so each rank's edit adds up",
            "edit it inside `with sherd.full_parameters(model):`, and pass its optimizer to sherd.distribute",
        )

    def _refuse(self, name: str, what: str, fix: str) -> None:
        raise SherdError(f"rank {self._rank}: parameter {name!r} {what}; {fix}")


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str, nn.Parameter, str]]:
    """Every place in the model where a parameter is registered, and its name there."""
    return [
        (module._parameters, key, parameter, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def checksum(parameter: Tensor) -> int:
    """Changes when a bit changes, nearly always."""
    flat = parameter.detach().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
    return int(flat.view(whole).sum(dtype=torch.int64)) if whole else 0
