"""What the elements of sharded gradients are, for a program that uses them: gathered, scaled, measured, kept.

`access` shows and takes away the gradients; this is what they ask when they are used (see `ShardedGradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.bucket import Bucket, gather
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.seen import Seen
from sherd.engine.gradients.sharded_norms import norms_at_owners

ALONE = "Under ZeRO p.grad is gathered from all ranks: read or set it on every rank"


class _Gathered:
    """The whole gradient of a bucket.

    The program may look at it on one rank only, as for a log, once all ranks have read it. So what counts is whether it
    has *written* into what it was lent. That shows in the bytes: `p.grad.data.clamp_()` changes no version.
    """

    def __init__(self, bucket: Bucket) -> None:
        with torch.inference_mode(False):  # what is gathered in it may be written outside of it
            self.whole = bucket.gather(bucket.slice, what=_what(bucket)).wait()
            self._members = [each.shaped_in(self.whole) for each in bucket.members]
        self._lent: dict[int, int] = {}  # the checksums of members
        self._behind: list[tuple[int, str, tuple[Any, ...]]] = []  # what was done to the slices since

    def of(self, member: TrackedParameter, lend: bool) -> Tensor:
        """The gradient of a member of the bucket, to be read, and to be written if it is lent."""
        self.catch_up()
        found = self._members[member.position]
        if lend and member.position not in self._lent:
            self._lent[member.position] = checksum(found)
        return found

    def is_written(self, member: TrackedParameter) -> bool:
        """Whether the program has written into the gradient of a member of the bucket."""
        before = self._lent.get(member.position)
        return before is not None and before != checksum(self._members[member.position])

    def as_written(self, bucket: Bucket) -> Tensor:
        """All of it. What the program gave other memory, as `p.grad.data = x` does, comes home."""
        self.catch_up()
        for member, found in zip(bucket.members, self._members, strict=True):
            home = member.shaped_in(self.whole.detach())
            if not found.is_set_to(home):
                home.copy_(found.detach())
                self._members[member.position] = home
        return self.whole.detach()

    def scale(self, member: TrackedParameter, how: str, by: tuple[Any, ...]) -> None:
        """The slices of a member, which was not written, were scaled."""
        self._behind.append((member.position, how, tuple(e.clone() if isinstance(e, Tensor) else e for e in by)))
        if member.position in self._lent:
            self.catch_up()
            self._lent[member.position] = checksum(self._members[member.position])

    def unscale(self, members: Sequence[TrackedParameter], inverse: Tensor) -> None:
        """The slices of these members, which were not written, were unscaled."""
        self.catch_up()
        wholes = [self._members[member.position] for member in members]
        torch._amp_foreach_non_finite_check_and_unscale_(wholes, torch.zeros_like(inverse), inverse)
        for member in members:
            if member.position in self._lent:
                self._lent[member.position] = checksum(self._members[member.position])

    def catch_up(self) -> None:
        """Do what was done to the slices."""
        for position, how, by in self._behind:
            getattr(self._members[position], f"{how}_")(*by)
        self._behind.clear()


def _what(bucket: Bucket) -> str:
    return f"gradients, the first of {bucket.members[0].name!r}"


class ShardedSource:
    """Where the elements of the sharded gradients of one model come from."""

    def __init__(self, comm: Communicator, grouped: bool, seen: Seen) -> None:
        self._comm = comm
        self._grouped = grouped
        self._seen = seen
        self.gathered: dict[Bucket, _Gathered] = {}
        """What the program has read."""
        self.scaled: set[Bucket] = set()
        """Whose slices were changed in place of what it would have read."""

    def read(self, member: TrackedParameter, lend: bool = True) -> Tensor:
        """The whole gradient of a parameter. Collective."""
        bucket = member.bucket
        if bucket not in self.gathered:
            with labelled(f"reading the gradient of {member.name!r}", ALONE):
                self.gathered[bucket] = _Gathered(bucket)
        return self.gathered[bucket].of(member, lend)

    def norms(self, members: Sequence[TrackedParameter], order: Any) -> tuple[Tensor, ...] | None:
        """Norms of whole gradients, with torch's bits; None if they have to be gathered for that. Collective."""
        if self._grouped or any(member.bucket in self.gathered for member in members):
            return None
        with torch.inference_mode(False), labelled(f"the norms of {len(members)} gradients", ALONE):
            return norms_at_owners(self._comm, members, order)

    def scale(self, members: Sequence[TrackedParameter], how: str, by: tuple[Any, ...]) -> list[bool]:
        """Scale this rank's parts of gradients; for each, False if it was written, and so must be scaled as a whole."""
        if any(isinstance(each, Tensor) and self._is_lent(each) for each in by):
            return [False] * len(members)  # a gradient times itself: the factor changes with what it is multiplied by
        by = tuple(each.detach() if isinstance(each, Tensor) else each for each in by)
        parts: list[Tensor] = []
        done, scaled = [], dict[Bucket, list[TrackedParameter]]()
        for member in members:
            gathered = self.gathered.get(member.bucket)
            done.append(member.bucket.summed and (gathered is None or not gathered.is_written(member)))
            if done[-1]:
                # The dtype in which torch multiplies by a tensor without dimensions depends on whether both have none.
                parts.extend(own if member.entry.shape else own.view(()) for own, _ in member.own_parts())
                scaled.setdefault(member.bucket, []).append(member)
        if parts:
            getattr(torch, f"_foreach_{how}_")(parts, *by)
        numbers = [each.item() if isinstance(each, Tensor) else each for each in by]
        for bucket, its in scaled.items():
            for member in its if bucket in self.gathered else ():
                self.gathered[bucket].scale(member, how, by)
            self.scaled.add(bucket)
            self._seen.note(bucket, ([member.name for member in its], how, numbers))
        return done

    def _is_lent(self, tensor: Tensor) -> bool:
        """Whether its memory is that of a gradient which the program has read."""
        memory = tensor.untyped_storage().data_ptr()
        return any(gathered.whole.untyped_storage().data_ptr() == memory for gathered in self.gathered.values())

    def unscale(self, members: Sequence[TrackedParameter], found_inf: Tensor, inverse: Tensor) -> bool:
        """As a GradScaler does, on this rank's parts and on what was written; return False if any is not summed."""
        if not all(member.bucket.summed for member in members):
            return False
        parts: list[Tensor] = []
        unscaled: dict[Bucket, list[TrackedParameter]] = {}
        for member in members:
            gathered = self.gathered.get(member.bucket)
            if gathered is not None and gathered.is_written(member):
                parts.append(gathered.of(member, lend=True))
            else:
                parts.extend(own for own, _ in member.own_parts())
                unscaled.setdefault(member.bucket, []).append(member)
        if parts:
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse)
        with labelled("the overflows that a GradScaler looks for", ALONE), self._comm.counters.agreeing():
            total = self._comm.all_reduce(found_inf.detach().reshape(1).float().cpu()).wait()
        found_inf.fill_(float(total.item() != 0))
        for bucket, its in unscaled.items():
            if bucket in self.gathered:
                self.gathered[bucket].unscale(its, inverse)
            self.scaled.add(bucket)
            self._seen.note(bucket, ([member.name for member in its], "unscale", float(inverse)))
        return True

    def reader(self, member: TrackedParameter) -> Callable[[], Tensor]:
        """What reads the gradient of now, later. Holding it keeps its memory from being used for the next one.

        It holds nothing that leads to the parameter, which may hold the gradient in turn.
        """
        comm, name, entry, start = member.bucket.comm, member.name, member.entry, member.offset
        described, what = member.bucket.described, f"kept {_what(member.bucket)}"
        found: list[Tensor] = []
        if member.bucket in self.gathered:
            found.append(self.read(member, lend=False))  # from here on it is the program's alone
        part = member.bucket.slice.detach()

        def read() -> Tensor:
            if not found:
                with labelled(f"reading a gradient of {name!r} that was kept", ALONE):
                    whole = gather(comm, described, part, what=what).wait()
                found.append(entry.shaped(whole[start : start + entry.numel]))
            return found[0]

        return read

    def take_changes(self) -> set[Bucket]:
        """Copy what the program has written into the slices; gives the buckets that it changed."""
        written = [bucket for bucket in self.gathered if self._is_written(bucket)]
        for bucket in written:
            bucket.slice.copy_(bucket.part_of(self.gathered[bucket].as_written(bucket)))
        return {*written, *self.scaled}

    def see(self, bucket: Bucket) -> None:
        """Note what the program has written, for ranks to compare."""
        if self._is_written(bucket):
            self._seen.note(bucket, (bucket.members[0].name, checksum(self.gathered[bucket].whole)))

    def _is_written(self, bucket: Bucket) -> bool:
        gathered = self.gathered.get(bucket)
        return gathered is not None and any(map(gathered.is_written, bucket.members))

    def forget(self, bucket: Bucket) -> None:
        """Its sum may be scaled or zeroed from here on."""
        self.gathered.pop(bucket, None)
        self.scaled.discard(bucket)

    def clear(self) -> None:
        """All sums may be scaled or zeroed from here on."""
        self.gathered.clear()
        self.scaled.clear()
