"""Edits that the program makes to parameters, and which of them must be the same on all ranks.

A rank may write into its parameters in any way: `p.data`, `p.data = x`, `torch.no_grad`, `nn.init`, numpy. Where every
rank has and updates its own copy, ranks may edit it differently, as in plain torch. Where ranks share a copy or keep
parts of one, they compare what they wrote before the next update: the same edit on all ranks is kept, any other is an
error. A new dtype, or another object in place of a parameter, is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import Look, TrackedParameter
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.engine.parameters.store import ParameterStore
from sherd.errors import Diverged, SherdError


class Unchanged:
    """Records the look of parameters after the last legitimate change."""

    def __init__(self, comm: Communicator, inventory: Inventory, store: ParameterStore, checksums: bool) -> None:
        self._comm = comm
        self._store = store
        self._members = inventory.members
        self._inventory = inventory
        self._registries = _registries(inventory.model)
        self.compares = store.compares_edits or checksums
        """Whether edits must be the same on all ranks before the next update."""
        self.looks_in_backward = not store.compares_edits
        """Whether edits are looked for in every backward. Where ranks do not each have a copy, they compare what was
        edited before every update."""
        self._checksums = checksums and not store.sees_all_edits
        self.lent: set[TrackedParameter] = set()
        """Parameters that are lent for editing: they are compared when the edit ends."""
        self.edits: set[TrackedParameter] = set()
        """Parameters that this rank has edited and not yet compared with the other ranks."""
        self._sums: dict[TrackedParameter, int] = {}

    def accept(self, members: Iterable[TrackedParameter] | None = None) -> None:
        """Accept these parameters, or all, as they are now."""
        members = self._members if members is None else list(members)
        for member, look in zip(members, self._look(members), strict=True):
            member.seen = look
        self._sums.update(self._sum(members))

    def written(self, members: Iterable[TrackedParameter]) -> None:
        """All ranks have taken the same values of these parameters, whatever edits came before."""
        members = list(members)
        self.edits.difference_update(members)
        self.accept(members)

    def touched(self) -> bool:
        """Whether a parameter was changed since, judging by torch's versions and addresses."""
        return any(member.seen != look for member, look in zip(self._members, self._look(self._members), strict=True))

    def check_kinds(self) -> set[TrackedParameter]:
        """Raise if the dtype or shape of a parameter has changed. Local, and reads no values.

        Returns those that look different in another way.
        """
        different = set()
        for member, look in zip(self._members, self._look(self._members), strict=True):
            if look != member.seen and member not in self.lent:
                self._check_kind(member, look)
                different.add(member)
        return different

    def check(self) -> None:
        """Find what was edited; raise if a parameter was replaced, or its dtype or shape has changed. Local."""
        if any([*map(id, registry.values())] != ids for registry, ids in self._registries):
            self._check_model()
        suspects = self.check_kinds()
        if self._checksums:
            sums = self._sum(self._members)
            suspects.update(member for member, sum in sums.items() if sum != self._sums[member])
        self.edits |= self._store.edited(suspects - self.lent) - self.lent
        if suspects:
            self.accept(suspects)

    # ---------------------------------------------------------------- between ranks

    def compare(self, when: str) -> None:
        """Keep edits that are the same on all ranks, refuse others. Collective."""
        mine = torch.tensor([member in self.edits for member in self._members], dtype=torch.uint8)
        with self._comm.counters.agreeing():
            who = self._comm.all_gather(mine).wait().view(self._comm.world, -1)
        edited = [self._members[index] for index in who.any(0).nonzero().flatten().tolist()]
        self.compare_values(edited, when, dict(zip(self._members, who.T.tolist(), strict=True)))
        self._store.keep_edits(edited)
        self.written(edited)

    def compare_if_any(self, when: str, doing: Sequence[str] = (), mine: str = "") -> None:
        """The same, if any rank has edits. Of several things that they may be `doing`, ranks must all do `mine`.
        Collective."""
        flags = [float(bool(self.edits)), *(float(each == mine) for each in doing)]
        with self._comm.counters.agreeing():
            edited, *counts = self._comm.all_reduce(torch.tensor(flags)).wait().tolist()
            if any(count not in (0, self._comm.world) for count in counts):
                by_rank, rank = self._comm.compare_object(mine)
                raise Diverged(
                    f"the ranks are out of sync: rank 0 is in {by_rank[0]} and rank {rank} in {by_rank[rank]}; step "
                    f"the optimizers in the same order on every rank",
                    ranks=(0, rank),
                )
        if edited:
            self.compare(when)

    def compare_values(
        self, members: Sequence[TrackedParameter], when: str, who: dict[TrackedParameter, list[int]] | None = None
    ) -> None:
        """Refuse values of these parameters that differ between ranks; `who` says which ranks edited. Collective."""
        mine = torch.tensor(self._store.digests(members), dtype=torch.int64)
        with self._comm.counters.agreeing():
            by_rank = self._comm.all_gather(mine).wait().view(self._comm.world, -1)
        different = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        if different:
            raise self._difference([members[at] for at in different], by_rank[:, different[0]], when, who)

    def _difference(
        self, members: list[TrackedParameter], sums: Tensor, when: str, who: dict[TrackedParameter, list[int]] | None
    ) -> Diverged:
        name, others = members[0].name, len(members) - 1
        what = f"parameter {name!r}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
        rank = next(rank for rank, sum in enumerate(sums.tolist()) if sum != sums[0])
        edited = [rank for rank, did in enumerate(who[members[0]]) if did] if who is not None else []
        if edited and len(edited) < self._comm.world:
            where = f"only on rank{'s' * (len(edited) > 1)} {', '.join(map(str, edited))} of {self._comm.world}"
        else:
            where = f"differently on rank 0 and rank {rank}"
        return Diverged(
            f"{when} {what} {'were' if others else 'was'} edited {where}; make the same edits on every rank (random "
            f"ones from the same seed, ones that depend on data after averaging it over the ranks)",
            ranks=(0, rank),
        )

    @contextmanager
    def editing(self, module: nn.Module, compare: bool) -> Iterator[None]:
        """Lend this rank its own copies of the parameters of `module`, then write rank 0's values back; with `compare`,
        all ranks must have the same.

        In nested edits, parameters of the outer edit stay with the outer one.
        """
        members = [member for member in self._inventory.of_module(module) if member not in self.lent]
        self.check()
        if compare and self.compares and not self.lent:
            with labelled("the beginning of full_parameters"):
                self.compare_if_any("before full_parameters")
        self._store.lend(members)
        self.lent.update(members)
        try:
            yield
            if compare:
                with labelled("the end of full_parameters"):
                    self.compare_values(members, "inside full_parameters")
        except BaseException:
            self._store.take_back(members)
            raise
        finally:
            self.lent.difference_update(members)
        with labelled("writing parameters back"):
            self._store.write(members)
        self.written(members)

    # ---------------------------------------------------------------- private

    def _look(self, members: Iterable[TrackedParameter]) -> list[Look]:
        place = self._store.place
        with bypass_torch_function():
            return [
                Look(p._version, place(member), p.stride(), p.dtype, p.shape)
                for member in members
                for p in (member.parameter,)
            ]

    def _sum(self, members: Iterable[TrackedParameter]) -> dict[TrackedParameter, int]:
        return {member: checksum(member.parameter) for member in members} if self._checksums else {}

    def _check_kind(self, member: TrackedParameter, look: Look) -> None:
        before, parameter = member.seen, cast("Any", member.parameter)
        if (look.dtype, look.shape) != (before.dtype, before.shape):
            self._refuse(
                member.name,
                f"is now {look.dtype} of shape {tuple(look.shape)}, but was distributed as {before.dtype} of shape "
                f"{tuple(before.shape)}",
                "call model.to(...), or whatever resized it, before sherd.distribute",
            )
        if look.place != before.place and self._store.owns_memory and parameter.is_shared():
            self._refuse(
                member.name,
                "was moved into shared memory by share_memory(), where updates would not reach it",
                "share a copy of the model: copy.deepcopy(model).share_memory()",
            )

    def _check_model(self) -> None:
        """A module was changed: refuse it unless the parameters are the same, as when one module now wraps another."""
        found = dict(self._inventory.model.named_parameters())
        names = {member.name for member in self._members}
        for name, parameter in found.items():
            if parameter not in self._inventory.by_parameter:
                before = "replaced by another object" if name in names else "added to the model"
                self._refuse(
                    name,
                    f"was {before} after sherd.distribute, so the ranks would not train it",
                    "change the model before sherd.distribute; to change values, write into them inside "
                    "`with sherd.full_parameters(model):`, or use load_state_dict without assign=True",
                )
        kept = set(found.values())
        for member in self._members:
            if member.parameter not in kept:
                self._refuse(
                    member.name,
                    "was removed from the model after sherd.distribute",
                    "change the model before sherd.distribute",
                )
        self._registries = _registries(self._inventory.model)

    def _refuse(self, name: str, what: str, fix: str) -> None:
        raise SherdError(f"rank {self._comm.rank}: parameter {name!r} {what}; {fix}")


def _registries(model: nn.Module) -> list[tuple[dict[str, Any], list[int]]]:
    """Every dict of the model in which parameters or modules are registered, with the identities of its values."""
    registries = (registry for module in model.modules() for registry in (module._parameters, module._modules))
    return [(registry, [*map(id, registry.values())]) for registry in registries]
