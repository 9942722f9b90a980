"""Metrics over every sample once, under every strategy, in the middle of training and without a trace in it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import sherd
from sherd import CommOptions
from sherd.errors import ChunkFailed, CommError, ConfigError
from sherd.mapreduce.lock_step import LockStep

SAMPLES, BATCH = 53, 4


def dataset(samples=SAMPLES):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))


class Counting:
    """Like a metric of torchmetrics, with a state of every kind."""

    def __init__(self):
        def dim_zero_sum(x):
            return x.sum(0)

        def dim_zero_max(x):
            return x.max(0).values

        def dim_zero_mean(x):
            return x.mean(0)

        def dim_zero_cat(x):
            return torch.cat(x)

        def spread(x):  # a function of the user's own
            return x.max(0).values - x.min(0).values

        self._defaults = {"right": torch.tensor(0), "best": torch.tensor(-math.inf), "mean": torch.tensor(0.0)}
        self._defaults |= {"outputs": [], "parts": torch.tensor(0), "spread": torch.tensor(0.0)}
        self._reductions = {"right": dim_zero_sum, "best": dim_zero_max, "mean": dim_zero_mean}
        self._reductions |= {"outputs": dim_zero_cat, "parts": None, "spread": spread}
        self.sync_on_compute = True
        self.reset()

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, default.clone() if isinstance(default, torch.Tensor) else [])

    def update(self, output, target):
        self.right += (output.argmax(1) == target).sum()
        self.best = torch.maximum(self.best, output.max())
        self.mean += output.mean()  # chunks of one batch: then the mean over updates
        self.outputs.append(output.clone())
        self.parts += len(target)
        self.spread += output.mean()

    def compute(self):
        assert not self.sync_on_compute, "ranks would be counted twice"
        outputs = torch.cat(self.outputs)
        parts, spread = self.parts.tolist(), self.spread.item()
        return {"right": self.right, "best": self.best, "mean": self.mean, "outputs": outputs, "parts": parts}, spread


METRICS = {
    "loss": cross_entropy,
    "accuracy": lambda output, target: output.argmax(1) == target,
    "weighed": lambda output, target: (output.mean(0), len(target)),
}


def plain(model, data, batch=BATCH):
    """The loop that people write, in one process."""
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for start in range(0, len(data), batch):
            x, y = data[start : start + batch]
            output = model(x)
            loss += cross_entropy(output, y).double().item() * len(y)
            right += (output.argmax(1) == y).sum().item()
    model.train()
    return loss / len(data), right / len(data)


@pytest.mark.fake
def test_alone_it_is_the_plain_loop():
    model, data = network(), dataset()
    found = sherd.evaluate(model, DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True), METRICS)
    loss, accuracy = plain(model, data)
    assert found["loss"] == pytest.approx(loss, abs=1e-12) and found["accuracy"] == accuracy
    assert list(found) == list(METRICS) and found["weighed"].shape == (3,)
    assert sherd.evaluate(model, [data[:20], data[20:]], METRICS)["accuracy"] == accuracy, "a list of batches"
    named = DataLoader([{"x": x, "y": y} for x, y in data], batch_size=7)
    found = sherd.evaluate(model, named, METRICS, forward=lambda model, batch: (model(batch["x"]), batch["y"]))
    assert found["accuracy"] == accuracy


@pytest.mark.fake
def test_objects_with_states():
    model, data, metric = network(), dataset(), Counting()
    metric.update(torch.zeros(2, 3), torch.zeros(2))
    found, spread = sherd.evaluate(model, DataLoader(data, batch_size=BATCH), {"all": metric})["all"]
    with torch.no_grad():
        outputs = [model.eval()(x) for x, _ in DataLoader(data, batch_size=BATCH)]
    assert torch.equal(found["outputs"], torch.cat(outputs)) and len(metric.outputs) == 1, "a copy was used"
    assert found["right"] == (torch.cat(outputs).argmax(1) == data[:][1]).sum()
    assert found["best"] == torch.cat(outputs).max() and found["parts"] == [4] * 13 + [1]
    means = torch.stack([output.mean() for output in outputs])
    assert found["mean"] == pytest.approx(means.mean()) and spread == pytest.approx(means.max() - means.min())


def with_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = ("Accuracy", "AUROC", "ConfusionMatrix", "CohenKappa")
    made = {kind: getattr(torchmetrics, kind)("multiclass", num_classes=3) for kind in kinds}
    made["Pearson"], made["Mean"] = torchmetrics.PearsonCorrCoef(num_outputs=3), torchmetrics.MeanMetric()
    collection = torchmetrics.MetricCollection({kind: made[kind] for kind in kinds})
    model, data = network(), dataset()
    functions = {"Pearson": made["Pearson"], "Mean": made["Mean"]}

    def both(model, batch):
        output = model(batch[0])
        return output, output.flip(0)

    loader = DataLoader(data, batch_size=BATCH)
    found = sherd.evaluate(model, loader, collection)
    found |= sherd.evaluate(model, loader, functions, forward=both)
    with torch.no_grad():
        for x, y in loader:
            output = model.eval()(x)
            for kind in kinds:
                made[kind].update(output, y)
            for kind in functions:
                made[kind].update(output, output.flip(0))
    for metric in made.values():
        metric.sync_on_compute, metric._to_sync = False, False
    return found, {kind: metric.compute() for kind, metric in made.items()}


def test_torchmetrics(ranks):
    pytest.importorskip("torchmetrics")
    for found, expected in ranks(2).run(with_torchmetrics):
        assert found.keys() == expected.keys()
        for kind in found:
            torch.testing.assert_close(found[kind], expected[kind], msg=kind)


# ---------------------------------------------------------------- in training, under every strategy


def trained(strategy, transport, evaluates, accumulate=1):
    """Train, and evaluate at every point of a step."""
    sherd.seed(7)
    model, loader = network(), DataLoader(dataset(), batch_size=BATCH, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = sherd.distribute(
        model, optimizer, loader, strategy=strategy, comm=CommOptions(transport=transport), accumulate=accumulate
    )
    model[2].eval()  # the program keeps one module in eval mode
    modes, found = [module.training for module in model.modules()], []
    assert modes == [True, True, True, False, True]

    def look():
        if evaluates:
            found.append(sherd.evaluate(model, loader, METRICS, progress=False))
            assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()

    for x, y in loader:
        loss = cross_entropy(model(x), y)
        look()  # buffers of the ranks differ, and the backward still needs its own
        loss.backward()
        look()
        optimizer.step()
        optimizer.zero_grad()
        samples = sherd.mean(float(len(x)))  # of the batch of training
        assert samples == BATCH
        look()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.rand(2).tolist(), random.random()
    return state, draws, found


def in_training(strategy, transport, accumulate):
    state, draws, _ = trained(strategy, transport, False, accumulate)
    other, more, found = trained(strategy, transport, True, accumulate)
    assert draws == more, "random numbers"
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    model = network()
    model.load_state_dict(other)
    loss, accuracy = plain(model, dataset())
    assert found[-1]["loss"] == pytest.approx(loss, abs=1e-7) and found[-1]["accuracy"] == accuracy
    return [[each["loss"].hex(), each["accuracy"], each["weighed"].tolist()] for each in found]


def every_strategy(cases):
    return [in_training(make(), transport, accumulate) for make, transport, accumulate in cases]


def gathered():
    return sherd.ZeRO(stage=3, share_host_memory=False)


def zero3():
    return "zero3"


def zero2():
    return "zero2"


def ddp():
    return "ddp"


def test_exact_under_every_strategy_and_without_a_trace(ranks):
    cases = [(ddp, "host", 1), (zero2, "host", 1), (zero3, "host", 1), (gathered, "host", 1), (zero3, "c10d", 1)]
    found = ranks(2).run(every_strategy, cases)
    assert found[0] == found[1], "on every rank"
    assert all(each == found[0][0] for each in found[0]), "the same bits under every strategy"
    assert len({each[0] for each in found[0][0]}) > 5, "and the model did change"


def who_is_in_step(strategy):
    """Whether ranks go in lock step, and how many forwards each makes for five batches."""
    model, runs, forwards = sherd.distribute(network(), strategy=strategy()), [], []
    patched = pytest.MonkeyPatch()
    patched.setattr(LockStep, "run", lambda self, run=LockStep.run: (runs.append(1), run(self))[1])
    model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        sherd.evaluate(model, DataLoader(dataset(10), batch_size=2), METRICS, progress=False)
    finally:
        patched.undo()
    return len(runs), len(forwards)


def test_lock_step_is_only_where_forwards_are_collective(ranks):
    assert ranks(2).run(who_is_in_step, gathered) == [(1, 3), (1, 3)]
    found = ranks(2).run(who_is_in_step, zero3)
    assert [runs for runs, _ in found] == [0, 0] and sum(forwards for _, forwards in found) == 5


def test_on_three_ranks_and_in_a_window(ranks):
    found = ranks(3).run(every_strategy, [(zero2, "host", 2), (gathered, "host", 2)])
    assert found[0] == found[1] == found[2]


# ---------------------------------------------------------------- loaders, and ranks without a batch


class Numbered(IterableDataset):
    def __iter__(self):
        return iter(dataset(10))


def many_loaders(strategy):
    """The same metrics by every loader, with more ranks than batches too."""
    data = dataset(10)
    rank, world = sherd.rank(), sherd.world()
    model = network()
    if strategy is not None:
        model = sherd.distribute(model, strategy=strategy())
    stream = sherd.distribute(nn.Linear(1, 1), DataLoader(Numbered(), batch_size=4), iterable="split")[1]
    loaders = {
        "plain": DataLoader(data, batch_size=4),
        "shuffled": DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank)),
        "distributed": DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank)),
        "batches": DataLoader(data, batch_sampler=BatchSampler(range(10), 4, False)),
        "own batches": DataLoader(data, batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        "a stream": DataLoader(Numbered(), batch_size=4),
        "a split stream": stream,
    }
    found = {name: sherd.evaluate(model, loader, METRICS, progress=False) for name, loader in loaders.items()}
    found["large"] = sherd.evaluate(model, DataLoader(data, batch_size=10), METRICS, progress=False)
    return {name: (each["loss"].hex(), each["accuracy"]) for name, each in found.items()}


@pytest.mark.parametrize("strategy", [None, gathered])
def test_every_loader_counts_each_sample_once(ranks, strategy):
    alone = many_loaders(None)
    assert len({loss for name, (loss, _) in alone.items() if name != "large"}) == 1
    assert ranks(2).run(many_loaders, strategy) == [alone] * 2


def with_workers():
    model, data = network(), dataset(10)
    loader = DataLoader(data, batch_size=2, num_workers=1)
    return sherd.evaluate(model, loader, METRICS)["loss"].hex()


def test_loaders_with_workers(ranks):
    model, data = network(), dataset(10)
    alone = sherd.evaluate(model, DataLoader(data, batch_size=2), METRICS)["loss"].hex()
    assert ranks(2).run(with_workers) == [alone] * 2


# ---------------------------------------------------------------- errors


def failing(strategy, where):
    model = sherd.distribute(network(), strategy=strategy())

    def metric(output, target):
        if where == "metric" and sherd.rank() == 1:
            raise ZeroDivisionError("no metric")
        return 1.0

    def collate(items):
        if where == "data" and sherd.rank() == 1:
            raise ZeroDivisionError("no data")
        return tuple(map(torch.stack, zip(*items, strict=True)))

    loader = DataLoader(dataset(40), batch_size=1, collate_fn=collate)
    try:
        sherd.evaluate(model, loader, {"m": metric}, chunk=2)
    except ChunkFailed as error:
        return (
            str(error),
            model.training,
            sherd.evaluate(model, DataLoader(dataset(9), batch_size=2), METRICS)["accuracy"],
        )


@pytest.mark.parametrize("where", ["metric", "data"])
@pytest.mark.parametrize("strategy", [ddp, gathered])
def test_an_error_on_one_rank_is_raised_on_all(ranks, strategy, where):
    accuracy = plain(network(), dataset(9), 2)[1]
    for text, training, after in ranks(2).run(failing, strategy, where):
        assert f"ZeroDivisionError: no {where}" in text and "on rank 1" in text and training
        assert after == accuracy, "and ranks are still in step"


def failing_inside_a_forward():
    """On rank 1 alone, while the others gather its parameters."""
    model = sherd.distribute(network(), strategy=gathered())

    def forward(model, batch):
        if sherd.rank() == 1:
            raise ZeroDivisionError("no forward")
        return model(batch[0]), batch[1]

    try:
        sherd.evaluate(model, DataLoader(dataset(8), batch_size=2), METRICS, forward=forward)
    except (ZeroDivisionError, CommError) as error:
        return type(error).__name__, str(error)


def test_a_forward_that_fails_in_lock_step_hangs_nobody(ranks):
    (kind, text), failed = ranks(2).run(failing_inside_a_forward)
    assert failed == ("ZeroDivisionError", "no forward"), "the rank that failed has its own error"
    assert kind == "Diverged" and "sherd.evaluate, which failed with ZeroDivisionError: no forward" in text


@pytest.mark.fake
@pytest.mark.parametrize(
    ("metrics", "options", "message"),
    [
        (cross_entropy, {}, "got a function as metrics; write a dict of names"),
        ({}, {}, "write at least one"),
        ({"loss": 3}, {}, "metric 'loss' is a int; write a function of output and target"),
        ({"loss": cross_entropy}, {"forward": 3}, "got forward=3"),
        ({"loss": cross_entropy}, {"chunk": 0}, "got chunk=0"),
    ],
)
def test_bad_input(metrics, options, message):
    with pytest.raises(ConfigError, match=message):
        sherd.evaluate(network(), DataLoader(dataset(5)), metrics, **options)


@pytest.mark.fake
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            lambda output, target: output,
            r"returned a tensor of shape \[4, 3\] for a batch of 4 samples; return their mean",
        ),
        (lambda output, target: "good", "metric 'm' returned a str"),
        (lambda output, target: (1.0, -1), "metric 'm' returned the weight -1"),
    ],
)
def test_values_that_are_no_metric(metric, message):
    with pytest.raises(ChunkFailed, match=message):
        sherd.evaluate(network(), DataLoader(dataset(8), batch_size=4), {"m": metric})


@pytest.mark.fake
def test_what_cannot_be_evaluated():
    class Bare:
        update = compute = reset = None

    with pytest.raises(ConfigError, match="a Bare, has no states of its own that could be merged"):
        sherd.evaluate(network(), DataLoader(dataset(5)), {"m": Bare()})
    with pytest.raises(ConfigError, match="without batches"):
        sherd.evaluate(network(), [], METRICS)
    with pytest.raises(ChunkFailed, match=r"a batch is a Tensor.*write forward="):
        sherd.evaluate(network(), DataLoader(torch.randn(3, 6)), METRICS)
    with pytest.raises(ConfigError, match="got a list as model"):
        sherd.evaluate([network()], DataLoader(dataset(5)), METRICS)
