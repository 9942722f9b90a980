"""torch.distributed over the backend "sherd": every collective, compared with gloo's in the same processes."""

from __future__ import annotations

import functools
import itertools
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

import sherd
from sherd import CommOptions
from sherd.errors import ConfigError, Unsupported
from sherd.patches.process import heap
from tests.helpers.backend import backend, in_two_threads
from tests.helpers.comm_reference import reduced, tensor_of
from tests.helpers.processes import python

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SHAPES = ((1,), (7, 6), (3, 0), (40_001,))
WORLDS = (2, 4)


def agree(ours, theirs, what):
    """Equal where the arithmetic is exact, else close: gloo adds in another order."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if ours.dtype.is_floating_point:
        tolerance = {torch.bfloat16: 0.02, torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-14}[ours.dtype]
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance * 10, msg=lambda text: f"{what}: {text}"
        )
    else:
        assert torch.equal(ours, theirs), what


def run(call, group, asynchronous):
    """A collective, waited for in one of torch's two ways."""
    work = call(group=group, async_op=asynchronous)
    if asynchronous:
        work.wait()
        assert group is not None or work.is_completed()  # gloo does not always say so


def mine(shape, dtype, seed=0):
    return tensor_of(dist.get_rank(), shape, dtype if dtype != torch.uint8 else torch.int64, seed).to(dtype)


# ---------------------------------------------------------------- collectives


def movements(group, dtype, shape, asynchronous):
    """The results of every collective that moves and does not reduce."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = mine(shape, dtype)
    found = {}
    found["broadcast"] = x.clone()
    run(functools.partial(dist.broadcast, found["broadcast"], world - 1), group, asynchronous)
    parts = [torch.empty_like(x) for _ in range(world)]
    run(functools.partial(dist.all_gather, parts, x), group, asynchronous)
    found["all_gather"] = torch.stack(parts)
    found["all_gather_single"] = torch.empty(world * shape[0], *shape[1:], dtype=dtype)
    run(functools.partial(dist.all_gather_single, found["all_gather_single"], x), group, asynchronous)
    gathered = [torch.zeros_like(x) for _ in range(world)] if rank == 1 else None
    run(functools.partial(dist.gather, x, gathered, 1), group, asynchronous)
    found["gather"] = torch.stack(gathered) if gathered else x
    given = [x + r for r in range(world)] if rank == 0 else None
    found["scatter"] = torch.empty_like(x)
    run(functools.partial(dist.scatter, found["scatter"], given, 0), group, asynchronous)
    if shape[-1]:
        tall = mine((world * 3, *shape[1:]), dtype)
        found["all_to_all_single"] = torch.empty_like(tall)
        run(functools.partial(dist.all_to_all_single, found["all_to_all_single"], tall), group, asynchronous)
        # rank r sends r + to + 1 rows to rank `to`
        sent = mine((sum(rank + to + 1 for to in range(world)), *shape[1:]), dtype)
        sizes = [rank + other + 1 for other in range(world)]
        found["uneven"] = torch.empty_like(sent)
        run(functools.partial(dist.all_to_all_single, found["uneven"], sent, sizes, sizes), group, asynchronous)
    return found


def reductions(group, dtype, shape, asynchronous, op):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = mine(shape, dtype)
    found = {"all_reduce": x.clone(), "reduce": x.clone()}
    run(functools.partial(dist.all_reduce, found["all_reduce"], op), group, asynchronous)
    run(functools.partial(dist.reduce, found["reduce"], world - 1, op), group, asynchronous)
    if rank != world - 1:
        del found["reduce"]  # gloo leaves something else there
    tall = mine((world * shape[0], *shape[1:]), dtype)
    found["reduce_scatter_single"] = torch.empty_like(x)
    run(functools.partial(dist.reduce_scatter_single, found["reduce_scatter_single"], tall, op), group, asynchronous)
    found["reduce_scatter"] = torch.empty_like(x)
    parts = list(tall.chunk(world)) if tall.numel() else [torch.empty_like(x)] * world
    run(functools.partial(dist.reduce_scatter, found["reduce_scatter"], parts, op), group, asynchronous)
    return found


def every_collective(transport, dtypes):
    bits = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    ordinary = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
    with backend(transport) as gloo:
        for number, (dtype, shape) in enumerate(itertools.product(dtypes, SHAPES)):
            asynchronous = bool(number % 2)
            ours, theirs = (movements(group, dtype, shape, asynchronous) for group in (None, gloo))
            for name in theirs:
                assert torch.equal(ours[name], theirs[name]), (name, dtype, shape)
            if not shape[-1]:
                continue  # gloo's own sums of nothing fail
            for op in (*ordinary, dist.ReduceOp.AVG) if dtype.is_floating_point else (*ordinary, *bits):
                ours, theirs = (reductions(group, dtype, shape, asynchronous, op) for group in (None, gloo))
                for name in theirs:
                    agree(ours[name], theirs[name], (name, dtype, shape, op))


@pytest.mark.parametrize(("world", "dtypes"), [(2, DTYPES), (4, (torch.float32, torch.int64))])
def test_every_collective_gives_what_gloo_gives(ranks, world, dtypes):
    ranks(world).run(every_collective, "host", dtypes)


def test_every_collective_over_c10d(ranks):
    ranks(2).run(every_collective, "c10d", (torch.float32, torch.bfloat16, torch.int64))


def same_bits_every_time():
    found = []
    with backend():
        for _ in range(2):
            x = tensor_of(dist.get_rank(), (50_001,), torch.float32)
            dist.all_reduce(x)
            found.append(x)
    assert torch.equal(*found)
    return found[0]


def test_sums_have_the_bits_of_the_communicators_tree(ranks):
    inputs = [tensor_of(rank, (50_001,), torch.float32) for rank in range(4)]
    for found in ranks(4).run(same_bits_every_time):
        assert torch.equal(found, reduced(inputs, 4))


def bools_complex_and_views():
    with backend():
        rank, world = dist.get_rank(), dist.get_world_size()
        flags = torch.tensor([rank == 0, rank == 1, False, True])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        assert flags.tolist() == [True, True, False, True]
        complex_ = torch.tensor([1 + 2j, 3j]) * (rank + 1)
        dist.all_reduce(complex_)
        assert torch.equal(complex_, torch.tensor([1 + 2j, 3j]) * sum(range(1, world + 1)))
        gaps = torch.zeros(6, 2)
        gaps[:, 0] = rank + 1.0
        dist.all_reduce(gaps[:, 0])
        assert gaps[:, 0].tolist() == [sum(range(1, world + 1))] * 6
        assert not gaps[:, 1].any()
        stacked = torch.empty(world, 3)
        dist.all_gather_single(stacked, torch.full((3,), float(rank)))
        assert stacked[:, 0].tolist() == list(range(world))
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        dist.broadcast(parameter.data, 1)
        dist.all_reduce(parameter.detach())
        assert parameter.tolist() == [world] * 3


def test_bools_complex_numbers_and_views(ranks):
    ranks(2).run(bools_complex_and_views)


def messages():
    with backend():
        rank, world = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % world, (rank - 1) % world
        for numel in (3, 200_000):
            mine, theirs = torch.full((numel,), float(rank)), torch.empty(numel)
            for work in [dist.isend(mine, right, tag=7), dist.irecv(theirs, left, tag=7)]:
                work.wait()
            assert theirs[-1] == left
            operations = [dist.P2POp(dist.isend, mine, left), dist.P2POp(dist.irecv, theirs, right)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert theirs[-1] == right
        with pytest.raises(Unsupported, match="src="):
            dist.recv(torch.empty(1))


def test_messages(ranks):
    ranks(4).run(messages)


def coalesced():
    with backend() as gloo:
        rank, world = dist.get_rank(), dist.get_world_size()
        results = []
        for group in (None, gloo):
            tensors = [mine((n,), torch.float32, n) for n in (3, 5000, 64)]
            with _coalescing_manager(group=group, async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)
            manager.wait()
            results.append(tensors)
        for ours, theirs in zip(*results, strict=True):
            agree(ours, theirs, "all_reduce")
        gathered, pieces = torch.empty(2, world * 4), torch.empty(2, 4)
        with _coalescing_manager():
            for row in gathered:
                dist.all_gather_single(row, torch.full((4,), float(rank)))
        with _coalescing_manager():
            for row, whole in zip(pieces, gathered, strict=True):
                dist.reduce_scatter_single(row, whole)
        assert gathered[1].tolist() == [float(r) for r in range(world) for _ in range(4)]
        assert pieces[1].tolist() == [float(rank * world)] * 4
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_gather(list(gathered[0].chunk(world)), torch.full((4,), 9.0))
        manager.wait()
        assert gathered[0].tolist() == [9.0] * (4 * world)


def test_coalesced_calls(ranks):
    ranks(2).run(coalesced)


# ---------------------------------------------------------------- groups, meshes, objects


def groups():
    with backend():
        rank = dist.get_rank()
        evens = dist.new_group([0, 2])
        odds = dist.new_group([3, 1])
        members = {0: evens, 1: odds, 2: evens, 3: odds}[rank]
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=members)
        assert x.item() == (2 if rank % 2 == 0 else 4)
        root = {0: 2, 1: 3, 2: 2, 3: 3}[rank]
        x = torch.tensor([float(rank)])
        dist.broadcast(x, root, group=members)
        assert x.item() == root
        alone = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(x, group=alone)
        assert (x.item(), alone.size()) == (root, 1)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for name, expected in (("outer", {0: 2, 1: 4, 2: 2, 3: 4}), ("inner", {0: 1, 1: 1, 2: 5, 3: 5})):
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=mesh.get_group(name))
            assert x.item() == expected[rank]
            total = functional.all_reduce(torch.tensor([float(rank)]), "sum", (mesh, mesh.mesh_dim_names.index(name)))
            assert functional.wait_tensor(total).item() == expected[rank]
        names = mesh.get_group("outer").communicator.names
        assert [name.split(" on ")[0] for name in names] == [f"rank {r}" for r in (rank % 2, rank % 2 + 2)]
        dist.destroy_process_group(evens if rank % 2 == 0 else odds)
        dist.barrier()


def test_groups_and_meshes(ranks):
    ranks(4).run(groups)


def crossing_groups():
    """Each rank waits first for another group than its peer does."""
    with backend():
        rank = dist.get_rank()
        first, second = dist.new_group(), dist.new_group()
        x, y = torch.ones(3_000_000), torch.full((3_000_000,), 2.0)
        works = [dist.all_reduce(x, group=first, async_op=True), dist.all_reduce(y, group=second, async_op=True)]
        for work in works if rank == 0 else reversed(works):
            work.wait()
        return x[-1].item(), y[-1].item()


def test_ranks_may_wait_for_groups_in_different_orders(ranks):
    assert ranks(2).run(crossing_groups) == [(2.0, 4.0)] * 2


def objects():
    with backend():
        rank, world = dist.get_rank(), dist.get_world_size()
        everybody = [None] * world
        dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank * 100})
        assert [one["rank"] for one in everybody] == list(range(world))
        gathered = [None] * world if rank == 1 else None
        dist.gather_object(("from", rank), gathered, dst=1)
        assert gathered is None or gathered == [("from", r) for r in range(world)]
        scattered = [None]
        dist.scatter_object_list(scattered, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
        assert scattered == [f"for {rank}"]
        sent = [rank, "word"]
        dist.broadcast_object_list(sent, src=1)
        assert sent == [1, "word"]


@pytest.mark.parametrize("world", WORLDS)
def test_objects(ranks, world):
    ranks(world).run(objects)


def functional_collectives():
    with backend():
        rank, world = dist.get_rank(), dist.get_world_size()
        group, x = dist.group.WORLD, torch.full((world, 2), float(rank))
        total = sum(range(world))
        assert functional.all_reduce(x, "sum", group).flatten().tolist() == [total] * (2 * world)
        assert functional.all_gather_tensor(x[:1], 0, group)[:, 0].tolist() == list(range(world))
        assert functional.reduce_scatter_tensor(x, "avg", 0, group).tolist() == [[total / world] * 2]
        assert functional.broadcast(x, 1, group)[0, 0].item() == 1
        assert functional.all_to_all_single(x, None, None, group)[:, 0].tolist() == list(range(world))
        sizes = [1] * world
        assert functional.all_to_all_single(x, sizes, sizes, group)[:, 0].tolist() == list(range(world))
        several = functional.all_reduce_coalesced([x, x[0]], "sum", group)
        assert [functional.wait_tensor(one).flatten()[0].item() for one in several] == [total] * 2


@pytest.mark.parametrize("world", WORLDS)
def test_functional_collectives(ranks, world):
    ranks(world).run(functional_collectives)


# ---------------------------------------------------------------- works, threads and life


def works():
    with backend():
        rank = dist.get_rank()
        x = torch.full((3,), rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        assert work.get_future().then(lambda future: future.value()[0] * 2).wait().tolist() == [6.0] * 3
        assert work.is_success()
        big = torch.full((2_000_000,), rank + 1.0)
        work = dist.all_reduce(big, async_op=True)
        while not work.is_completed():
            pass
        assert work.result()[0][-1].item() == 3.0
        if rank == 0:
            work = dist.irecv(x, 1)
            with pytest.raises(sherd.TimedOut, match=r"0\.1 s"):
                work.wait(timedelta(seconds=0.1))
            dist.barrier()
            work.wait(timedelta(seconds=30))
            assert x.tolist() == [5.0] * 3
        else:
            dist.barrier()
            dist.send(torch.full((3,), 5.0), 0)


def test_works_and_futures(ranks):
    ranks(2).run(works)


def threads():
    with backend():
        in_two_threads(100)


def test_threads_take_turns(ranks):
    ranks(2).run(threads)


def several_times():
    for _ in range(3):
        with backend(gloo=False):
            x = torch.ones(2)
            dist.all_reduce(x)
            assert x.tolist() == [2.0, 2.0]
    with backend("c10d", gloo=False):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for transport in ("host", "c10d"):
            with sherd.comm.connect(CommOptions(transport=transport, timeout=40)) as c:
                assert c.all_reduce(torch.ones(2)).wait().tolist() == [2.0, 2.0]
        sherd.distribute(model, optimizer, strategy="zero2")
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def test_it_can_be_started_again_and_sherd_itself_runs_beside_it(ranks):
    ranks(2).run(several_times)


def refusals():
    with backend():
        x = torch.ones(4)
        with pytest.raises(Unsupported, match="PREMUL_SUM; multiply the tensor first"):
            dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.5))
        with pytest.raises(ConfigError, match="BAND needs integers"):
            dist.all_reduce(x, dist.ReduceOp.BAND)
        with pytest.raises(Unsupported, match="sparse"):
            dist.broadcast(x.to_sparse(), 0)
        with pytest.raises(ConfigError, match="reduced by max"):
            dist.all_reduce(x.to_sparse(), dist.ReduceOp.MAX)
        with pytest.raises(ConfigError, match="2 tensors of 4 elements each"):
            dist.all_gather([torch.ones(3), torch.ones(3)], x)
        with pytest.raises(ConfigError, match=r"pg_options=sherd\.CommOptions"):
            dist.new_group(backend="sherd", pg_options={"timeout": 3})
        dist.all_reduce(x)  # none of these has broken anything
        assert x.tolist() == [2.0] * 4


def test_what_cannot_be_done_is_refused_by_name(ranks):
    ranks(2).run(refusals)


ORDERS = (
    "import sherd; assert 'torch' not in sys.modules; import torch",
    "import torch, sherd",
    "import sherd, torch.distributed.distributed_c10d, torch",
    "import sherd.comm, torch",
)


@pytest.mark.ranks
@pytest.mark.parametrize("order", ORDERS)
def test_the_backend_is_known_whichever_is_imported_first(order):
    code = f"""
import sys
{order}
import torch.distributed as dist
dist.init_process_group("sherd", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(dist.get_backend(), dist.get_default_backend_for_device("cpu"), x.tolist())
"""
    done = python(code)
    assert done.stdout.split("\n")[0] == "sherd gloo [1.0, 1.0]", done.stderr


def limits_raised(monkeypatch, **environment):
    calls = []
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *args: calls.append(args)))
    for name in (heap.VARIABLE, *heap._CHOICES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    heap.install()
    raised = len(calls)
    heap.uninstall()
    return raised


@pytest.mark.pure
def test_the_heap_of_the_process_is_left_alone_unless_asked_for(monkeypatch):
    assert limits_raised(monkeypatch) == 0
    assert limits_raised(monkeypatch, SHERD_KEEP_FREED_MEMORY="0") == 0
    assert limits_raised(monkeypatch, SHERD_KEEP_FREED_MEMORY="1") == 2
    assert limits_raised(monkeypatch, SHERD_KEEP_FREED_MEMORY="1", MALLOC_TRIM_THRESHOLD_="1") == 0
    with pytest.raises(ConfigError, match="must be 0 or 1"):
        limits_raised(monkeypatch, SHERD_KEEP_FREED_MEMORY="yes")
