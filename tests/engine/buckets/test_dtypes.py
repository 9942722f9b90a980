"""Dtypes by role: what travels, what is summed and kept, against plain torch, bit by bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.exchange import ReplicaExchange, SliceExchange, WholeExchange
from sherd.engine.buckets.ring import Reductions
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.policy import ExchangePolicy, Home
from sherd.errors import ConfigError
from sherd.layout import BLOCK, Entry, ShardLayout
from sherd.layout.entry import Dtypes
from sherd.strategies.zero import Sharded
from tests.helpers.training import connected

SHAPES = [(7, 15), (3,), (40, 30), (), (5, 5)]
NUMEL = 1024
NARROW_WIRE = Dtypes("float32", "bfloat16", "float32", "float32")
WIDE_SUM = Dtypes("bfloat16", "float32", "float32", "bfloat16")
WIDE_SUM_ONLY = Dtypes("bfloat16", "bfloat16", "float32", "bfloat16")
ROLES = (NARROW_WIRE, WIDE_SUM, WIDE_SUM_ONLY)
FACTORS = (1.0, 0.3)
KINDS = (SliceExchange, WholeExchange, ReplicaExchange)
ROUNDS = 3


def dtype(name):
    return getattr(torch, name)


def gradient(rank, number, index, dtypes):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * number + index)
    return torch.randn(SHAPES[index], generator=generator).to(dtype(dtypes.parameter))


def packed(world, dtypes):
    made = []
    for index, shape in enumerate(SHAPES):
        member = TrackedParameter(f"p{index}", nn.Parameter(torch.ones(shape, dtype=dtype(dtypes.parameter))))
        member.entry = dataclasses.replace(member.entry, dtypes=dtypes)
        made.append(member)
    return BucketList.pack(made, world, world, NUMEL)


def reduced(cases):
    """This rank's slice of each sum, its norms and its dtype after some rounds, for each case."""
    found = []
    with connected() as c:
        for kind, dtypes, factor, op in cases:
            buckets = packed(c.world, dtypes)
            for bucket in buckets.every:
                bucket.comm = c
            policy = ExchangePolicy() if kind is ReplicaExchange else Sharded(2, Home.PRIVATE, c.world)
            exchange = kind(c, NUMEL, torch.device("cpu"), policy.reduce)
            exchange.take(buckets.buckets)
            reductions = Reductions(torch.device("cpu"))
            reductions.fit(buckets.buckets)
            for number, bucket in itertools.product(range(ROUNDS), buckets.buckets):
                bucket.open(factor)
                for member in bucket.members:
                    if (number, member.name) != (1, "p0"):  # a missing one is zero
                        bucket.arrive(member, gradient(c.rank, number, int(member.name[1:]), dtypes))
                bucket.launch(op, reductions)
                reductions.settle()
            found.append([(bucket.slice.clone(), bucket.norms.clone()) for bucket in buckets.buckets])
    return found


def expected(world, dtypes, factor, op):
    """The same sums by plain torch, whole."""
    wire, kept = dtype(dtypes.wire), dtype(dtypes.sum)
    wide = torch.promote_types(wire, dtype(dtypes.parameter))
    wholes = []
    for bucket in packed(world, dtypes).buckets:
        total = torch.zeros(bucket.described.numel, dtype=kept)
        for number in range(ROUNDS):
            parts = []
            for rank in range(world):
                part = torch.zeros(bucket.described.numel, dtype=wire)
                for member in bucket.members:
                    if (number, member.name) != (1, "p0"):
                        flat = gradient(rank, number, int(member.name[1:]), dtypes).reshape(-1).to(wide)
                        flat = flat if factor == 1.0 else flat * factor
                        part[member.offset : member.offset + member.entry.numel] = flat.to(wire)
                parts.append(part.float())
            once = parts[0]
            for part in parts[1:]:
                once = once + part
            total += (once / world if op == "mean" else once).to(kept)
        wholes.append(total)
    return wholes


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_sums_between_dtypes_are_those_of_plain_torch(ranks, world):
    cases = list(itertools.product(KINDS, ROLES, FACTORS, ("sum", "mean")))
    by_rank = ranks(world).run(reduced, cases)
    for number, (kind, *case) in enumerate(cases):
        for at, whole in enumerate(expected(world, *case)):
            found = torch.cat([by_case[number][at][0] for by_case in by_rank])
            assert found.dtype == torch.float32
            assert torch.equal(found, whole), (kind, case)
            norms = torch.cat([by_case[number][at][1] for by_case in by_rank])
            assert torch.equal(norms, torch.linalg.vector_norm(whole.view(-1, BLOCK), dim=1).double()), (kind, case)


@pytest.mark.pure
def test_a_bucket_has_one_dtype_in_each_role():
    entries = [Entry(f"p{index}", (3,), roles.parameter, dtypes=roles) for index, roles in enumerate(ROLES)]
    entries += [dataclasses.replace(entry, name=f"{entry.name} again") for entry in entries]
    entries.append(Entry("plain", (3,)))
    layout = ShardLayout.build(entries, 2)
    assert [bucket.dtypes for bucket in layout.buckets] == [*ROLES, Dtypes.all("float32")]
    assert [len(bucket.members) for bucket in layout.buckets] == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="parameter 'p' has dtype 'float32' and Dtypes"):
        Entry("p", (3,), dtypes=WIDE_SUM)
