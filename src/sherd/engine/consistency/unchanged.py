"""Edits that the program makes to parameters, and which of them must be the same on all ranks.

A rank may write into its parameters in any way: `p.data`, `p.data = x`, `torch.no_grad`, `nn.init`, numpy. Where every
rank has and updates its own copy, ranks may edit it differently, as in plain torch. Where ranks share a copy or keep
parts of one, they compare what they wrote before the next update: the same edit on all ranks is kept, any other is an
error. A new dtype, or another object in place of a parameter, is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.engine.parameters.masters import follow_edits, put_masters, whole_masters
from sherd.engine.parameters.store import ParameterStore, take_from_leader
from sherd.errors import Diverged, SherdError

_END = object()

Kind = tuple[tuple[int, ...], torch.dtype, torch.Size]
"""The strides, dtype and shape of a parameter."""


class Unchanged:
    """Records the look of parameters after the last legitimate change: versions, places and kinds.

    Each is one list that is compared as a whole: in nearly every step nothing was changed.
    """

    def __init__(self, comm: Communicator, inventory: Inventory, store: ParameterStore, checksums: bool) -> None:
        self._comm = comm
        self._store = store
        self._members = inventory.members
        self._parameters = inventory.parameters
        self._inventory = inventory
        self._index = {member: index for index, member in enumerate(self._members)}
        self._versions: list[int] = []
        self._places: list[object] = []
        self._kinds: list[Kind] = []
        self._note_registries()
        self.compares = store.compares_edits or checksums
        """Whether edits must be the same on all ranks before the next update."""
        self.looks_in_backward = not store.compares_edits
        """Whether edits are looked for in every backward. Where ranks do not each have a copy, they compare what was
        edited before every update."""
        self._checksums = checksums and not store.sees_all_edits
        self.lent: set[TrackedParameter] = set()
        """Parameters that are lent for editing: they are compared when the edit ends."""
        self._lent_masters: set[TrackedParameter] = set()  # those of them that are lent as their masters
        self.edits: set[TrackedParameter] = set()
        """Parameters that this rank has edited and not yet compared with the other ranks."""
        self._sums: dict[TrackedParameter, int] = {}

    def accept_values(self) -> None:
        """Accept what was written into the parameters, which are where they were."""
        with bypass_torch_function():
            self._versions = [parameter._version for parameter in self._parameters]
        self._sums.update(self._sum(self._members))

    def accept(self, members: Iterable[TrackedParameter] | None = None) -> None:
        """Accept these parameters, or all, as they are now."""
        members = self._members if members is None else list(members)
        versions, places = self._look()
        if members is self._members:
            if places != self._places:  # a kind changes with the place, if an update changes it at all
                self._kinds = self._look_at_kinds()
            self._versions, self._places = versions, places
        else:
            kinds = self._look_at_kinds()
            for at in (self._index[member] for member in members):
                self._versions[at], self._places[at], self._kinds[at] = versions[at], places[at], kinds[at]
        self._sums.update(self._sum(members))

    def written(self, members: Iterable[TrackedParameter]) -> None:
        """All ranks have taken the same values of these parameters, whatever edits came before."""
        members = list(members)
        self.edits.difference_update(members)
        _mark(members)
        self.accept(members)

    def touched(self) -> bool:
        """Whether a parameter was changed since, judging by torch's versions and addresses."""
        return self._look() != (self._versions, self._places)

    def check_kinds(self, closely: bool = True) -> set[TrackedParameter]:
        """Raise if the dtype or shape of a parameter has changed. Local, and reads no values.

        Returns those that look different in another way. If it need not look `closely`, it looks at strides, dtypes
        and shapes only if something was written or moved: `p.data = p.data.t()` is found by the next check.
        """
        found: list[Sequence[Any]] = [*self._look()]
        if not closely and found == [self._versions, self._places]:
            return set()
        found, before = [*found, self._look_at_kinds()], [self._versions, self._places, self._kinds]
        if found == before:
            return set()
        different = set()
        for member, old, new in zip(self._members, zip(*before, strict=True), zip(*found, strict=True), strict=True):
            if old != new and member not in self.lent:
                self._check_kind(member, old[2], new[2], moved=old[1] != new[1])
                different.add(member)
        return different

    def check(self, closely: bool = True) -> None:
        """Find what was edited; raise if a parameter was replaced, or its dtype or shape has changed. Local.

        If it need not look `closely`, it finds what was moved.
        """
        if not self._same_objects():
            self._check_model()
        if not closely and self._look_at_places() == self._places:
            return
        suspects = self.check_kinds()
        if self._checksums:
            sums = self._sum(self._members)
            suspects.update(member for member, sum in sums.items() if sum != self._sums[member])
        found = self._store.edited(suspects - self.lent) - self.lent
        self.edits |= found
        _mark(found)
        if suspects:
            self.accept(suspects)

    # ---------------------------------------------------------------- between ranks

    def compare(self, when: str) -> None:
        """Keep edits that are the same on all ranks, refuse others. Collective."""

        def compare(comm: Communicator, members: Sequence[TrackedParameter]) -> None:
            mine = torch.tensor([member in self.edits for member in members], dtype=torch.uint8)
            with comm.counters.agreeing():
                who = comm.all_gather(mine).wait().view(comm.world, -1)
            edited = [members[index] for index in who.any(0).nonzero().flatten().tolist()]
            self._compare_values(comm, edited, when, dict(zip(members, who.T.tolist(), strict=True)))
            self._store.keep_edits(edited)
            self.written(edited)

        self._by_group(self._members, compare)

    def compare_if_any(self, when: str, doing: Sequence[str] = (), mine: str = "") -> None:
        """The same, if any rank has edits. Of several things that they may be `doing`, ranks must all do `mine`.
        Collective."""
        flags = [float(bool(self.edits)), *(float(each == mine) for each in doing)]
        with self._comm.counters.agreeing():
            edited, *counts = self._comm.all_reduce(torch.tensor(flags)).wait().tolist()
            if any(count not in (0, self._comm.world) for count in counts):
                by_rank, rank = self._comm.compare_object(mine)
                one, two = self._comm.numbers[0], self._comm.numbers[rank]
                raise Diverged(
                    f"the ranks are out of sync: rank {one} is in {by_rank[0]} and rank {two} in {by_rank[rank]}; step "
                    f"the optimizers in the same order on every rank",
                    ranks=(one, two),
                )
        if edited:
            self.compare(when)

    def compare_values(self, members: Sequence[TrackedParameter], when: str) -> None:
        """Refuse values of these parameters that differ between ranks. Collective."""
        self._by_group(members, lambda comm, its: self._compare_values(comm, its, when))

    def _compare_values(
        self,
        comm: Communicator,
        members: Sequence[TrackedParameter],
        when: str,
        who: dict[TrackedParameter, list[int]] | None = None,
    ) -> None:
        """The same in one group; `who` says which ranks edited."""
        mine = torch.tensor(self._store.digests(members), dtype=torch.int64)
        with comm.counters.agreeing():
            by_rank = comm.all_gather(mine).wait().view(comm.world, -1)
        different = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        if different:
            raise self._difference([members[at] for at in different], by_rank[:, different[0]], when, who)

    def _by_group(
        self, members: Sequence[TrackedParameter], compare: Callable[[Communicator, Sequence[TrackedParameter]], None]
    ) -> None:
        """Compare parameters among the ranks that hold them. What one group finds is raised on all ranks."""
        if not self._inventory.groups:
            compare(self._comm, members)
            return
        by_ranks: dict[Ranks, list[TrackedParameter]] = {}
        for member in members:
            by_ranks.setdefault(member.ranks, []).append(member)
        found: Diverged | None = None
        for its in sorted(by_ranks.values(), key=lambda its: its[0].ranks or ()):  # in one order on all ranks
            try:
                compare(its[0].bucket.comm, its)
            except Diverged as error:
                found = found or error
        if None in by_ranks:  # else only those that hold them are here
            with self._comm.counters.agreeing():
                everybody = self._comm.all_gather_object(None if found is None else (str(found), found.ranks))
            text, ranks = next((each for each in everybody if each is not None), ("", ()))
            found = Diverged(text, ranks=tuple(ranks)) if text else None
        if found is not None:
            raise found

    def _difference(
        self, members: list[TrackedParameter], sums: Tensor, when: str, who: dict[TrackedParameter, list[int]] | None
    ) -> Diverged:
        name, others = members[0].name, len(members) - 1
        what = f"parameter {name!r}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
        numbers = self._comm.numbers
        ranks = members[0].ranks or range(self._comm.world)
        other = next(rank for rank, sum in zip(ranks, sums.tolist(), strict=True) if sum != sums[0])
        one, two = numbers[ranks[0]], numbers[other]
        did = zip(ranks, who[members[0]], strict=True) if who is not None else ()
        edited = [numbers[rank] for rank, by in did if by]
        if edited and len(edited) < len(ranks):
            every = [numbers[rank] for rank in ranks]
            of = str(len(ranks)) if every == [*range(len(every))] else f"ranks {', '.join(map(str, every))}"
            where = f"only on rank{'s' * (len(edited) > 1)} {', '.join(map(str, edited))} of {of}"
        else:
            where = f"differently on rank {one} and rank {two}"
        return Diverged(
            f"{when} {what} {'were' if others else 'was'} edited {where}; make the same edits on every rank (random "
            f"ones from the same seed, ones that depend on data after averaging it over the ranks)",
            ranks=(one, two),
        )

    @contextmanager
    def editing(self, module: nn.Module, compare: bool, masters: Collection[TrackedParameter] = ()) -> Iterator[None]:
        """Lend this rank its own copies of the parameters of `module`, then write rank 0's values back; with `compare`,
        all ranks must have the same. Of `masters`, what is lent and written are their masters.

        In nested edits, parameters of the outer edit stay with the outer one.
        """
        members = [member for member in self._inventory.of_module(module) if member not in self.lent]
        self.check()
        common = not self._inventory.groups or any(member.ranks is None for member in members)
        if compare and common and self.compares and not self.lent:
            with labelled("the beginning of full_parameters"):
                self.compare_if_any("before full_parameters")
        mastered = [member for member in members if member in masters]
        self._refuse_rounded(masters)
        self._store.lend(members)
        self.lent.update(members)
        try:
            self._lend_masters(mastered)
            yield
            if compare:
                with labelled("the end of full_parameters"):
                    self.compare_values(members, "inside full_parameters")
        except BaseException:
            self._store.take_back(members)
            raise
        finally:
            self.lent.difference_update(members)
            self._lent_masters.difference_update(members)
        with labelled("writing parameters back"):
            if mastered:
                self._write_masters(mastered)
            self._store.write(members)
        self.written(members)

    def _refuse_rounded(self, masters: Collection[TrackedParameter]) -> None:
        """Refuse masters of parameters that an outer edit has lent without them."""
        rounded = next((member for member in masters if member in self.lent - self._lent_masters), None)
        if rounded is not None:
            raise SherdError(
                f"rank {self._comm.number}: parameter {rounded.name!r} is lent in 16 bits by a full_parameters around "
                f"this, so its fp32 values would be rounded; write sherd.full_parameters(model, masters=True) there"
            )

    def _lend_masters(self, members: Sequence[TrackedParameter]) -> None:
        """Give these parameters, which are lent, the values of their masters. Collective where ranks own slices."""
        buckets = sorted({member.bucket for member in members}, key=lambda bucket: bucket.described.index)
        wholes = whole_masters(buckets, self._store.updates_slices)
        for member in members:
            whole = member.shaped_in(wholes[member.bucket]).clone()
            follow_edits(whole, member.parameter.detach())  # what this rank wrote is in the copy that it was lent
            member.parameter.data = whole
        self._lent_masters.update(members)

    def _write_masters(self, members: Sequence[TrackedParameter]) -> None:
        """Make what these parameters were set to on the first rank that holds them their masters. Collective."""

        def write(comm: Communicator, its: Sequence[TrackedParameter]) -> None:
            take_from_leader(comm, (member.parameter for member in its))

        self._by_group(members, write)
        put_masters(members, self._store.updates_slices)
        for member in members:  # as the store has them
            member.parameter.data = member.parameter.detach().to(member.bucket.dtype)

    # ---------------------------------------------------------------- private

    def _look(self) -> tuple[list[int], list[object]]:
        """The versions and places of the parameters."""
        with bypass_torch_function():
            return [parameter._version for parameter in self._parameters], self._look_at_places()

    def _look_at_places(self) -> list[object]:
        with bypass_torch_function():
            return self._store.places(self._parameters)

    def _look_at_kinds(self) -> list[Kind]:
        with bypass_torch_function():
            return [(parameter.stride(), parameter.dtype, parameter.shape) for parameter in self._parameters]

    def _sum(self, members: Iterable[TrackedParameter]) -> dict[TrackedParameter, int]:
        return {member: checksum(member.parameter) for member in members} if self._checksums else {}

    def _check_kind(self, member: TrackedParameter, before: Kind, now: Kind, moved: bool) -> None:
        parameter = cast("Any", member.parameter)
        if now[1:] != before[1:]:
            self._refuse(
                member.name,
                f"is now {now[1]} of shape {tuple(now[2])}, but was distributed as {before[1]} of shape "
                f"{tuple(before[2])}",
                "call model.to(...), or whatever resized it, before sherd.distribute",
            )
        if moved and self._store.owns_memory and parameter.is_shared():
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
        self._note_registries()

    def _note_registries(self) -> None:
        """Every dict of the model in which parameters or modules are registered, and what is."""
        modules = self._inventory.model.modules()
        # The values of a dict follow it.
        self._registries: list[Iterable[Any]] = [each.values() for m in modules for each in (m._parameters, m._modules)]
        self._registered = [*chain.from_iterable(self._registries), _END]

    def _same_objects(self) -> bool:
        """Whether the same objects are registered as before, without a new object for each of them."""
        return all(map(is_, chain(chain.from_iterable(self._registries), (_END,)), self._registered))

    def _refuse(self, name: str, what: str, fix: str) -> None:
        raise SherdError(f"rank {self._comm.number}: parameter {name!r} {what}; {fix}")


def _mark(edited: Iterable[TrackedParameter]) -> None:
    """Let the masters of these parameters look for what was written into them."""
    for member in edited:
        member.bucket.values.edited = True
