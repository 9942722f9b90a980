"""What a model consists of: its parameters by name, each once, compared between the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from sherd.comm import Communicator
from sherd.errors import ConfigError, Diverged
from sherd.layout.entry import ITEMSIZE, Entry, dtype_name, memory_order
from sherd.layout.placement import padded

LARGEST_BUCKET_BYTES = 2 << 20
"""The fastest of 0.5 to 8 MB: smaller ones cost more calls, larger ones leave the cache before they are reduced."""
SMALLEST_BUCKET_BYTES = 64 << 10
BUCKETS = 48
"""How many a model is cut into, within these bounds. The ring's slots on a rank then take 2% of what a host holds for
fp32 AdamW, and the first bucket can be reduced long before backward ends."""
ACROSS_HOSTS = 2.25
"""So many times as large are buckets that cross a network, where a call costs more. On two hosts of two ranks with
1 Gbit/s between them, a step of 2.35 s took 2.15 s with buckets of 4 MB. The eighth more is for the biases and norms
around a matrix of that size, which would need buckets of their own: 52 of them instead of 32 for a GPT of 33.7 M."""


@dataclass(frozen=True)
class Inventory:
    """A model's parameters by name, in the order of registration, tied ones once."""

    model: nn.Module
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, dry: bool = False) -> Inventory:
        """Take stock of `model`, refusing what cannot be distributed; it needs values, except for a `dry` run."""
        found = list(model.named_parameters())
        for name, parameter in found:
            _check(name, parameter, dry)
            if parameter.device != found[0][1].device:
                raise ConfigError(
                    f"parameter {name!r} is on {parameter.device} and {found[0][0]!r} on {found[0][1].device}; "
                    f"put the whole model on one device before sherd.distribute"
                )
        _check_modules(model)
        names, parameters = tuple(name for name, _ in found), tuple(parameter for _, parameter in found)
        return cls(model, names, parameters, tuple(buffer for buffer in model.buffers() if buffer is not None))

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((parameter.device for parameter in self.parameters), torch.device("cpu"))

    def trainable(self) -> list[int]:
        """The indices of the parameters that require a gradient now."""
        return [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]

    @cached_property
    def _entries(self) -> tuple[Entry, ...]:
        found = zip(self.names, self.parameters, strict=True)
        return tuple(Entry(name, tuple(p.shape), dtype_name(p), order=memory_order(p)) for name, p in found)

    def entry(self, index: int) -> Entry:
        """A parameter as a layout sees it: what it was when the model was distributed."""
        return self._entries[index]

    def entries(self, indices: Iterable[int]) -> list[Entry]:
        """These parameters as a layout sees them."""
        return [self._entries[index] for index in indices]

    def bucket_numel(self, bucket_bytes: int | None, crosses: bool = False) -> int:
        """Elements of a bucket: what was asked for, or a share of the model, so that a small one wastes nothing."""
        times = ACROSS_HOSTS if crosses else 1.0
        largest = max((p.element_size() for p in self.parameters), default=4)
        if bucket_bytes is None:
            total = sum(padded(p.numel()) * p.element_size() for p in self.parameters)
            share = max(int(times * total / BUCKETS), SMALLEST_BUCKET_BYTES)
            bucket_bytes = min(share, int(times * LARGEST_BUCKET_BYTES))
        return max(bucket_bytes // largest, 1)

    def compare(self, comm: Communicator) -> None:
        """Refuse models that differ between ranks, before anything is shared. Collective."""
        mine: list[tuple[object, ...]] = []
        for name, p in self.model.named_parameters():
            mine.append((name, tuple(p.shape), dtype_name(p), p.requires_grad, memory_order(p)))
        mine += [(name, tuple(b.shape), dtype_name(b), None, None) for name, b in self.model.named_buffers()]
        everybody, rank = comm.compare_object(mine)
        if rank:
            raise Diverged(_difference(everybody[0], everybody[rank], rank), ranks=(0, rank))


def _check(name: str, parameter: nn.Parameter, dry: bool) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(f"parameter {name!r} has no shape yet; run one batch through the model before distribute")
    if parameter.is_meta and not dry:
        raise ConfigError(f"parameter {name!r} is on the meta device; give it values: model.to_empty(device='cpu')")
    if dtype_name(parameter) not in ITEMSIZE:
        raise ConfigError(f"parameter {name!r} is of {parameter.dtype}, which cannot be distributed")


def _check_modules(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r} is sparse ({buffer.layout}), which cannot be sent; keep it as a plain attribute of "
                f"its module, or make it dense"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"module {name!r} has max_norm={module.max_norm}: each rank's forward would edit the weights that its "
                f"own batch uses; leave it out, and limit the weights inside sherd.full_parameters"
            )


def _difference(first: list[tuple[object, ...]], theirs: list[tuple[object, ...]], rank: int) -> str:
    for here, there in zip(first, theirs, strict=False):
        if here != there:
            detail = f"rank 0 has {_words(here)} where rank {rank} has {_words(there)}"
            break
    else:
        detail = f"rank 0 has {len(first)} parameters and buffers, rank {rank} has {len(theirs)}"
    return f"the ranks' models differ: {detail}; build the same model on every rank before sherd.distribute"


def _words(item: tuple[object, ...]) -> str:
    name, shape, dtype, trainable, order = item
    memory = "" if order is None else f" with dimensions {order} in memory"
    return f"{name!r} {dtype}{list(shape)}{' frozen' if trainable is False else ''}{memory}"  # type: ignore[call-overload]
