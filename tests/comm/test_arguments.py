"""Arguments that cannot be right are refused before anything is sent, and cost nobody the communicator or the group."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist

from sherd.comm.summation import REDUCTIONS
from sherd.errors import ConfigError, Diverged, SherdError, Unsupported
from tests.helpers.backend import backend
from tests.helpers.training import connected

REFUSED = (ConfigError, Unsupported)
DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
MERE_NAMES = [dtype for dtype in DTYPES if re.fullmatch(r"torch\.u?int[1-7]", str(dtype))]
"""Those that torch itself cannot copy."""
OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
SIZES = (4, 40_000)  # one exchange, and two
USUAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)


def of_rank(dtype, size, rank):
    """Small whole numbers where there are numbers, else bytes; None where torch can make no such tensor."""
    if str(dtype).startswith("torch.q"):
        return None  # made with a scale
    numbers = torch.arange(size).remainder(3).add(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return numbers.to(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            pass
        try:
            return numbers.repeat_interleave(dtype.itemsize).to(torch.uint8).view(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            return None


def again(x, rank):
    """The same once more: not every dtype can be copied."""
    return of_rank(x.dtype, len(x), rank)


def wide(tensor):
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def expected(dtype, size, op, world):
    parts = [wide(of_rank(dtype, size, rank)) for rank in range(world)]
    if dtype is torch.bool and op == "sum":
        op = "or"
    total = parts[0]
    for part in parts[1:]:
        total = REDUCTIONS[op](total, part)
    if op == "mean":
        total = (
            total / world if dtype.is_floating_point or dtype.is_complex else total.div(world, rounding_mode="floor")
        )
    return total.to(dtype)


def same_bytes(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def every_dtype(calls, usable, rank, world):
    """`calls(tensor)` are reductions by operation and name, then movements; both give results and what they should be.

    Gives the reductions that were refused.
    """
    refused = set()
    for dtype, size in itertools.product(DTYPES, SIZES):
        x = of_rank(dtype, size, rank)
        if x is None:
            continue
        reductions, movements = calls(x)
        for (operation, op), call in reductions.items():
            try:
                found = call()
            except (*REFUSED, ValueError) as error:
                if isinstance(error, SherdError):  # torch has its own words for some
                    assert f"rank {rank}: " in str(error), error
                    assert str(dtype) in str(error), error
                    refused.add((dtype, op, operation))
                usable()
                continue
            assert (dtype, op, operation) not in refused, (dtype, op, operation)
            whole = expected(dtype, size, op, world)
            part = whole.chunk(world)[rank] if operation == "reduce_scatter" else whole
            if found is not None:
                assert same_bytes(found, part), (dtype, op, operation)
        for name, call in movements.items():
            try:
                for found, source in call():
                    assert same_bytes(found, of_rank(dtype, size, source)[: found.numel()]), (dtype, name)
            except REFUSED:
                assert dtype in MERE_NAMES, (dtype, name)
                usable()
    return refused


def check_refused(refused):
    """What works today goes on to work."""
    refused = {(dtype, op) for dtype, op, _ in refused}
    for dtype, op in itertools.product(USUAL, ("sum", "mean", "max", "min", "product")):
        assert (dtype, op) not in refused
    for dtype, op in itertools.product((torch.int64, torch.uint8, torch.bool), ("and", "or", "xor")):
        assert (dtype, op) not in refused
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32):
        assert (dtype, "sum") in refused


def on_the_communicator(transport):
    with connected(transport) as c:
        other = 1 - c.rank

        def usable():
            assert c.all_reduce(torch.ones(2)).wait().tolist() == [2.0, 2.0]

        def calls(x):
            reductions = {("all_reduce", op): lambda op=op: c.all_reduce(x, op=op).wait() for op in REDUCTIONS}
            for op in REDUCTIONS:
                reductions["reduce_scatter", op] = lambda op=op: c.reduce_scatter(x, op=op).wait()

            def message():
                received = torch.empty_like(x)
                handles = [c.send(x, other), c.recv(received, other)]
                for handle in handles:
                    handle.wait()
                yield received, other

            return reductions, {
                "all_gather": lambda: zip(c.all_gather(x).wait().chunk(2), range(2), strict=True),
                "broadcast": lambda: [(c.broadcast(again(x, c.rank), 1).wait(), 1)],
                "all_to_all": lambda: [(c.all_to_all(torch.cat([x, x])).wait().chunk(2)[other], other)],
                "message": message,
            }

        check_refused(every_dtype(calls, usable, c.rank, c.world))


def on_the_backend(transport):
    with backend(transport, gloo=False):
        rank = dist.get_rank()

        def usable():
            x = torch.ones(2)
            dist.all_reduce(x)
            assert x.tolist() == [2.0, 2.0]

        def calls(x):
            def all_reduce(op):
                y = again(x, rank)
                dist.all_reduce(y, op=OPS[op])
                return y

            def reduce(op):
                y = again(x, rank)
                dist.reduce(y, 1, op=OPS[op])
                return y if rank == 1 else None

            def reduce_scatter(op):
                y = torch.empty_like(x[: len(x) // 2])
                dist.reduce_scatter_single(y, x, op=OPS[op])
                return y

            reductions = {}
            for op in OPS:
                reductions["all_reduce", op] = lambda op=op: all_reduce(op)
                reductions["reduce", op] = lambda op=op: reduce(op)
                reductions["reduce_scatter", op] = lambda op=op: reduce_scatter(op)

            def all_gather():
                rows = [torch.empty_like(x) for _ in range(2)]
                dist.all_gather(rows, x)
                return zip(rows, range(2), strict=True)

            def broadcast():
                y = again(x, rank)
                dist.broadcast(y, 0)
                return [(y, 0)]

            def gather():
                rows = [torch.empty_like(x) for _ in range(2)] if rank == 0 else None
                dist.gather(x, rows, dst=0)
                return zip(rows, range(2), strict=True) if rows else []

            def scatter():
                y = torch.empty_like(x)
                dist.scatter(y, [x, x] if rank == 1 else None, src=1)
                return [(y, 1)]

            def all_to_all():
                rows = [torch.empty_like(x) for _ in range(2)]
                dist.all_to_all(rows, [x, x])
                return zip(rows, range(2), strict=True)

            def message():
                y = torch.empty_like(x)
                works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
                for work in works:
                    work.wait()
                return [(y, 1 - rank)]

            moves = (all_gather, broadcast, gather, scatter, all_to_all, message)
            return reductions, {move.__name__: move for move in moves}

        check_refused(every_dtype(calls, usable, rank, 2))


@pytest.mark.parametrize("transport", ["host", "c10d"])
@pytest.mark.parametrize("function", [on_the_communicator, on_the_backend])
def test_every_dtype_by_every_operation_is_right_or_refused(ranks, function, transport):
    ranks(2).run(function, transport)


# ---------------------------------------------------------------- other arguments


def wrong_calls_of_the_communicator(c):
    x, rank = torch.ones(4), c.rank
    sparse, meta, wide = x.to_sparse(), torch.ones(4, device="meta"), torch.ones(1).expand(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    for tensor in (sparse, meta, quantised):
        yield lambda tensor=tensor: c.all_reduce(tensor)
        yield lambda tensor=tensor: c.all_gather(tensor)
        yield lambda tensor=tensor: c.broadcast(tensor, 0)
        yield lambda tensor=tensor: c.all_to_all(tensor)
        yield lambda tensor=tensor: c.reduce_scatter(tensor)
        yield lambda tensor=tensor: c.send(tensor, 1 - rank)
        yield lambda tensor=tensor: c.recv(tensor, 1 - rank)
        yield lambda tensor=tensor: c.all_gather(x, tensor)
    for nothing in (None, 3.0, [x]):
        yield lambda nothing=nothing: c.all_reduce(nothing)
        yield lambda nothing=nothing: c.broadcast(nothing, 0)
    yield lambda: c.all_reduce(x, [x])
    yield lambda: c.all_reduce(x, wide)
    yield lambda: c.broadcast(wide, 0)
    yield lambda: c.recv(wide, 1 - rank)
    yield lambda: c.all_reduce(x, torch.ones(3))
    yield lambda: c.all_reduce(x, torch.ones(4, dtype=torch.int64))
    yield lambda: c.all_reduce(x, op="and")
    yield lambda: c.all_reduce(x, op=None)
    yield lambda: c.all_reduce(x.to(torch.complex64), op="max")
    yield lambda: c.all_reduce(x > 0, op="mean")
    yield lambda: c.all_reduce(x, dtype=torch.uint4)
    yield lambda: c.reduce_scatter(torch.ones(3))
    yield lambda: c.reduce_scatter(x, own=torch.ones(3))
    yield lambda: c.all_to_all(torch.ones(5))
    yield lambda: c.all_to_all(x, x)
    for root in (-1, 2, None, "0"):
        yield lambda root=root: c.broadcast(x, root)
        yield lambda root=root: c.send(x, root)
        yield lambda root=root: c.recv(x, root)


def wrong_calls_of_the_backend(rank):
    x, other = torch.ones(4), 1 - rank
    sparse, meta, wide, empty = x.to_sparse(), torch.ones(4, device="meta"), torch.ones(1).expand(4), torch.empty(8)
    pair = [torch.ones(4), torch.ones(4)]
    for tensor in (sparse, meta):
        yield lambda tensor=tensor: dist.broadcast(tensor, 0)
        yield lambda tensor=tensor: dist.reduce(tensor, 0)
        yield lambda tensor=tensor: dist.all_gather(pair, tensor)
        yield lambda tensor=tensor: dist.all_gather([x, tensor], x)
        yield lambda tensor=tensor: dist.all_gather_single(empty, tensor)
        yield lambda tensor=tensor: dist.all_to_all(pair, [x, tensor])
        yield lambda tensor=tensor: dist.all_to_all([x, tensor], pair)
        yield lambda tensor=tensor: dist.send(tensor, other)
        yield lambda tensor=tensor: dist.recv(tensor, other)
        yield lambda tensor=tensor: dist.gather(tensor, pair if rank == 0 else None, dst=0)
        yield lambda tensor=tensor: dist.scatter(tensor, pair if rank == 0 else None, src=0)
        yield lambda tensor=tensor: dist.all_reduce_coalesced([x, tensor])
        yield lambda tensor=tensor: dist.group.WORLD.broadcast([x, tensor], dist.BroadcastOptions())
    yield from wrong_forms(x, pair, wide, empty, rank)
    yield lambda: dist.all_reduce(meta)
    yield lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX)
    yield lambda: dist.all_reduce(x, dist.ReduceOp.BAND)
    yield lambda: dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.5))
    yield lambda: dist.all_reduce(wide)
    yield lambda: dist.broadcast(wide, 0)
    yield lambda: dist.all_reduce_coalesced([x, x.to(torch.float8_e5m2)])


def wrong_forms(x, pair, wide, empty, rank):
    yield lambda: dist.all_gather([torch.ones(3), torch.ones(3)], x)
    yield lambda: dist.all_gather(pair[:1], x)
    yield lambda: dist.all_gather([*pair, x], x)
    yield lambda: dist.all_gather([x, wide], x)
    yield lambda: dist.all_gather([each.double() for each in pair], x)
    yield lambda: dist.all_gather_single(torch.empty(7), x)
    yield lambda: dist.all_gather_single(torch.empty(4, 4)[:, :2], x)
    yield lambda: dist.reduce_scatter_single(torch.empty(2), torch.ones(5))
    yield lambda: dist.reduce_scatter_single(torch.empty(3), x)
    yield lambda: dist.reduce_scatter_single(torch.empty(4, 2)[:, 0], torch.ones(8))
    yield lambda: dist.reduce_scatter(x, pair[:1])
    yield lambda: dist.reduce_scatter(x, [torch.ones(4), torch.ones(3)])
    yield lambda: dist.group.WORLD.reduce_scatter_single_coalesced([torch.ones(2)], [x, x])
    yield lambda: dist.group.WORLD.all_gather_single_coalesced([empty, empty], [x])
    yield lambda: dist.group.WORLD.all_gather_single_coalesced([empty, torch.empty(7)], [x, x])
    yield lambda: dist.group.WORLD.allgather([pair], [x, x])
    yield lambda: dist.group.WORLD.allgather_coalesced([[x], [x]], [x, x])
    yield lambda: dist.group.WORLD.allreduce([])
    yield lambda: dist.all_to_all(pair[:1], pair)
    yield lambda: dist.all_to_all(pair, pair[:1])
    yield lambda: dist.all_to_all(pair, [x, x.double()])
    yield lambda: dist.all_to_all_single(torch.empty(5), torch.ones(5))
    yield lambda: dist.all_to_all_single(torch.empty(6), torch.ones(4))
    yield lambda: dist.all_to_all_single(x, x)
    yield lambda: dist.all_to_all_single(torch.empty(4), x, [1, 1], [2, 2])
    yield lambda: dist.all_to_all_single(torch.empty(4), x, [2, 2], [4])
    yield lambda: dist.gather(x, pair[:1] if rank == 0 else [x], dst=0)
    yield lambda: dist.scatter(torch.empty(3), pair if rank == 1 else [x], src=1)
    yield lambda: dist.reduce(x, 2)
    yield lambda: dist.broadcast(x, 2)
    yield lambda: dist.gather(x, pair, dst=7)
    yield lambda: dist.scatter(x, pair, src=7)
    yield lambda: dist.broadcast(None, 0)
    yield lambda: dist.recv(x)


def refuse_and_go_on(calls, usable, rank, torchs=()):
    """Each on all ranks, then on one rank alone: whatever a refused call had sent, the next call would find."""
    numbers = itertools.count()
    for who in (None, 0, 1):
        for number, call in enumerate(calls()):
            if who in (None, rank):
                with pytest.raises((*REFUSED, *torchs)) as caught:  # torch checks some things itself
                    work = call()
                    raise AssertionError(f"call {number} was not refused: {work}")
                assert not isinstance(caught.value, AssertionError | Diverged), number
            usable(next(numbers))


def arguments_of_the_communicator(transport):
    with connected(transport) as c:

        def usable(number):
            assert c.all_reduce(torch.full((2,), float(number))).wait().tolist() == [2.0 * number] * 2

        refuse_and_go_on(lambda: wrong_calls_of_the_communicator(c), usable, c.rank)


def arguments_of_the_backend(transport):
    with backend(transport, gloo=False):

        def usable(number):
            x = torch.full((2,), float(number))
            dist.all_reduce(x)
            assert x.tolist() == [2.0 * number] * 2

        rank = dist.get_rank()
        torchs = (ValueError, TypeError, RuntimeError)
        refuse_and_go_on(lambda: wrong_calls_of_the_backend(rank), usable, rank, torchs)
        # Sizes that do not fit between ranks are refused by all of them.
        with pytest.raises(Diverged, match=r"rank 0 sends 3 elements to rank 1 .* has room for 2"):
            dist.all_to_all_single(torch.empty(4), torch.ones(4), [1 + rank, 3 - rank], [1, 3] if rank == 0 else [2, 2])
        usable(1000)


@pytest.mark.parametrize("transport", ["host", "c10d"])
@pytest.mark.parametrize("function", [arguments_of_the_communicator, arguments_of_the_backend])
def test_a_call_that_is_refused_has_sent_nothing(ranks, function, transport):
    ranks(2).run(function, transport)


@pytest.mark.fake
def test_the_message_says_rank_operation_dtype_and_what_to_write():
    with connected() as c, pytest.raises(SherdError) as caught:
        c.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    assert str(caught.value) == (
        "rank 0: all_reduce by 'sum' of torch.float8_e5m2 is not possible, as torch cannot compute with it; write "
        "x.to(torch.float32), and convert the result back"
    )
