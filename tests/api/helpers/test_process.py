"""Who is who: numbers of ranks, before and without a communicator, and the one that helpers share."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

import sherd
from sherd import CommOptions, ConfigError
from sherd.api.helpers import process
from sherd.testing import run_ranks
from tests.helpers.processes import python, run
from tests.helpers.training import STRATEGIES, batch, connected, loss_of, network, sgd, weights

pytestmark = pytest.mark.pure


def numbers_without_connecting():
    before = sherd.rank(), sherd.world(), sherd.is_main(), torch.distributed.is_initialized()
    sherd.barrier()
    after = sherd.rank(), sherd.world(), sherd.is_main(), torch.distributed.is_initialized()
    return before, after


def test_the_numbers_of_a_rank_need_no_connection(ranks):
    found = ranks(2).run(numbers_without_connecting)
    assert found == [((0, 2, True, False), (0, 2, True, True)), ((1, 2, False, False), (1, 2, False, True))]


def test_without_a_launcher_there_is_one_rank():
    assert (sherd.rank(), sherd.world(), sherd.is_main()) == (0, 1, True)
    sherd.barrier()
    assert sherd.broadcast({"a": (1, 2)}) == {"a": (1, 2)}
    assert sherd.gather("x") == ["x"]
    assert sherd.mean(3.0, n=2) == 3.0
    with sherd.main_first():
        pass


def test_variables_that_are_no_numbers_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two' must be a whole number"):
        sherd.world()


@pytest.mark.ranks
def test_everything_is_found_by_dir_without_importing_torch():
    code = (
        "import sys, sherd; assert dir(sherd) == sorted(sherd.__all__) and 'torch' not in sys.modules;"
        "assert {'rank', 'distribute', 'launch', 'progress', 'print', 'comm'} <= set(dir(sherd));"
        "assert all(hasattr(sherd, name) for name in dir(sherd))"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def broadcasts():
    mine = {"rank": sherd.rank(), "rows": torch.arange(3) + sherd.rank(), "pair": (1.5, None)}
    found = [sherd.broadcast(mine), sherd.broadcast(mine, root=1)]
    with pytest.raises(ConfigError, match=r"sherd\.broadcast got root=2; write a rank from 0 to 1"):
        sherd.broadcast(1, root=2)
    return [(each["rank"], each["rows"].tolist(), each["pair"]) for each in found]


def test_a_value_of_one_rank_reaches_all(ranks):
    assert ranks(2).run(broadcasts) == [[(0, [0, 1, 2], (1.5, None)), (1, [1, 2, 3], (1.5, None))]] * 2


def one_communicator():
    """Helpers before, during and after training: no more than one communicator, and not a byte of payload."""
    sherd.barrier()
    first = process.communicator()
    model, optimizer = network(), None
    optimizer = sgd(model)
    sherd.distribute(model, optimizer, strategy="zero2")
    assert process.communicator() is first and sherd.api.training.training_of(model).engine.comm is first
    payload = first.counters.total().payload
    sherd.gather(torch.ones(3))
    sherd.mean(1.0, n=1)
    sherd.broadcast("x" * 1000)
    with sherd.main_first():
        pass
    assert first.counters.total().payload == payload
    other = network()
    sherd.distribute(other, strategy="ddp", comm=CommOptions(timeout=100.0))
    second = process.communicator()
    assert second is not first and sherd.api.training.training_of(other).engine.comm is second
    with connected() as third:
        sherd.distribute(network(), strategy="ddp", comm=third)
        assert process.communicator() is second
    second.close()
    sherd.barrier()
    assert process.communicator() not in (first, second)
    return process.communicator().world


def test_helpers_share_a_communicator_with_distribute(ranks):
    assert ranks(2).run(one_communicator) == [2, 2]


def refused_first():
    """What `distribute` refuses closes the communicator; helpers and the next call find another."""
    sherd.barrier()
    with pytest.raises(ConfigError):
        sherd.distribute(network(), strategy="zero9")
    sherd.barrier()
    sherd.distribute(network(), strategy="zero2")
    return sherd.gather(sherd.rank())


def test_helpers_go_on_after_a_refusal(ranks):
    assert ranks(2).run(refused_first) == [[0, 1]] * 2


def in_a_fork():
    sherd.barrier()
    child = os.fork()
    if not child:
        try:
            sherd.barrier()
        except ConfigError as error:
            os._exit(3 if "is not a rank" in str(error) else 4)
        os._exit(5)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sherd.barrier()
    return code


def test_a_forked_process_takes_no_part(ranks):
    assert ranks(2).run(in_a_fork) == [3, 3]


def alone():
    if sherd.rank() == 0:
        sherd.mean(1.0, n=1)
    else:
        sherd.gather(1.0)


@pytest.mark.ranks
def test_helpers_that_differ_between_ranks_are_found_out():
    with pytest.raises(sherd.RankFailed) as caught:
        run_ranks(alone, 2, env={"SHERD_TIMEOUT": "60"})
    assert "sherd.mean" in str(caught.value) and "sherd.gather" in str(caught.value)
    assert "in alone" in str(caught.value)  # the line of the script, not one of ours


def trained(strategy, help_along):
    """Helpers wherever a script may call them: between backward and step, inside an accumulation window, ..."""
    model = network()
    optimizer = sgd(model)
    sherd.distribute(model, optimizer, strategy=strategy, accumulate=2)
    for step in range(4):
        loss = loss_of(model, batch(sherd.rank(), step))
        if help_along:
            sherd.mean(loss, n=1)
        loss.backward()
        if help_along:
            sherd.gather(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if help_along:
            sherd.barrier()
    return weights(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_helpers_do_not_disturb_training(ranks, strategy):
    plain, helped = (ranks(2).run(trained, strategy, each) for each in (False, True))
    for one, other in zip(plain, helped, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


EVERYWHERE = """
import json, sherd
sherd.seed(1)
with sherd.main_first():
    pass
mean = sherd.mean(float(sherd.rank()), n=1)
sherd.print(json.dumps([sherd.world(), mean, sherd.gather(sherd.rank()), sherd.broadcast("x")]))
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "world"),
    [
        ([], 1),
        pytest.param(["-m", "sherd.cli", "run", "-n", "2"], 2, marks=pytest.mark.fuzz),  # sets what torchrun sets
        (["-m", "torch.distributed.run", "--nproc-per-node=2"], 2),
    ],
)
def test_helpers_need_no_distribute_and_no_launcher(tmp_path, launcher, world):
    (tmp_path / "script.py").write_text(EVERYWHERE)
    done = run(sys.executable, *launcher, tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "[" in line]
    assert json.loads(line[line.index("[") :]) == [world, (world - 1) / 2, list(range(world)), "x"]


@pytest.mark.ranks
def test_inside_launch():
    def inside():
        return sherd.rank(), sherd.world(), sherd.mean(1.0, n=sherd.rank())

    assert sherd.launch(inside, 2) == [(0, 2, 1.0), (1, 2, 1.0)]
