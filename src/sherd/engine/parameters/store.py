"""The parameter store: where a rank's parameters live, and how an update by their owners reaches all ranks.

A store allocates memory for the model's parameters when it is built. In `take_over` each `parameter.data` becomes a
view of the store, its `home`, with rank 0's values. A store gives each bucket its `values`: the optimizer shard updates
the part that this rank owns between `acquire()` and `publish()`. Frozen parameters live in the store too, but are never
updated.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.mesh import Mesh
from sherd.errors import SherdError

Members = Sequence[TrackedParameter]


class Holding(enum.Enum):
    """What is happening to the values in a store."""

    HELD = "held"
    UPDATING = "being updated"


class ParameterStore(ABC):
    """Where parameters live, those that are trained and those that are not."""

    whole = True
    """Whether this rank can read all of them without communication."""
    compares_edits = False
    """Whether an edit must be the same on all ranks before the next update, because they do not each have and update
    their own copy."""
    sees_all_edits = False
    """Whether `edited` finds edits even without `suspects`."""
    finds_edits = False
    """Whether whatever this rank writes into a parameter is found by `edited`: else masters look for it."""
    owns_memory = True
    """Whether parameters live in the store's memory, and are put back there."""

    def __init__(self, mesh: Mesh, inventory: Inventory, buckets: Sequence[Bucket], owner: int | None) -> None:
        self._mesh = mesh
        self._comm = mesh.everyone
        self._members = inventory.members
        self._device = inventory.device
        self._owner = owner
        self.updates_slices = owner is not None
        """Whether a rank updates only the slices of this owner, instead of everything."""
        self.state = Holding.HELD
        self._make_room(buckets)

    @abstractmethod
    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        """Allocate memory, and give these buckets their `values`. The parameters stay where they are."""

    @abstractmethod
    def take_over(self) -> None:
        """Move the parameters in, with rank 0's values. Collective, once."""

    def acquire(self, buckets: Sequence[Bucket]) -> None:
        """Wait until no rank reads what is about to be updated."""
        self._move(Holding.HELD, Holding.UPDATING)

    def publish(self, buckets: Sequence[Bucket]) -> None:
        """Make the slices that each rank updated visible on all ranks."""
        self._publish(buckets)
        for bucket in buckets:
            bucket.values.edited = not self.finds_edits
        self._move(Holding.UPDATING, Holding.HELD)

    @abstractmethod
    def _publish(self, buckets: Sequence[Bucket]) -> None: ...

    def abandon(self) -> None:
        """An update failed."""
        self.state = Holding.HELD

    def places(self, parameters: Iterable[nn.Parameter]) -> list[object]:
        """A value for each parameter that changes when it is moved."""
        return [*map(Tensor.data_ptr, parameters)]

    def bytes(self) -> int:
        """Bytes that this rank allocated for parameters; a shared store counts once, on the first rank of a host."""
        return sum(member.parameter.nbytes for member in self._members)

    def gathered_bytes(self) -> int:
        """Bytes of buckets that are whole only while they are used."""
        return 0

    def write(self, members: Members) -> None:
        """Take rank 0's values of these parameters on all ranks. Collective."""
        self.from_leader(member.parameter for member in members)

    def lend(self, members: Members) -> None:
        """Give this rank its own copies of these parameters until `write` or `take_back`."""
        return  # it already has its own

    def take_back(self, members: Iterable[TrackedParameter]) -> None:
        """Drop the copies that were lent."""
        return

    def edited(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        """The parameters that this rank has edited since they were common to all ranks. `suspects` were moved, or have
        a new version or checksum."""
        return set(suspects)

    def digests(self, members: Members) -> list[int]:
        """Checksums of parameters as this rank has them. Collective where they are gathered."""
        return [checksum(member.flattened) for member in members]

    def keep_edits(self, members: Members) -> None:
        """All ranks have made the same edits to these parameters: keep them. Collective where `compares_edits`."""
        return

    def bump(self, buckets: Iterable[Bucket]) -> None:
        """Tell autograd that the parameters changed: a backward through an older graph must fail as in plain torch."""
        changed = [member.parameter for bucket in buckets for member in bucket.members]
        torch.autograd.graph.increment_version(changed)

    def from_leader(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors of this rank with rank 0's."""
        take_from_leader(self._comm, tensors)

    def _move(self, expected: Holding, to: Holding) -> None:
        if self.state is not expected:
            raise SherdError(
                f"rank {self._comm.number}: parameters are {self.state.value} and cannot become {to.value}; expected "
                f"{expected.value}"
            )
        self.state = to


def take_from_leader(comm: Communicator, tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors of this rank with those of rank 0 of `comm`. Collective."""
    tensors = list(tensors)
    for tensor in tensors:
        unexpand(tensor)
    for handle in [comm.broadcast(tensor.detach()) for tensor in tensors]:
        handle.wait()


def unexpand(tensor: Tensor) -> None:
    """Give every element of an expanded tensor its own memory, so that it can be overwritten."""
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor.data = tensor.detach().contiguous()
