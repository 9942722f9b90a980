"""Masters: what the optimizer steps where parameters are kept in fewer bits.

The owner of a slice keeps its master. An update steps the master and rounds it into the parameter. What a program
writes into a parameter counts too: before an update, elements of which the rounded master is no longer the parameter
take the parameter's value, and all others keep every bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sherd.comm import labelled
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.tracked import TrackedParameter


def make_masters(buckets: Iterable[Bucket]) -> None:
    """Give those of these buckets masters that need them and have none yet, with the values of their parameters."""
    for bucket in buckets:
        if bucket.update_dtype != bucket.dtype and bucket.values.master is None:
            bucket.values.master = bucket.values.owned.detach().to(bucket.update_dtype)


def with_masters(members: Iterable[TrackedParameter]) -> list[TrackedParameter]:
    """Those of these parameters that have masters."""
    return [member for member in members if member.bucket.values.master is not None]


def put_masters(members: Iterable[TrackedParameter], sliced: bool) -> None:
    """Make what the parameters are now, whole and in the masters' dtype, the masters of what this rank owns."""
    by_bucket: dict[Bucket, list[TrackedParameter]] = {}
    for member in with_masters(members):
        by_bucket.setdefault(member.bucket, []).append(member)
    for bucket, its in by_bucket.items():
        chosen = set(its)
        for member, segment in bucket.segments(bucket.comm.rank if sliced else None):
            if member in chosen:
                start = segment.region.start
                part = member.flattened[start : start + segment.numel]
                bucket.values.stepped[segment.offset : segment.offset + segment.numel].copy_(part)
        bucket.values.edited = True


def whole_masters(buckets: Sequence[Bucket], sliced: bool) -> Mapping[Bucket, Tensor]:
    """The masters of these buckets, which have them, whole and private. Collective where ranks own slices."""
    for bucket in buckets:
        follow_edits(bucket.values.stepped, bucket.values.owned)
    with labelled("the fp32 masters"):
        return {
            bucket: bucket.gather(bucket.values.stepped).wait() if sliced else bucket.values.stepped.clone()
            for bucket in buckets
        }


def follow_edits(master: Tensor, rounded: Tensor) -> None:
    """Let a master take the elements of its parameter that are not the master, rounded: the program wrote them."""
    if master.is_meta:
        return  # there are no values
    expected = master.to(rounded.dtype).view(torch.int16)  # bits: NaN is NaN, and 0.0 is not -0.0
    found = rounded.detach().view(torch.int16)
    if not torch.equal(expected, found):
        master.copy_(torch.where(expected == found, master, rounded.detach().to(master.dtype)))


@contextmanager
def stepping_masters(members: Sequence[TrackedParameter]) -> Iterator[None]:
    """Inside, these parameters, all of which this rank owns, are their masters, for an optimizer that steps them."""
    buckets = {member.bucket for member in members}
    for bucket in buckets:
        follow_edits(bucket.values.stepped, bucket.values.owned)
    homes = {member: member.shaped_in(member.bucket.values.stepped.detach()) for member in members}
    grads = {member: member.parameter.grad for member in members}
    for member, home in homes.items():
        member.parameter.data = home
        if (grad := grads[member]) is not None and grad.dtype != home.dtype:
            member.parameter.grad = grad.to(home.dtype)
    try:
        yield
    finally:
        for member, home in homes.items():
            if not member.parameter.is_set_to(home):  # p.data = p.data - ...
                home.copy_(member.parameter.detach())
            member.parameter.data = member.home
            member.parameter.grad = grads[member]
        for bucket in buckets:
            bucket.values.owned.copy_(bucket.values.stepped)
