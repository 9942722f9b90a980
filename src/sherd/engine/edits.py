"""Parameters that a program changes by itself, and what of that the ranks must have in common.

A rank may write into its parameters by whatever route: `p.data`, `p.data = x`, `torch.no_grad`, `nn.init`, numpy. Where
every rank has a copy that it updates itself, an edit is the rank's own affair, as in plain torch. Where ranks share a
copy or keep parts of one, they compare what they wrote before the next update: the same edit everywhere is kept, any
other is an error. What no comparison can mend is refused at once: another dtype, another object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sherd.comm import Communicator
from sherd.engine.apart import bypass_torch_function
from sherd.engine.checksum import checksum
from sherd.engine.inventory import Inventory
from sherd.engine.stores import ParameterStore
from sherd.errors import Diverged, SherdError


class EditGuard:
    """Knows what parameters looked like after the last legitimate change."""

    def __init__(self, comm: Communicator, inventory: Inventory, store: ParameterStore, checksums: bool) -> None:
        self._comm = comm
        self._store = store
        self._names = inventory.names
        self._parameters = inventory.parameters
        self._model = inventory.model
        self._places = _places(inventory.model)
        self._compares = store.compares_edits or checksums
        self._checksums = checksums and not store.sees_all_edits
        self.lent: set[int] = set()
        """Parameters that are lent to be edited: whoever lent them compares them."""
        self.edits: set[int] = set()
        """Parameters that this rank has edited and not compared with the others' yet."""
        self._looks: list[Look] = []
        self._sums: dict[int, int] = {}

    @property
    def compares(self) -> bool:
        """Whether edits must be the same on all ranks before the next update."""
        return self._compares

    def accept(self, indices: Iterable[int] | None = None) -> None:
        """These parameters, or all, are as they should be."""
        looks = self._look()
        if indices is None:
            self._looks, self._sums = looks, self._sum(range(len(looks)))
            return
        for index in indices:
            self._looks[index] = looks[index]
            self._sums.update(self._sum([index]))

    def written(self, indices: Iterable[int]) -> None:
        """All ranks have taken the same values of these parameters, whatever was done to them before."""
        self.edits.difference_update(indices)
        self.accept(indices)

    def touched(self) -> bool:
        """Whether a parameter was changed since, as far as torch's versions and places tell."""
        return self._look() != self._looks

    def check_kinds(self) -> None:
        """Raise if a parameter is of another dtype or shape than before. Local, and looks at no values."""
        for index, (look, before) in enumerate(zip(self._look(), self._looks, strict=True)):
            if look != before and index not in self.lent:
                self._check_kind(index, look, before)

    def check(self) -> None:
        """Find what was edited; raise if a parameter was replaced, or is of another dtype or shape. Local."""
        if any([*map(id, registry.values())] != ids for registry, ids in self._places):
            self._check_model()
        looks, suspects = self._look(), set[int]()
        if looks != self._looks:
            for index, (look, before) in enumerate(zip(looks, self._looks, strict=True)):
                if look != before and index not in self.lent:
                    self._check_kind(index, look, before)
                    suspects.add(index)
        if self._checksums:
            sums = self._sum(range(len(looks)))
            suspects.update(index for index, sum in sums.items() if sum != self._sums[index])
        self.edits |= self._store.edited(suspects - self.lent) - self.lent
        if suspects:
            self.accept(suspects)

    def compare(self, when: str) -> None:
        """Refuse edits that are not the same on all ranks, and keep the others. Collective."""
        mine = torch.zeros(len(self._names), dtype=torch.uint8)
        mine[sorted(self.edits)] = 1
        with self._comm.counters.agreeing():
            who = self._comm.all_gather(mine).wait().view(self._comm.world, -1)
        indices: list[int] = who.any(0).nonzero().flatten().tolist()
        self.compare_values(indices, when, who)
        self._store.keep_edits(indices)
        self.written(indices)

    def compare_if_any(self, when: str) -> None:
        """The same if some rank has edits. Collective."""
        with self._comm.counters.agreeing():
            edited = self._comm.all_reduce(torch.tensor([float(bool(self.edits))])).wait()
        if edited.item():
            self.compare(when)

    def compare_values(self, indices: Sequence[int], when: str, who: torch.Tensor | None = None) -> None:
        """Refuse values of these parameters that are not the same on all ranks; `who` says which ranks edited which.
        Collective."""
        mine = torch.tensor(self._store.digests(indices), dtype=torch.int64)
        with self._comm.counters.agreeing():
            everybody = self._comm.all_gather(mine).wait().view(self._comm.world, -1)
        different = (everybody != everybody[0]).any(0).nonzero().flatten().tolist()
        if different:
            raise self._difference([indices[at] for at in different], everybody[:, different[0]].tolist(), when, who)

    def _difference(self, indices: list[int], sums: list[int], when: str, who: torch.Tensor | None) -> Diverged:
        name, others = self._names[indices[0]], len(indices) - 1
        what = f"parameter {name!r}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
        rank = next(rank for rank, sum in enumerate(sums) if sum != sums[0])
        edited = [rank for rank, did in enumerate(who[:, indices[0]].tolist()) if did] if who is not None else []
        if edited and len(edited) < self._comm.world:
            where = f"only on rank{'s' * (len(edited) > 1)} {', '.join(map(str, edited))} of {self._comm.world}"
        else:
            where = f"differently on rank 0 and rank {rank}"
        return Diverged(
            f"{when} {what} {'were' if others else 'was'} edited {where}; make the same edits on every rank (random "
            f"ones from the same seed, ones that depend on data after averaging it over the ranks)",
            ranks=(0, rank),
        )

    # ---------------------------------------------------------------- private

    def _look(self) -> list[Look]:
        place = self._store.place
        with bypass_torch_function():
            return [
                Look(p._version, place(index), p.stride(), p.dtype, p.shape) for index, p in enumerate(self._parameters)
            ]

    def _sum(self, indices: Iterable[int]) -> dict[int, int]:
        return {index: checksum(self._parameters[index]) for index in indices} if self._checksums else {}

    def _check_kind(self, index: int, look: Look, before: Look) -> None:
        if (look.dtype, look.shape) != (before.dtype, before.shape):
            self._refuse(
                self._names[index],
                f"is {look.dtype} of shape {tuple(look.shape)} now, and was distributed as {before.dtype} of shape "
                f"{tuple(before.shape)}",
                "call model.to(...), or whatever resized it, before sherd.distribute",
            )
        parameter: Any = self._parameters[index]
        if look.place != before.place and self._store.owns_memory and parameter.is_shared():
            self._refuse(
                self._names[index],
                "was moved into memory for other processes by share_memory(), where updates would not reach it",
                "share a copy of the model: copy.deepcopy(model).share_memory()",
            )

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

    def _refuse(self, name: str, what: str, fix: str) -> None:
        raise SherdError(f"rank {self._comm.rank}: parameter {name!r} {what}; {fix}")


class Look(NamedTuple):
    """What can be seen of a parameter without reading its values."""

    version: int
    place: object
    strides: tuple[int, ...]
    dtype: torch.dtype
    shape: torch.Size


def _places(model: nn.Module) -> list[tuple[dict[str, Any], list[int]]]:
    """Every dict of the model in which parameters or modules are registered, and the identities of what it holds."""
    registries = (registry for module in model.modules() for registry in (module._parameters, module._modules))
    return [(registry, [*map(id, registry.values())]) for registry in registries]
