"""Figures of all ranks: every sample counts once."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import sherd
from sherd import ConfigError
from sherd.testing import run_ranks
from tests.helpers.loaders import Numbers
from tests.helpers.training import network, sgd

pytestmark = pytest.mark.pure


def model_and(loader):
    model = network()
    return sherd.distribute(model, sgd(model), loader, strategy="ddp")[2]


def figures(count, size):
    """Means and gathered rows of every batch, and after the loop."""
    loader = model_and(DataLoader(Numbers(count), size))
    found = []
    for rows in loader:
        x = rows.double()
        right = (rows % 3 == 0).double().mean()
        found.append((sherd.mean(x.mean()).item(), sherd.mean(right.item()), sherd.gather(rows).tolist()))
    kept = torch.cat(list(loader))
    last = sherd.mean(1.0, n=len(kept))
    return found, sorted(sherd.gather(kept).tolist()), last


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_counts_once(ranks, world):
    for count in (5, 7, 13):
        by_rank = ranks(world).run(figures, count, 6 // world)
        assert all(each == by_rank[0] for each in by_rank)
        found, after, last = by_rank[0]
        rows = list(range(count))
        expected = [rows[start : start + 6] for start in range(0, count, 6)]
        assert [gathered for *_, gathered in found] == expected
        assert after == rows and last == 1.0
        for (mean, right, _), batch_rows in zip(found, expected, strict=True):
            assert math.isclose(mean, sum(batch_rows) / len(batch_rows), rel_tol=1e-12)
            assert math.isclose(right, sum(row % 3 == 0 for row in batch_rows) / len(batch_rows), rel_tol=1e-12)


def means():
    r = sherd.rank()
    found = [
        sherd.mean(float(r), n=1 + r),
        sherd.mean(math.nan if r else 7.0, n=0 if r else 3),
        sherd.mean(torch.tensor([r, 1.0]), n=torch.tensor(2)).tolist(),
        sherd.mean(torch.tensor(r + 1), n=1),
        sherd.mean(numpy.float32(0.5), n=numpy.int64(3)),
        sherd.mean(torch.full((2,), math.nan), n=0).isnan().tolist(),
        sherd.mean(10**20 + r, n=1),
        sherd.mean(1e308, n=1e300),
        sherd.mean(-math.inf if r else math.inf, n=1),
        sherd.mean(torch.tensor([math.inf, 1e308]), n=3).tolist(),
        sherd.mean("nothing" if r else torch.tensor([2.0, 4.0]), n=1 - r).tolist(),
        sherd.mean(torch.ones(5) if r else 3.0, n=1 - r),
    ]
    assert math.isnan(found.pop(8)) and found[-1] == 3.0
    assert isinstance(found.pop(), torch.Tensor if r else float)
    assert sherd.mean(torch.ones(1), n=1).dtype == torch.float32 and found[3].dtype == torch.float64
    return [*found[:3], found[3].item(), *found[4:]]


def test_means_are_weighted(ranks):
    assert (
        ranks(2).run(means)
        == [[2 / 3, 7.0, [0.5, 1.0], 1.5, 0.5, [True, True], 1e20, 1e308, [math.inf, math.inf], [2.0, 4.0]]] * 2
    )


def refused_means():
    r, words = sherd.rank(), []
    for value, n in (
        (1.0, -1 if r else 1),
        ("a" if r else 1.0, 1),
        (torch.ones(1 + r), 1),
        (1.0, math.nan if r else 1),
        (10**400 if r else 1, 1),
    ):
        with pytest.raises(ConfigError) as caught:
            sherd.mean(value, n=n)
        words.append(str(caught.value))
    for mine in (torch.ones(1, 2 + r), torch.ones(2) if r else 1.0, (torch.ones(1),) * (1 + r)):
        with pytest.raises(ConfigError) as caught:
            sherd.gather(mine)
        words.append(str(caught.value))
    return words, sherd.gather(1)


def test_what_one_rank_refuses_all_do(ranks):
    for words, after in ranks(2).run(refused_means):
        assert after == [1, 1]
        assert "rank 1: sherd.mean got n=-1" in words[0] and "rank 1: sherd.mean got a str" in words[1]
        assert "shape (1,) on rank 0 and (2,) on rank 1" in words[2] and "n=nan" in words[3]
        assert "rank 1: sherd.mean int too large" in words.pop(4)
        assert "float32[*, 2] on rank 0 and float32[*, 3] on rank 1" in words[4]
        assert "no rows on rank 0 and float32[*] on rank 1" in words[5]
        assert "tuple(float32[*]) on rank 0 and tuple(float32[*], float32[*]) on rank 1" in words[6]


def without_a_loader():
    with pytest.raises(ConfigError, match=r"there is no current batch.*write sherd\.mean\(value, n="):
        sherd.mean(1.0)


@pytest.mark.ranks
def test_without_a_loader_n_has_to_be_said():
    run_ranks(without_a_loader, 1)


def gathered():
    r = sherd.rank()
    nested = sherd.gather({"x": torch.full((1 + r, 2), r), "pair": (torch.tensor([r]), [torch.tensor([True])])})
    return (
        nested["x"].tolist(),
        nested["pair"][0].tolist(),
        nested["pair"][1][0].tolist(),
        sherd.gather(torch.tensor(r)),
    )


def test_tensors_are_put_together_and_other_things_listed(ranks):
    for rows, numbers, truths, scalars in ranks(2).run(gathered):
        assert rows == [[0, 0], [1, 1], [1, 1]] and numbers == [0, 1] and truths == [True, True]
        assert [each.item() for each in scalars] == [0, 1]


def per_rank_figures_at_an_uneven_end():
    loader = model_and(DataLoader(Numbers(3), 1))
    found = []
    for rows in loader:
        found.append(len(sherd.gather((rows, torch.zeros(3)))[1]))  # as long as nothing that the loader gave
        found.append(len(sherd.gather(torch.zeros(len(rows)), rows=False)))
    return found, sherd.gather(torch.zeros(1)).shape[0]


def test_rows_that_are_not_of_the_batch_are_all_kept(ranks):
    assert ranks(2).run(per_rank_figures_at_an_uneven_end) == [([6, 2, 6, 2], 2)] * 2


def by_its_own_sampler():
    data = Numbers(6)
    loader = model_and(
        DataLoader(data, 2, sampler=DistributedSampler(data, sherd.world(), sherd.rank(), shuffle=False))
    )
    return [sherd.mean(float(rows.sum()) / len(rows)) for rows in loader]


def evaluated_in_the_middle():
    """An evaluation inside a training loop: rows of all its batches, and then those of the training batch again."""
    model, evaluated = network(), DataLoader(Numbers(5), 2)
    *_, loader, evaluated = sherd.distribute(model, sgd(model), DataLoader(Numbers(7), 1), evaluated, strategy="ddp")
    found = []
    for rows in loader:
        kept = torch.cat(list(evaluated))
        everything = sherd.gather(kept, loader=evaluated).tolist()
        found.append((sorted(everything), sherd.mean(float(rows.item()))))
        for _ in evaluated:
            break
        assert sherd.mean(1.0 if len(rows) else 2.0) == 1.0
    return found, sherd.gather(rows).tolist()


def test_an_evaluation_inside_a_training_loop(ranks):
    for found, _ in ranks(3).run(evaluated_in_the_middle):
        assert found == [(list(range(5)), 1.0), (list(range(5)), 4.0), (list(range(5)), 6.0)]


def test_a_distributed_sampler_is_counted_too(ranks):
    assert ranks(2).run(by_its_own_sampler) == [[1.5, 4.5]] * 2
