"""What the elements of sharded gradients are, for a program that uses them: gathered, scaled, measured, kept.

`access` shows and takes away the gradients; this is what they ask when they are used (see `ShardedGradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._lent: dict[int, int] = {}  # by position, the checksums of what the owners of the slices have

    def of(self, member: TrackedParameter, lend: bool) -> Tensor:
        """The gradient of a member of the bucket, to be read, and to be written if it is lent."""
        found = self._members[member.position]
        if lend and member.position not in self._lent:
            self._lent[member.position] = checksum(found)
        return found

    def is_written(self, member: TrackedParameter) -> bool:
        """Whether the program has written into the gradient of a member of the bucket."""
        before = self._lent.get(member.position)
        return before is not None and before != checksum(self._members[member.position])

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        """The slices of these and what was gathered of them were changed alike."""
        for member in members:
            if member.position in self._lent:
                self._lent[member.position] = checksum(self._members[member.position])

    def as_written(self, bucket: Bucket) -> Tensor:
        """All of it. What the program gave other memory, as `p.grad.data = x` does, comes home."""
        whole = self.whole.detach()
        for member, found in zip(bucket.members, self._members, strict=True):
            home = member.shaped_in(whole)
            if not found.is_set_to(home):
                home.copy_(found.detach())
                self._members[member.position] = home
        return whole


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
        """Scale what there is of gradients on this rank; for each, False if the whole has to be scaled instead."""
        if any(isinstance(each, Tensor) and self._is_gathered(each) for each in by):
            return [False] * len(members)  # a gradient times itself: the factor changes with what it is multiplied by
        by = tuple(each.detach() if isinstance(each, Tensor) else each for each in by)
        memory, scaled = self._to_change(member for member in members if member.bucket.summed)
        if memory:
            getattr(torch, f"_foreach_{how}_")(memory, *by)
        self._note(scaled, how, [each.item() if isinstance(each, Tensor) else each for each in by])
        return [member.bucket.summed for member in members]

    def unscale(self, members: Sequence[TrackedParameter], found_inf: Tensor, inverse: Tensor) -> bool:
        """As a GradScaler does, on what there is of gradients on this rank; return False if any is not summed."""
        if not all(member.bucket.summed for member in members):
            return False
        memory, unscaled = self._to_change(members)
        if memory:
            torch._amp_foreach_non_finite_check_and_unscale_(memory, found_inf, inverse)
        with labelled("the overflows that a GradScaler looks for", ALONE), self._comm.counters.agreeing():
            total = self._comm.all_reduce(found_inf.detach().reshape(1).float().cpu()).wait()
        found_inf.fill_(float(total.item() != 0))
        self._note(unscaled, "unscale", [float(inverse)])
        return True

    def _is_gathered(self, tensor: Tensor) -> bool:
        """Whether its memory is that of a gradient which the program has read."""
        wholes = [gathered.whole.untyped_storage().data_ptr() for gathered in self.gathered.values()]
        return bool(wholes) and tensor.untyped_storage().data_ptr() in wholes

    def _to_change(
        self, members: Iterable[TrackedParameter]
    ) -> tuple[list[Tensor], dict[Bucket, list[TrackedParameter]]]:
        """The memory of gradients: this rank's slices and what was gathered, and by bucket whose slices those are.

        What was written counts alone: it will be copied into the slices.
        """
        memory: list[Tensor] = []
        by_bucket: dict[Bucket, list[TrackedParameter]] = {}
        for member in members:
            gathered = self.gathered.get(member.bucket)
            if gathered is not None:
                memory.append(gathered.of(member, lend=False))
            if gathered is None or not gathered.is_written(member):
                # The dtype in which torch multiplies by a tensor without dimensions depends on whether both have none.
                memory.extend(own if member.entry.shape else own.view(()) for own, _ in member.own_parts())
                by_bucket.setdefault(member.bucket, []).append(member)
        return memory, by_bucket

    def _note(self, changed: Mapping[Bucket, Sequence[TrackedParameter]], how: str, by: Sequence[float]) -> None:
        for bucket, members in changed.items():
            if bucket in self.gathered:
                self.gathered[bucket].follow(members)
            self.scaled.add(bucket)
            self._seen.note(bucket, ([member.name for member in members], how, by))

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
