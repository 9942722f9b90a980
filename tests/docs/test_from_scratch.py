"""The scripts that teach DDP and ZeRO do what the engine does, to the last bit where the arithmetic is the same."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sherd
from sherd import CommOptions, comm
from tests.helpers.training import connected

FOLDER = Path(__file__).parents[2] / "examples" / "from_scratch"
sys.path.append(str(FOLDER))  # the scripts import each other as scripts do

import async_update  # noqa: E402
import ddp  # noqa: E402
import ddp_and_zero  # noqa: E402
import shard_matrix  # noqa: E402
import zero  # noqa: E402
from problem import batch, distance, loss_of, network, weights  # noqa: E402

pytestmark = pytest.mark.pure

STEPS = 5
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "problem")


def by_the_engine(ranks, strategy):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=ranks)
    for step in range(STEPS):
        loss_of(model, step, ranks.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def by_one_process(world):
    """On the batches of all ranks together."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = (torch.cat(part) for part in zip(*(batch(step, rank) for rank in range(world)), strict=True))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def data_parallel():
    with connected() as ranks:
        found, expected = weights(ddp.train(ranks, STEPS)[0]), by_the_engine(ranks, "ddp")
        alone, _ = ddp.train(ranks, STEPS, average=False)
        return torch.equal(found, expected), ddp.apart(ranks, alone) > 1e-3, found


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_has_the_bits_of_the_engine(ranks, world):
    results = ranks(world).run(data_parallel)
    assert [result[:2] for result in results] == [(True, True)] * world
    assert distance(results[0][2], by_one_process(world)) < 1e-4


def stages():
    with connected() as ranks:
        found = {stage: zero.train(ranks, stage, STEPS) for stage in (1, 2, 3)}
        same = [torch.equal(weights(found[stage][0]), by_the_engine(ranks, f"zero{stage}")) for stage in found]
        same.append(torch.equal(weights(found[1][0]), weights(ddp.train(ranks, STEPS)[0])))
        return same, {stage: held for stage, (_, held) in found.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_every_stage_of_zero_has_the_bits_of_the_engine_and_holds_less(ranks, world):
    slices = 4 * sum(-(-parameter.numel() // world) for parameter in network().parameters())
    whole = world * slices
    expected = {1: [whole, whole, 2 * slices], 2: [whole, slices, 2 * slices], 3: [slices, slices, 2 * slices]}
    for same, held in ranks(world).run(stages):
        assert same == [True] * 4
        assert held == expected


def groups():
    """Every size of group, beside the engine with sums that are taken in such groups."""
    found = {}
    with connected() as ranks:
        for size in (1, 2, 4):
            model, held = ddp_and_zero.train(ranks, size, STEPS)
            found[size] = weights(model), held
    same = []
    for size, options in ((2, {"shard_over": 2}), (4, {})):
        with comm.connect(CommOptions(transport="host", group=size, timeout=40)) as ranks:
            same.append(torch.equal(found[size][0], by_the_engine(ranks, sherd.ZeRO(stage=2, **options))))
    return same, [held for _, held in found.values()], distance(found[2][0], found[1][0])


def test_ddp_and_zero_together_have_the_bits_of_the_engine(ranks):
    elements = weights(network()).numel()
    for same, held, difference in ranks(4).run(groups):
        assert same == [True, True]
        assert held == [12 * elements // size for size in (1, 2, 4)]
        assert difference < 1e-5


@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9), st.sampled_from([0, 1]))
def test_shards_put_together_are_the_matrix(length, width, parts, dim):
    matrix = torch.arange(length * width).view(length, width).movedim(0, dim)
    shards = [shard_matrix.shard(matrix, part, parts, dim) for part in range(parts)]
    assert torch.equal(torch.cat(shards, dim), matrix)
    sizes = [shard.shape[dim] for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def products(seed):
    generator = torch.Generator().manual_seed(seed)
    errors, lost = [], []
    with connected() as ranks:
        for _ in range(12):
            n, k, m = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(3))  # often fewer than ranks
            x, a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((n, k), (k, m), (m, n)))
            place = ranks.rank, ranks.world
            rows, columns = (shard_matrix.shard(a, *place, dim) for dim in (0, 1))
            lost += [
                not torch.equal(shard_matrix.gather(ranks, shard, a.shape[dim], dim), a)
                for dim, shard in enumerate((rows, columns))
            ]
            two = shard_matrix.two_layers(ranks, x, columns, shard_matrix.shard(b, *place, 0))
            errors += [
                distance(shard_matrix.times_columns(ranks, x, columns, m), x @ a),
                distance(shard_matrix.times_rows(ranks, x, rows), x @ a),
                distance(two, (x @ a).relu() @ b),
            ]
    return any(lost), max(errors)


@pytest.mark.parametrize("world", [2, 3])
def test_products_with_shards_are_the_whole_product(ranks, world):
    for lost, error in ranks(world).run(products, world):
        assert not lost
        assert error < 1e-12


def asynchronous(steps):
    with connected() as ranks:
        if ranks.rank:
            async_update.work(ranks, steps)
            return None
        return async_update.serve(ranks, steps, lr=0.01)


def test_one_asynchronous_worker_is_never_late(ranks):
    found, staleness = ranks(2).run(asynchronous, 300)[0]
    assert staleness == {0: 300}
    assert torch.equal(found, async_update.delayed(0, 300, lr=0.01))


def test_asynchronous_workers_converge_though_gradients_are_late(ranks):
    found, staleness = ranks(3).run(asynchronous, 400)[0]
    assert sum(staleness.values()) == 800
    assert sum(late > 0 for late in staleness) > 0, "two workers, and no gradient was late"
    assert distance(found, async_update.TRUTH) < 0.1


def test_what_staleness_does_to_learning():
    errors = [distance(async_update.delayed(late, 400, lr=0.01), async_update.TRUTH) for late in (0, 4, 64)]
    assert max(errors[:2]) < 0.1
    assert errors[2] > 1


def printed_by(script):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_runs_alone_and_on_two_ranks(ranks, script):
    assert len((FOLDER / f"{script}.py").read_text().splitlines()) <= 80
    assert printed_by(script)
    first, second = ranks(2).run(printed_by, script)
    assert first
    assert not second


def test_the_page_lists_every_script():
    page = (FOLDER / "README.md").read_text()
    assert all(f"[`{script}.py`]" in page and f"from_scratch/{script}.py\n" in page for script in SCRIPTS)
