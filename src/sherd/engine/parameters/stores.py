"""Parameter stores: where a rank's parameters live, and how an update by their owners reaches everybody.

A store has room for the model's parameters when it is built. In `take_over` each `parameter.data` becomes a view of the
store, with rank 0's values. `slices[b]` is what this rank owns of bucket b, for its optimizer shard to update between
`acquire()` and `publish()`. Frozen parameters live in the store too, each where its bucket would be, but nobody updates
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sherd.comm import Handle
from sherd.engine.parameters.checksum import checksum
from sherd.engine.parameters.memory import carve, numel_by_dtype, with_own_storage
from sherd.engine.parameters.mesh import Mesh
from sherd.engine.parameters.trained import Trained
from sherd.layout.entry import dtype_of
from sherd.layout.shard_layout import ShardLayout


class ParameterStore(ABC):
    """Where parameters live, those that are trained and those that are not. Indices are those of the inventory."""

    whole = True
    """Whether this rank can read all of them without the others."""
    compares_edits = False
    """Whether an edit must be the same on all ranks before the next update, because they do not each have a copy that
    is updated by itself."""
    sees_all_edits = False
    """Whether `edited` finds them without being told where to look."""
    owns_memory = True
    """Whether parameters live in memory of the store's, to which they are put back."""

    def __init__(self, mesh: Mesh, trained: Trained) -> None:
        self._mesh = mesh
        self._comm = mesh.everyone
        self._trained = trained
        self._parameters = trained.inventory.parameters
        self._device = trained.inventory.device
        self.slices = self._make_room()

    @abstractmethod
    def _make_room(self) -> list[Tensor]:
        """Allocate what is needed, and give this rank's slices. The parameters keep their values."""

    @abstractmethod
    def take_over(self) -> None:
        """Move the parameters in, with rank 0's values. Collective, once."""

    @abstractmethod
    def acquire(self) -> None:
        """Wait until nobody reads what is about to be updated."""

    @abstractmethod
    def publish(self) -> None:
        """Make everybody's updated slices visible to everybody."""

    def grow(self, indices: Sequence[int]) -> None:
        """These parameters are trained from now on: there are slices of them behind the others."""
        return

    def place(self, index: int) -> object:
        """Where a parameter is: another value means that it was moved."""
        return self._parameters[index].data_ptr()

    def bytes(self) -> int:
        """Bytes of parameters that this rank allocated; a shared store counts once, on the first rank of a host."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def gathered_bytes(self) -> int:
        """Bytes of buckets that are whole for now only."""
        return 0

    def write(self, indices: Sequence[int]) -> None:
        """Take rank 0's values of these parameters for everybody's. Collective."""
        self.from_leader(self._parameters[index] for index in indices)

    def lend(self, indices: Sequence[int]) -> None:
        """Give this rank copies of these parameters of its own, until `write` or `take_back`."""
        return  # they are its own

    def take_back(self, indices: Iterable[int]) -> None:
        """Drop the copies that were lent."""
        return

    def edited(self, suspects: Iterable[int]) -> set[int]:
        """Which parameters this rank has edited since they were common to all ranks. `suspects` were moved, or have
        another version or checksum than before."""
        return set(suspects)

    def digests(self, indices: Sequence[int]) -> list[int]:
        """Checksums of parameters as this rank has them. Collective where they are gathered."""
        return [checksum(self._flattened(index)) for index in indices]

    def keep_edits(self, indices: Sequence[int]) -> None:
        """All ranks have made the same edits of these parameters. Collective where `compares_edits`."""
        return

    def _flattened(self, index: int) -> Tensor:
        """A parameter element by element, in the order in which every rank has it in memory."""
        return self._trained.inventory.entry(index).flattened(self._parameters[index].detach())

    def bump(self) -> None:
        """Tell autograd that the parameters changed: a backward through an older graph must fail as in plain torch."""
        torch.autograd.graph.increment_version(self._trained.parameters)

    def from_leader(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors of this rank with rank 0's."""
        tensors = list(tensors)
        for tensor in tensors:
            unexpand(tensor)
        for handle in [self._comm.broadcast(tensor.detach()) for tensor in tensors]:
            handle.wait()


class ReplicaStore(ParameterStore):
    """Every rank has all parameters, in memory of their own, and updates all of them itself."""

    owns_memory = False

    def _make_room(self) -> list[Tensor]:
        self._before: dict[int, Tensor] = {}
        self._settle(range(len(self._parameters)))
        return []

    def take_over(self) -> None:
        self.from_leader(self._parameters)

    def _settle(self, indices: Iterable[int]) -> None:
        for index in indices:
            parameter = self._parameters[index]
            parameter.data = self._trained.inventory.entry(index).settled(parameter.detach())

    def edited(self, suspects: Iterable[int]) -> set[int]:
        suspects = set(suspects)
        self._settle(suspects)  # `p.data = x` may have moved them
        return suspects

    def lend(self, indices: Sequence[int]) -> None:
        self._before.update({index: self._parameters[index].detach().clone() for index in indices})

    def take_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._parameters[index].detach().copy_(self._before.pop(index))

    def write(self, indices: Sequence[int]) -> None:
        super().write(indices)
        for index in indices:
            self._before.pop(index, None)

    def acquire(self) -> None:
        pass

    def publish(self) -> None:
        pass


class FlatStore(ParameterStore):
    """Buckets of parameters laid end to end, one allocation per dtype."""

    def _make_room(self) -> list[Tensor]:
        trained, frozen = self._trained, self._trained.frozen
        layout = trained.layout.grown(trained.inventory.entries(frozen))
        self._flats = {
            dtype: self._allocate(size, dtype_of(dtype))
            for dtype, size in numel_by_dtype(layout.buckets, lambda bucket: bucket.numel).items()
        }
        buckets = carve(self._flats, layout.buckets, lambda bucket: bucket.numel)
        order = (*trained.indices, *frozen)
        self.originals = by_index(layout, order, buckets)
        """By index: where the values live that updates are made to."""
        self.homes = self._seen(layout, order)
        """By index: the same as this rank sees them; its `parameter.data`."""
        self.buckets = buckets[: len(trained.layout.buckets)]
        self._dormant = dict(zip(frozen, buckets[len(self.buckets) :], strict=True))
        return [self._own(bucket) for bucket in self.buckets]

    def take_over(self) -> None:
        self._fill()
        self.take_back(range(len(self.homes)))

    def _seen(self, layout: ShardLayout, order: Sequence[int]) -> list[Tensor]:
        return self.originals

    def _own(self, bucket: Tensor) -> Tensor:
        return bucket.view(self._comm.world, -1)[self._comm.rank]

    def grow(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.buckets.append(self._dormant.pop(index))
            self.slices.append(self._own(self.buckets[-1]))

    def take_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._parameters[index].data = self.homes[index]

    def lend(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._parameters[index].data = self.homes[index].clone()

    def write(self, indices: Sequence[int]) -> None:
        if self._comm.rank == 0:
            for index in indices:
                self.originals[index].copy_(self._parameters[index].detach())
        self.from_leader(self.originals[index] for index in indices)
        self.take_back(indices)

    def edited(self, suspects: Iterable[int]) -> set[int]:
        suspects = set(suspects)
        moved = self._values_of_moved(suspects)
        for index, value in moved.items():
            self.homes[index].copy_(value)
        self.take_back(moved)
        return suspects

    def _moved(self, indices: Iterable[int]) -> list[int]:
        """Those parameters whose data is another tensor than the store's: `p.data = x`."""
        return [index for index in indices if not self._parameters[index].is_set_to(self.homes[index])]

    def _values_of_moved(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Copies of what they have instead. It may be another one's home: `a.data, b.data = b.data, a.data`."""
        return {index: self._parameters[index].detach().clone() for index in self._moved(indices)}

    def bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def _fill(self) -> None:
        """Put rank 0's values into the store."""

    def _copy_in(self) -> None:
        for parameter, original in zip(self._parameters, self.originals, strict=True):
            original.copy_(parameter.detach())


class PrivateStore(FlatStore):
    """Every rank has a copy of all parameters; owners' updates are gathered."""

    def acquire(self) -> None:
        pass

    def publish(self) -> None:
        if self._mesh.groups > 1:
            self._publish_by_rows()
        else:
            for handle in [self._comm.all_gather(s, b) for s, b in zip(self.slices, self.buckets, strict=True)]:
                handle.wait()
        self.bump()

    def _publish_by_rows(self) -> None:
        """First between groups, where each slice travels once, then inside them; a few buckets at a time."""
        under_way: deque[Handle] = deque()
        for mine, bucket in zip(self.slices, self.buckets, strict=True):
            rows = mine.new_empty(self._mesh.groups, mine.numel())
            self._mesh.spread(mine, rows).wait()
            under_way.append(self._mesh.gather(rows, bucket))
            if len(under_way) > 2:
                under_way.popleft().wait()
        for handle in under_way:
            handle.wait()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def _fill(self) -> None:
        self._copy_in()
        self.from_leader(self._flats.values())


def unexpand(tensor: Tensor) -> None:
    """Give every element of an expanded tensor memory of its own, so that it can be overwritten."""
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor.data = tensor.detach().contiguous()


def by_index(layout: ShardLayout, order: Sequence[int], buckets: Sequence[Tensor]) -> list[Tensor]:
    """A view for each parameter, where entry e of `layout` is the parameter `order[e]`."""
    views: dict[int, Tensor] = {}
    for entry, index in enumerate(order):
        described, offset = layout.entries[entry], layout.bucket_offset(entry)
        flat = buckets[layout.bucket_of(entry).index][offset : offset + described.numel]
        views[index] = described.shaped(with_own_storage(flat))
    return [views[index] for index in range(len(views))]
