"""Buckets, lists of them and what has a state: what an illegal order of calls says, and what a new list reuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sherd.comm import SoloCommunicator
from sherd.engine.buckets.bucket import Bucket, Local, Sum
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.exchange import ReplicaExchange, SliceExchange, WholeExchange
from sherd.engine.buckets.ring import Reductions
from sherd.engine.buckets.tracked import Mode, TrackedParameter
from sherd.engine.gradients import round
from sherd.engine.gradients.round import Round
from sherd.engine.policy import ExchangePolicy
from sherd.errors import SherdError

pytestmark = pytest.mark.fake

SHAPES = [(7, 15), (3,), (40, 30), (), (5, 5)]


def members(frozen=(), shapes=SHAPES):
    made = [nn.Parameter(torch.ones(shape), index not in frozen) for index, shape in enumerate(shapes)]
    return [TrackedParameter(f"p{index}", parameter) for index, parameter in enumerate(made)]


def packed(frozen=(), kind=SliceExchange, bucket_numel=1024):
    comm, device = SoloCommunicator(), torch.device("cpu")
    buckets = BucketList.pack(members(frozen), 1, 1, bucket_numel)
    for bucket in buckets.every:
        bucket.comm = comm
    exchange = kind(comm, bucket_numel, device, ExchangePolicy().reduce)
    exchange.take(buckets.buckets)
    reductions = Reductions(device)
    reductions.fit(buckets.buckets)
    return buckets, reductions


def fill(bucket, value=1.0):
    bucket.open()
    for member in bucket.members:
        bucket.arrive(member, torch.full(member.entry.shape, value))


@pytest.mark.parametrize("kind", [SliceExchange, WholeExchange, ReplicaExchange])
def test_the_way_of_a_bucket(kind):
    buckets, reductions = packed(kind=kind)
    bucket = buckets.buckets[0]
    assert (bucket.local, bucket.sum_state) == (Local.NONE, Sum.NONE)
    fill(bucket)
    assert bucket.local is Local.COMPLETE
    bucket.launch("sum", reductions)
    assert bucket.local is Local.NONE
    reductions.settle()
    assert bucket.sum_state is Sum.DONE
    numel = sum(member.entry.numel for member in bucket.members)
    assert bucket.norms.square().sum().item() == pytest.approx(numel)
    fill(bucket, 2.0)  # adds up
    bucket.launch("sum", reductions)
    reductions.settle()
    assert bucket.slice.sum().item() == 3.0 * numel
    bucket.drop()
    assert bucket.sum_state is Sum.NONE


def test_what_is_being_reduced_is_not_dropped():
    buckets, _ = packed()
    bucket = buckets.buckets[0]
    bucket.move(Sum.REDUCING)
    with pytest.raises(SherdError, match=r"the bucket of 'p\d'.* is being reduced and cannot become none"):
        bucket.drop()
    with pytest.raises(SherdError, match="is being reduced and cannot become being reduced"):
        bucket.move(Sum.REDUCING)


def test_a_round_names_both_states():
    _, reductions = packed()
    one = Round(0, reductions)
    with pytest.raises(SherdError, match="a round that is idle cannot become collecting"):
        one.move(round.State.COLLECTING)
    one.move(round.State.OPEN)
    with pytest.raises(SherdError, match="a round that is open cannot become flushing"):
        one.move(round.State.FLUSHING)


@given(st.sets(st.integers(0, 4)), st.permutations(range(5)))
def test_unfreezing_makes_a_new_list_of_the_same_buckets(frozen, order):
    every = members(frozen)
    before = BucketList.pack(every, 2, 2, 512)
    assert {m.name for b in before.frozen for m in b.members} == {f"p{index}" for index in frozen}
    now = before
    for index in (index for index in order if index in frozen):
        now.table.norms.uniform_()
        norms = {bucket: bucket.norms.clone() for bucket in now.buckets}
        later = now.unfrozen([every[index]])
        assert later.buckets[:-1] == now.buckets and later.buckets[-1] is every[index].bucket
        assert later.parameters == (*now.parameters, every[index])
        assert later.launch_order[-1] is every[index].bucket
        assert every[index].mode is Mode.TRAINED
        assert all(torch.equal(bucket.norms, norms[bucket]) for bucket in now.buckets)
        now = later
    assert now.frozen == () and set(now.parameters) == set(every)
    assert now.layout.numel == sum(member.entry.numel for member in every)


@given(st.data())
def test_another_launch_order_keeps_everything_else(data):
    buckets = BucketList.pack(members(), 2, 2, 512)
    order = data.draw(st.permutations(range(len(buckets.buckets))))
    found = buckets.launched_in(order)
    assert [buckets.buckets.index(bucket) for bucket in found.launch_order] == list(order)
    assert found.buckets is buckets.buckets and found.table is buckets.table


def test_segments_cover_every_member_once():
    world = 3
    buckets = BucketList.pack(members(), world, world, 512)
    seen = {member: torch.zeros(member.entry.numel) for member in buckets.parameters}
    for bucket in buckets.buckets:
        assert isinstance(bucket, Bucket)
        for owner in range(world):
            for member, segment in bucket.segments(owner):
                assert segment in list(member.segments())
                seen[member][segment.region.start : segment.region.start + segment.numel] += 1
    assert all(bool((count == 1).all()) for count in seen.values())
