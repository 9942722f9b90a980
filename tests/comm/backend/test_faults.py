"""What goes wrong between ranks is raised where torch's own training loop stands, as sherd's error."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sherd.errors import CommClosed, Diverged, PeerLost, TimedOut
from sherd.testing import Died, run_ranks
from tests.helpers.backend import backend
from tests.helpers.training import batch, loss_of, network, sgd

WORLD, VICTIM = 3, 1


def ddp():
    model = network()
    return DistributedDataParallel(model), model


def hooked():
    """A hook that asks for the future itself."""
    wrapped, model = ddp()
    wrapped.register_comm_hook(None, _average)
    return wrapped, model


def _average(_state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def fsdp2():
    model = network()
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


WRAPPERS = {"ddp": ddp, "hooked": hooked, "fsdp2": fsdp2}


def killed(wrapper, transport, where):
    with backend(transport, gloo=False):
        forward, model = WRAPPERS[wrapper]()
        optimizer = sgd(model)
        for step in range(100):
            loss = loss_of(forward, batch(dist.get_rank(), step))
            if step == 2 and dist.get_rank() == VICTIM:
                if where == "in backward":
                    next(model.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            try:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            except PeerLost as error:
                assert step == 2, step
                try:
                    dist.all_reduce(torch.ones(1))
                except CommClosed as closed:
                    return str(error), str(closed)
                return str(error), "no error"
    return "no error", ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrapper", "transport", "where"),
    [
        ("ddp", "host", "in backward"),
        ("hooked", "host", "before"),
        ("fsdp2", "host", "before"),
        ("ddp", "c10d", "before"),
    ],
)
def test_a_killed_rank_is_named_to_the_training_loop_of_the_others(wrapper, transport, where):
    results = run_ranks(killed, WORLD, wrapper, transport, where, timeout=60, expected_exits={VICTIM: -signal.SIGKILL})
    assert results[VICTIM] == Died(-signal.SIGKILL)
    for rank in (0, 2):
        error, closed = results[rank]
        assert re.search(rf"rank {VICTIM} on \S+ \(pid \d+\)", error), error
        assert "can no longer be used" in closed, closed


def functional_after_a_kill():
    with backend(gloo=False):
        if dist.get_rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        try:  # it may be seen when the call is made, or when it is waited for
            total = functional.all_reduce(torch.ones(3_000_000), "sum", dist.group.WORLD)
            functional.wait_tensor(total)
        except PeerLost as error:
            return str(error)
    return "no error"


@pytest.mark.ranks
def test_functional_collectives_raise():
    results = run_ranks(functional_after_a_kill, WORLD, timeout=60, expected_exits={VICTIM: -signal.SIGKILL})
    assert all(f"rank {VICTIM} on" in results[rank] for rank in (0, 2)), results


def calls(which):
    x, world = torch.ones(12), dist.get_world_size()
    room = [torch.empty(12) for _ in range(world)]
    at = dist.get_rank()
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "max": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "double": lambda: dist.all_reduce(x.double()),
        "all_gather": lambda: dist.all_gather(room, x),
        "gather": lambda: dist.gather(x, room if at == 0 else None, 0),
        "gather to 1": lambda: dist.gather(x, room if at == 1 else None, 1),
        "reduce": lambda: dist.reduce(x, 0),
        "reduce to 1": lambda: dist.reduce(x, 1),
        "scatter": lambda: dist.scatter(x, room if at == 0 else None, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": lambda: dist.barrier(),
        "object": lambda: dist.all_gather_object([None] * world, 1),
    }[which]()


def diverging(transport, first, second):
    with backend(transport, gloo=False):
        try:
            calls(second if dist.get_rank() == 1 else first)
        except Diverged as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("transport", "first", "second"),
    [
        ("host", "all_reduce", "max"),
        ("host", "all_reduce", "double"),
        ("host", "all_gather", "gather"),
        ("host", "gather", "gather to 1"),
        ("host", "reduce", "reduce to 1"),
        ("host", "all_reduce", "reduce"),
        ("host", "scatter", "broadcast"),
        ("host", "barrier", "object"),
        ("c10d", "reduce", "reduce to 1"),
        ("c10d", "all_reduce", "barrier"),
    ],
)
def test_different_calls_are_an_error_with_both_lines(ranks, transport, first, second):
    for text in ranks(2).run(diverging, transport, first, second):
        assert text.count("test_faults.py:") >= 2, text
        assert "rank 0 on" in text
        assert "rank 1 on" in text


def one_more_call():
    with backend(gloo=False):
        wrapped = DistributedDataParallel(network())
        rank = dist.get_rank()
        try:
            if rank == 1:
                dist.all_reduce(torch.ones(5))
            loss_of(wrapped, batch(rank)).backward()
        except Diverged as error:
            return str(error)
    return "no error"


def test_a_call_too_many_beside_ddp_is_an_error_of_both_ranks(ranks):
    for text in ranks(2).run(one_more_call):
        assert "all_reduce(float32[5], sum)" in text, text


def late():
    dist.init_process_group("sherd", timeout=timedelta(seconds=1))
    try:
        group = dist.new_group(timeout=timedelta(seconds=2))
        limits = dist.group.WORLD.communicator.options.timeout, group.communicator.options.timeout
        if dist.get_rank() == 1:
            time.sleep(3)
            return "slept", limits
        dist.all_reduce(torch.ones(2))
    except TimedOut as error:
        return str(error), limits
    finally:
        dist.destroy_process_group()
    return "no error", limits


def test_torchs_timeouts_are_sherds(ranks):
    (text, limits), _ = ranks(2).run(late)
    assert "rank 1 on" in text, text
    assert limits == (1.0, 2.0)
