"""Buckets laid end to end in flat memory, one allocation per dtype: that of the parameters, or that of another role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from sherd.layout.slicing import Bucket


def numel_by_dtype(buckets: Iterable[Bucket], size: Callable[[Bucket], int], role: str = "parameter") -> dict[str, int]:
    """Elements of these buckets, by dtype."""
    numel: dict[str, int] = {}
    for bucket in buckets:
        dtype = getattr(bucket.dtypes, role)
        numel[dtype] = numel.get(dtype, 0) + size(bucket)
    return numel


def carve(
    memory: Mapping[str, Tensor], buckets: Iterable[Bucket], size: Callable[[Bucket], int], role: str = "parameter"
) -> list[Tensor]:
    """A part of `memory` for each bucket, in order."""
    used = dict.fromkeys(memory, 0)
    parts = []
    for bucket in buckets:
        dtype = getattr(bucket.dtypes, role)
        start = used[dtype]
        used[dtype] = start + size(bucket)
        parts.append(memory[dtype][start : used[dtype]])
    return parts


def with_own_storage(flat: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself.

    Saving or copying a view takes the whole storage: `torch.save` of one layer would write the whole model.
    """
    if flat.is_meta:
        return flat  # there is nothing to save
    start = flat.storage_offset() * flat.element_size()
    return flat.new_empty(0).set_(flat.untyped_storage()[start : start + flat.nbytes], 0, flat.shape, (1,))
