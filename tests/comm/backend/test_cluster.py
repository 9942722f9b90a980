"""The backend "sherd" where the ranks are on several hosts, which are played by labels."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.comm.backend.test_backend import every_collective
from tests.comm.backend.test_training import ddp, fsdp2, nearly
from tests.helpers.backend import backend, in_two_threads


def on_two_hosts(fn, *args):
    """`fn(*args)` where ranks 0 and 1 are on one host, 2 and 3 on another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHERD_HOST", "ab"[int(os.environ["RANK"]) // 2])
        return fn(*args)


def test_every_collective(ranks):
    ranks(4).run(on_two_hosts, every_collective, "cluster", (torch.float32, torch.int64))


def groups():
    """Those of one host share memory, a column and the whole do what they can, and each knows its ranks."""
    with backend("cluster"):
        rank = dist.get_rank()
        found = {}
        for members in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3], [0, 1, 2]):
            group = dist.new_group(members)
            if rank in members:
                x = torch.full((30_000,), float(rank))
                dist.all_reduce(x, group=group)
                assert x[-1].item() == sum(members)
                found[tuple(members)] = group.communicator.transport
        dist.barrier()
        return found


def test_groups_take_the_transport_of_their_hosts(ranks):
    first, *_, last = ranks(4).run(on_two_hosts, groups)
    assert first == {(0, 1): "host", (0, 2): "c10d", (0, 1, 2, 3): "cluster", (0, 1, 2): "c10d"}
    assert last == {(2, 3): "host", (1, 3): "c10d", (0, 1, 2, 3): "cluster"}


def threads():
    with backend("cluster"):
        in_two_threads(30, begun=4)


def test_threads_take_turns(ranks):
    ranks(4).run(on_two_hosts, threads)


def training():
    with backend("cluster") as gloo:
        meshes = init_device_mesh("cpu", (4,)), DeviceMesh.from_group(gloo, "cpu")
        for train, (ours, theirs) in ((ddp, (None, gloo)), (sharded, meshes)):
            first, other, again = train(ours), train(theirs), train(ours)
            nearly(first, other)
            assert all(torch.equal(first[key], again[key]) for key in first)


def sharded(mesh):
    return fsdp2(mesh)[0]


def test_ddp_and_fsdp2_train_as_over_gloo_and_the_same_every_time(ranks):
    ranks(4).run(on_two_hosts, training)
