"""What a user sees as `p.grad`, and how what is done to it comes back into the sums.

Where every rank keeps the whole sum, `p.grad` is a view of it (`NativeGrads`). Where a rank keeps slices, reading
`p.grad` gathers the bucket that the parameter is in (`GatheredGrads`); a gathered gradient that was changed, as
`torch.nn.utils.clip_grad_norm_` does, is written back before it is used. Reading is collective then: a rank that reads
alone gets an error from the communicator, which names it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.engine.checksum import checksum
from sherd.engine.gradients import RingGradients
from sherd.engine.trained import Trained
from sherd.engine.whole_gradients import WholeGradients
from sherd.errors import SherdError
from sherd.patches.gathered import raw_grad, set_raw_grad, shard_grad

_ALONE = "Under ZeRO p.grad is gathered from all ranks: read or set it on every rank"


class GradAccess(ABC):
    """`p.grad`. `used[e]` says whether entry e has a gradient on any rank; without one, `p.grad` is None."""

    def __init__(self, gradients: RingGradients, trained: Trained) -> None:
        self.used: list[bool] = []
        self.seen = 0
        """A hash, below 2**20, of gradients that were edited: ranks that did the same see the same."""
        self.assigned: list[str] = []
        """The parameters whose gradient was set to a tensor of the user's; for messages."""
        self._gradients = gradients
        self._parameters = trained.parameters
        self._names = trained.names
        self.grow()

    def grow(self) -> None:
        """Take the parameters that are trained since."""
        self.used += [False] * (len(self._parameters) - len(self.used))

    @abstractmethod
    def hide(self) -> list[int]:
        """A round begins: autograd must find no gradient to add to. Gives the buckets that changed, as `collect`."""

    @abstractmethod
    def show(self) -> None:
        """The sums are complete and may be seen."""

    @abstractmethod
    def collect(self) -> list[int]:
        """Bring what was done to `p.grad` into the sums; the buckets that changed."""

    def suspects(self) -> list[int]:
        """Buckets that may have been changed in a way that `collect` cannot see."""
        return []

    def _see(self, gradient: Tensor) -> None:
        self.seen = zlib.crc32(f"{self.seen} {checksum(gradient)}".encode()) >> 12

    @abstractmethod
    def forget(self) -> None:
        """There is no gradient any more."""

    def _home(self, entry: int) -> int:
        return self._gradients.layout.bucket_of(entry).index

    def _refuse_local(self, bucket: int) -> None:
        """Refuse to write a gradient where some have not been exchanged yet: they lie in the same memory."""
        if self._gradients.local(bucket):
            names = [self._names[member] for member in self._gradients.layout.buckets[bucket].members]
            raise SherdError(
                f"p.grad was set while gradients of backwards in sherd.no_sync were not exchanged yet (one of {names})"
                f"; set it after the backward outside no_sync"
            )


class NativeGrads(GradAccess):
    """`p.grad` is a view of the sum."""

    _gradients: WholeGradients

    def __init__(self, gradients: WholeGradients, trained: Trained) -> None:
        super().__init__(gradients, trained)
        self._shown = False
        self._note()

    def grow(self) -> None:
        super().grow()
        self._note()

    def hide(self) -> list[int]:
        shown, changed = self._shown, self.collect()
        self._shown = False
        for parameter in self._parameters:
            set_raw_grad(parameter, None)
        return changed if shown else []

    def show(self) -> None:
        for entry, parameter in enumerate(self._parameters):
            view = self._gradients.views[entry]
            if self.used[entry] and parameter.dtype == view.dtype:  # or it was converted
                set_raw_grad(parameter, view.detach())  # another one each time: who keeps it holds on to the memory
        self._shown = True
        self._note()

    def collect(self) -> list[int]:
        rewritten: dict[int, dict[int, Tensor | None]] = {}  # by bucket, then entry: what `p.grad` was set to
        for entry, parameter in enumerate(self._parameters):
            gradient, view = raw_grad(parameter), self._gradients.views[entry]
            if gradient is None:
                if self.used[entry] and self._shown:
                    self.used[entry] = False
                    rewritten.setdefault(self._home(entry), {})[entry] = None
            elif gradient.dtype != view.dtype:
                continue  # the parameter was converted, which will be refused
            elif gradient.layout is not torch.strided or not gradient.is_set_to(view):
                self.used[entry] = True
                self.assigned.append(self._names[entry])
                rewritten.setdefault(self._home(entry), {})[entry] = gradient
        versions = zip(self._now(), self._versions, strict=True)
        changed = {bucket for bucket, (now, noted) in enumerate(versions) if now != noted}.union(rewritten)
        for bucket, gradients in rewritten.items():
            self._rewrite(bucket, gradients)
        for bucket in sorted(changed):
            if self._gradients.summed[bucket]:
                self._see(self._gradients.sums[bucket])
        self._note()
        return sorted(changed)

    def _rewrite(self, bucket: int, gradients: Mapping[int, Tensor | None]) -> None:
        """Put into a sum what `p.grad` was set to. Whoever keeps what it was before shall find it so."""
        used = [member for member in self._gradients.layout.buckets[bucket].members if self.used[member]]
        if not used:
            self._gradients.drop(bucket)  # model.zero_grad(): the next gradient is the first again
            return
        for member in used:
            set_raw_grad(self._parameters[member], None)  # or our own would look as if somebody kept them
        self._make_room(bucket)
        for entry, gradient in gradients.items():
            if gradient is None:
                self._gradients.views[entry].zero_()
            else:
                self._gradients.views[entry].copy_(gradient)
        for member in used:
            set_raw_grad(self._parameters[member], self._gradients.views[member].detach())

    def suspects(self) -> list[int]:
        # `p.grad.data.mul_(2)` writes into the sum and leaves no version to go by.
        return [bucket for bucket, summed in enumerate(self._gradients.summed) if summed]

    def forget(self) -> None:
        for parameter in self._parameters:
            set_raw_grad(parameter, None)
        self.used = [False] * len(self.used)
        self.seen, self.assigned = 0, []
        self._note()

    def _make_room(self, bucket: int) -> None:
        self._refuse_local(bucket)
        if self._gradients.summed[bucket]:
            self._gradients.separate(bucket)
            return
        self._gradients.begin(bucket)
        self._gradients.sums[bucket].zero_()
        self._gradients.summed[bucket] = True

    def _now(self) -> list[int]:
        return [sum._version for sum in self._gradients.sums]

    def _note(self) -> None:
        self._versions = self._now()


class GatheredGrads(GradAccess):
    """`p.grad` is gathered from the owners of its slices when it is read."""

    def __init__(
        self,
        comm: Communicator,
        gradients: RingGradients,
        trained: Trained,
        ready: Callable[[], bool],
    ) -> None:
        super().__init__(gradients, trained)
        self._comm = comm
        self._ready = ready
        self._gathered: dict[int, Tensor] = {}
        self._set: dict[int, Tensor] = {}  # what `p.grad` was set to, not in the sums yet
        self._discarded: set[int] = set()

    def grow(self) -> None:
        for entry in range(len(self.used), len(self._parameters)):
            shard_grad(self._parameters[entry], self, entry)
        super().grow()

    def hide(self) -> list[int]:
        return self.collect()

    def show(self) -> None:
        pass  # they are gathered when they are read

    def has_grad(self, entry: int) -> bool:
        """Whether `p.grad` would give something."""
        return self._ready() and self.used[entry]

    def read_grad(self, entry: int) -> Tensor | None:
        """What `p.grad` gives."""
        if not self.has_grad(entry):
            return None
        if entry in self._set:
            return self._set[entry]
        with labelled(f"reading the gradient of {self._names[entry]!r}", _ALONE):
            return self._view(self._gather(self._home(entry)), entry)

    def write_grad(self, entry: int, gradient: Tensor | None) -> None:
        """What `p.grad = gradient` does: all ranks must do it."""
        set_raw_grad(
            self._parameters[entry], gradient
        )  # which has torch's own words for a shape or dtype that is wrong
        set_raw_grad(self._parameters[entry], None)
        self._set.pop(entry, None)
        if not self._ready():
            if gradient is None:
                return  # as zero_grad() does nothing inside a window
            raise SherdError(
                f"p.grad of {self._names[entry]!r} was set inside an accumulation window; do it after its last backward"
            )
        if gradient is None:
            self._discard(entry)
            return
        self._refuse_local(self._home(entry))
        with labelled(f"p.grad = ... of {self._names[entry]!r}", _ALONE):
            self._gather(self._home(entry))
        self._set[entry] = gradient
        self.used[entry] = True
        self.assigned.append(self._names[entry])

    def collect(self) -> list[int]:
        changed, self._discarded = self._discarded, set()
        for bucket, whole in self._gathered.items():  # p.grad.data.clamp_() leaves no version to go by
            self._gradients.slices[bucket].copy_(whole.view(self._comm.world, -1)[self._comm.rank])
            self._gradients.summed[bucket] = True
            changed.add(bucket)
            for entry in self._gradients.layout.buckets[bucket].members:
                if entry in self._set:
                    self._put(entry, self._set[entry])
                elif not self.used[entry]:
                    self._put(entry, None)  # dropped; who keeps what was gathered shall find it as it was
                if self.used[entry]:
                    self._see(self._set[entry] if entry in self._set else self._view(whole, entry))
        self._gathered.clear()  # sums may be scaled or zeroed from here on
        self._set.clear()
        return sorted(changed)

    def forget(self) -> None:
        self._gathered.clear()
        self._set.clear()
        self._discarded.clear()
        self.used = [False] * len(self.used)
        self.seen, self.assigned = 0, []

    def _gather(self, bucket: int) -> Tensor:
        if bucket not in self._gathered:
            self._gradients.begin(bucket)
            slice = self._gradients.slices[bucket]
            if not self._gradients.summed[bucket]:
                slice.zero_()
            self._gathered[bucket] = self._comm.all_gather(slice).wait()
        return self._gathered[bucket]

    def _view(self, whole: Tensor, entry: int) -> Tensor:
        layout = self._gradients.layout
        offset, described = layout.bucket_offset(entry), layout.entries[entry]
        return described.shaped(whole[offset : offset + described.numel])

    def _discard(self, entry: int) -> None:
        if not self.used[entry]:
            return
        self.used[entry] = False
        bucket = self._home(entry)
        if not any(self.used[member] for member in self._gradients.layout.buckets[bucket].members):
            self._gradients.drop(bucket)
            self._gathered.pop(bucket, None)
        else:
            self._gradients.separate(bucket)
            self._put(entry, None)
        self._discarded.add(bucket)

    def _put(self, entry: int, gradient: Tensor | None) -> None:
        """Write this rank's part of a gradient, or zeros, into its slice."""
        layout, slice = self._gradients.layout, self._gradients.slices[self._home(entry)]
        flat = None if gradient is None else layout.entries[entry].flattened(gradient.detach().to_dense())
        for segment in layout.segments_of(entry):
            if segment.owner == self._comm.rank:
                own = slice[segment.offset : segment.offset + segment.numel]
                own.copy_(own.new_zeros(()) if flat is None else flat[segment.region.start :][: segment.numel])
