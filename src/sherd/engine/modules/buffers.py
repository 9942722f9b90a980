"""Keeps buffers equal on all ranks.

Each rank's batch norm sees its own batch, so the running statistics of the ranks drift apart. At every real step the
buffers that changed on any rank are made equal again. Running statistics are linear in those of the batches, so
averaging once per step is as good as averaging after every forward.

Changes are detected by identity and version. That is not enough for vectors of floats: torch's batch norm writes its
running statistics without changing a version. They are small, and are compared with a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.parameters.store import unexpand
from sherd.errors import Diverged
from sherd.layout.entry import dtype_name

BufferSpec = tuple[str, tuple[int, ...]] | None
"""A buffer's dtype and shape; None where nothing is registered."""
SAME, CHANGED, REFORMED = range(3)


class BufferSlot:
    """Where a buffer is registered, and what it was when the ranks were last made equal.

    A module may put another tensor there, so it is looked up each time.
    """

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self.name = name
        self._registry = module._buffers
        self._key = key
        self.accept()

    @property
    def tensor(self) -> Tensor | None:
        """The buffer that is registered now."""
        return self._registry.get(self._key)

    def put(self, tensor: Tensor) -> None:
        """Register another one."""
        self._registry[self._key] = tensor

    @property
    def form(self) -> BufferSpec:
        tensor = self.tensor
        return None if tensor is None else (dtype_name(tensor), tuple(tensor.shape))

    def accept(self) -> None:
        """Record the present buffer as equal on all ranks."""
        tensor = self.tensor
        self._form = self.form
        self._values: Tensor | None = None
        if tensor is not None:
            self._seen = weakref.ref(tensor)
            self._version = _version(tensor)
            if tensor.dim() == 1 and tensor.is_floating_point():
                self._values = tensor.detach().clone()

    def state(self) -> int:
        """How the buffer has changed since then on this rank."""
        tensor = self.tensor
        if self.form != self._form:
            return REFORMED
        if tensor is None:
            return SAME
        if tensor is not self._seen() or _version(tensor) != self._version:
            return CHANGED
        return SAME if self._values is None or torch.equal(tensor, self._values) else CHANGED


class BufferSync:
    """Makes the buffers that `ranks` hold equal on all of them: to their "mean", or to the "leader"'s."""

    def __init__(self, comm: Communicator, inventory: Inventory, how: str, ranks: Ranks = None) -> None:
        self._comm = comm
        self._device = inventory.device
        self._mean = how == "mean"
        self._places: list[BufferSlot] = []
        if how != "none":
            self._places = [
                BufferSlot(module, key, name)
                for prefix, module in inventory.model.named_modules()
                for key in module._buffers
                if inventory.groups.ranks_of(name := f"{prefix}.{key}" if prefix else key) == ranks
            ]

    def sync(self, step: int) -> None:
        """Make buffers equal that changed on any rank. Collective if the model has buffers."""
        if not self._places:
            return
        with torch.no_grad(), labelled(f"the buffers of step {step}"):
            changed = self._changed_anywhere()
            self._equalise([tensor for place in changed if (tensor := place.tensor) is not None])
        for place in changed:
            place.accept()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, buffers are what `sync` would make of them; afterwards they are as they were. Collective as `sync`.

        Other tensors stand in for them: a backward that is still to come may need those that are there.
        """
        with ExitStack() as undo:
            if self._places:
                with torch.no_grad(), labelled("the buffers of an evaluation"):
                    changed = self._changed_anywhere()
                    self._equalise([stand_in for place in changed for stand_in in self._replace(place, undo)])
            yield

    def _replace(self, changed: BufferSlot, undo: ExitStack) -> Iterator[Tensor]:
        """Put a copy wherever the tensor of a slot is registered, until `undo`."""
        tensor = changed.tensor
        if tensor is not None:
            stand_in = tensor.detach().clone()
            for place in self._places:
                if place.tensor is tensor:
                    undo.callback(place.put, tensor)
                    place.put(stand_in)
            yield stand_in

    def _changed_anywhere(self) -> list[BufferSlot]:
        """The buffers that changed on any rank; some ranks may have skipped a branch of the model. Collective."""
        mine, seen = [], set()
        for place in self._places:
            tensor = place.tensor
            shared = tensor is not None and id(tensor) in seen  # with an earlier slot, which handles it
            mine.append(SAME if shared else place.state())
            seen.add(id(tensor))
        with self._comm.counters.agreeing():
            states = self._comm.all_reduce(torch.tensor(mine, device=self._device), op="max").wait().tolist()
            if REFORMED in states:
                self._compare([p for p, state in zip(self._places, states, strict=True) if state == REFORMED])
        return [place for place, state in zip(self._places, states, strict=True) if state != SAME]

    def _compare(self, places: Sequence[BufferSlot]) -> None:
        """Refuse buffers whose new dtypes or shapes differ between ranks."""
        by_rank, rank = self._comm.compare_object([place.form for place in places])
        one, two = self._comm.numbers[0], self._comm.numbers[rank]
        for place, first, other in zip(places, by_rank[0], by_rank[rank], strict=True):
            if first != other:
                raise Diverged(
                    f"buffer {place.name!r} cannot be kept equal: rank {one} has {_words(first)} where rank {two} has "
                    f'{_words(other)}; give it one shape on every rank, or write sync_buffers="none"',
                    ranks=(one, two),
                )

    def _equalise(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite them with their mean or with rank 0's, one dtype at a time."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            unexpand(tensor)
            # In fp64 the mean of equal fp32 values is that value, whatever the number of ranks: loading a checkpoint,
            # which touches every buffer, changes no bit.
            dtype = torch.float64 if self._mean and tensor.is_floating_point() else tensor.dtype
            groups.setdefault(dtype, []).append(tensor)
        flats = {
            dtype: torch.cat([tensor.to(self._device, dtype).reshape(-1) for tensor in group])
            for dtype, group in groups.items()
        }
        handles = {
            dtype: self._comm.all_reduce(flat, flat, op="mean")
            if self._mean and dtype is torch.float64
            else self._comm.broadcast(flat)
            for dtype, flat in flats.items()
        }
        for dtype, group in groups.items():
            parts = torch.split(handles[dtype].wait(), [tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                with torch.inference_mode(tensor.is_inference()):  # only this may write into an inference tensor
                    tensor.detach().copy_(part.view(tensor.shape))


def _version(tensor: Tensor) -> int:
    """The version of a buffer; one made under `inference_mode` has none."""
    return -1 if tensor.is_inference() else tensor._version


def _words(form: BufferSpec) -> str:
    return "none" if form is None else f"{form[0]}{list(form[1])}"
