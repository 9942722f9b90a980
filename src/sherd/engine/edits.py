"""Parameters that somebody changed behind the engine's back.

A shared parameter that every rank edits is edited once per rank, and one that leaves the store is never updated again;
neither may pass unnoticed. Before each step the engine checks that every parameter is still the same object, at the
same address, at the version of the last legitimate change; with checksums, that its values are the same too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sherd.comm import Communicator
from sherd.engine.apart import unnoticed
from sherd.engine.inventory import Inventory
from sherd.engine.stores import ParameterStore
from sherd.errors import Diverged, SherdError


class EditGuard:
    """Knows what parameters looked like after the last legitimate change."""

    def __init__(self, inventory: Inventory, store: ParameterStore, rank: int, checksums: bool) -> None:
        self._rank = rank
        self._store = store
        self._names = inventory.names
        self._parameters = inventory.parameters
        self._model = inventory.model
        self._places = _places(inventory.model)
        self.checksums = checksums
        self.accept()

    def accept(self) -> None:
        """Parameters are as they should be."""
        self.edited = False
        """Whether some were edited since that are not shared: that is all right, if all ranks do the same."""
        self._looks = self._look()
        self._sums = [checksum(p) for p in self._parameters] if self.checksums else []

    def check(self) -> None:
        """Raise if a parameter was replaced, moved or edited."""
        if any([*map(id, registry.values())] != ids for registry, ids in self._places):
            self._check_model()
        looks = self._look()
        if looks != self._looks:
            for index, (look, before) in enumerate(zip(looks, self._looks, strict=True)):
                if look != before:
                    self._check_look(index, look, before)
        for index, (parameter, sum_before) in enumerate(zip(self._parameters, self._sums, strict=bool(self._sums))):
            if checksum(parameter) != sum_before:
                self._note_edit(index)

    def _look(self) -> list[Look]:
        place = self._store.place
        with unnoticed():
            return [Look(p._version, place(index), p.dtype, p.shape) for index, p in enumerate(self._parameters)]

    def _check_look(self, index: int, look: Look, before: Look) -> None:
        moved = look.place != before.place and self._store.owns_memory
        if moved or (look.dtype, look.shape) != (before.dtype, before.shape):
            self._refuse(
                self._names[index],
                "was moved out of the memory that its ranks train",
                "call model.to(...), or whatever resized it, before sherd.distribute",
            )
        if look.version != before.version:
            self._note_edit(index)

    def _check_model(self) -> None:
        """Some module was changed: refuse it unless the parameters are the same, as where one wraps another now."""
        found = dict(self._model.named_parameters())
        known = {id(parameter) for parameter in self._parameters}
        for name, parameter in found.items():
            if id(parameter) not in known:
                before = "replaced by another object" if name in self._names else "added to the model"
                self._refuse(
                    name,
                    f"was {before} after sherd.distribute, so the ranks would not train it",
                    "change the model before sherd.distribute; to change values, write into them inside "
                    "`with sherd.full_parameters(model):`, or use load_state_dict without assign=True",
                )
        kept = {id(parameter) for parameter in found.values()}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if id(parameter) not in kept:
                self._refuse(
                    name,
                    "was removed from the model after sherd.distribute",
                    "change the model before sherd.distribute",
                )
        self._places = _places(self._model)

    def _note_edit(self, index: int) -> None:
        self.edited = True
        if not self._store.shared:
            return
        self._refuse(
            self._names[index],
            "was edited outside full_parameters; it is shared by the ranks of this host, so each rank's edit adds up",
            "edit it inside `with sherd.full_parameters(model):`, and pass its optimizer to sherd.distribute",
        )

    def _refuse(self, name: str, what: str, fix: str) -> None:
        raise SherdError(f"rank {self._rank}: parameter {name!r} {what}; {fix}")


class Look(NamedTuple):
    """What can be seen of a parameter without reading its values."""

    version: int
    place: object
    dtype: torch.dtype
    shape: torch.Size


def _places(model: nn.Module) -> list[tuple[dict[str, Any], list[int]]]:
    """Every dict of the model in which parameters or modules are registered, and the identities of what it holds."""
    registries = (registry for module in model.modules() for registry in (module._parameters, module._modules))
    return [(registry, [*map(id, registry.values())]) for registry in registries]


def compare_values(comm: Communicator, inventory: Inventory, indices: Sequence[int], when: str) -> None:
    """Refuse parameters whose values differ between ranks. Collective."""
    mine = torch.tensor([checksum(inventory.parameters[index]) for index in indices], dtype=torch.int64)
    with comm.counters.agreeing():
        everybody = comm.all_gather(mine).wait().view(comm.world, -1)
    different = (everybody != everybody[0]).nonzero()
    if different.numel():
        rank, at = different[0].tolist()
        raise Diverged(
            f"{when} parameter {inventory.names[indices[at]]!r} was edited differently on rank 0 and rank {rank}; make "
            f"the same edits on every rank (random ones: from the same seed)",
            ranks=(0, rank),
        )


def checksum(parameter: Tensor) -> int:
    """Changes when a bit changes, nearly always."""
    flat = parameter.detach().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
    return int(flat.view(whole).sum(dtype=torch.int64)) if whole else 0
