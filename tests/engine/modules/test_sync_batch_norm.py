"""`nn.SyncBatchNorm`: trained on ranks it is what `nn.BatchNorm` is in one process on everybody's batches together."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import sherd
from sherd import ConfigError, Diverged
from tests.helpers.training import EVERYWHERE, STRATEGIES, all_same, close, connected, differ, same, sgd

STEPS = 3
CHANNELS = 7
KINDS = {  # the layer before, its norm, and the rest of an input's shape
    "rows": (nn.Linear(5, CHANNELS), nn.BatchNorm1d, (5,)),
    "1d": (nn.Conv1d(5, CHANNELS, 3), nn.BatchNorm1d, (5, 6)),
    "2d": (nn.Conv2d(5, CHANNELS, 3), nn.BatchNorm2d, (5, 6, 4)),
    "3d": (nn.Conv3d(5, CHANNELS, 2), nn.BatchNorm3d, (5, 3, 4, 2)),
}


class Net(nn.Module):
    """A layer, its norm, and a norm of everything at the end; `how` to checkpoint the first two."""

    def __init__(self, kind, how=None, **options):
        super().__init__()
        torch.manual_seed(0)
        first, norm, _ = KINDS[kind]
        self.body = nn.Sequential(copy.deepcopy(first), norm(CHANNELS, **options), nn.Tanh())
        self.head, self.last = nn.Linear(CHANNELS, 3), nn.BatchNorm1d(3, **options)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, mean=float(name.endswith("1.weight")), std=0.5)
        self.how = how

    def forward(self, x):
        x = self.body(x) if self.how is None else checkpoint(self.body, x, use_reentrant=self.how == "reentrant")
        return self.last(self.head(x.flatten(2).mean(2) if x.dim() > 2 else x))


NOISE = ("body.0.bias", "head.bias")
"""A norm takes away what they add, so their gradients are nothing but rounding."""


def build(kind="rows", dtype=torch.float64, **options):
    return Net(kind, **options).to(dtype)


def synced(c, model, strategy="zero2", optimizer=sgd, **options):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return sherd.distribute(model, optimizer(model), strategy=strategy, comm=c, **options)


def batch(rank, step=0, rows=3, kind="rows", dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = KINDS[kind][2]
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64) * (1 + rank) + rank
    y = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    # Checkpointing by the reentrant way asks for an input that requires gradients.
    return x.to(dtype).requires_grad_(), y.to(dtype)


def errors(model, data):
    """The loss of each row."""
    return (model(data[0]) - data[1]).square().mean(1)


def together(batches):
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))


def in_one_process(model, world, steps=STEPS, accumulate=1, rows=None, weighed=False, kind="rows"):
    """Train on everybody's batches together; each rank's loss is the mean over its rows, unless weighed."""
    optimizer, losses = sgd(model), []
    for step in range(steps):
        sizes = [3] * world if rows is None else rows(step)
        found = errors(model, together([batch(r, step, sizes[r], kind) for r in range(world)]))
        loss = found.mean() if weighed else torch.stack([each.mean() for each in found.split(sizes)]).mean()
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def on_ranks(c, model, optimizer, steps=STEPS, rows=None, weighed=False, kind="rows"):
    """The same on this rank; losses are the mean over the ranks."""
    losses = []
    for step in range(steps):
        size = 3 if rows is None else rows(step)[c.rank]
        found = errors(model, batch(c.rank, step, size, kind))
        if weighed:
            sherd.weigh(model, size)
        loss = found.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if weighed:
            total = c.all_reduce(torch.stack([found.sum().detach(), torch.tensor(size).double()])).wait()
            losses.append((total[0] / total[1]).item())
        else:
            losses.append(c.all_reduce(loss.detach()[None], op="mean").wait().item())
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check(found, expected, what=""):
    losses, state = found
    assert losses == pytest.approx(expected[0], rel=1e-9), what
    close(state, expected[1], what)


def parity(transport, kind):
    with connected(transport) as c:
        expected = in_one_process(build(kind), c.world, kind=kind)
        states = {}
        for strategy in STRATEGIES:
            found = on_ranks(c, *synced(c, build(kind), strategy), kind=kind)
            check(found, expected, strategy)
            states[strategy] = found[1]
        all_same(states)
        return states["ddp"]


@pytest.mark.parametrize(("transport", "world"), [("host", 2), ("host", 3), ("c10d", 2), ("c10d", 3)])
def test_ranks_train_what_one_process_trains(ranks, transport, world):
    for kind in KINDS if transport == "host" else ("2d",):
        first, *others = ranks(world).run(parity, transport, kind)
        for other in others:
            same(other, first)


def test_transports_train_the_same_bits(ranks):
    host, c10d = (ranks(3).run(parity, transport, "rows")[0] for transport in ("host", "c10d"))
    same(host, c10d)


def without_synchronisation():
    with connected() as c:
        model = build()
        _, optimizer = sherd.distribute(model, sgd(model), comm=c)
        assert differ(on_ranks(c, model, optimizer)[1], in_one_process(build(), c.world)[1])


def test_plain_batch_norm_trains_something_else(ranks):
    ranks(2).run(without_synchronisation)


OPTIONS = ({"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3})


def with_options():
    with connected() as c:
        for options in OPTIONS:
            for kind in ("rows", "2d"):
                expected = in_one_process(build(kind, **options), c.world, kind=kind)
                check(on_ranks(c, *synced(c, build(kind, **options)), kind=kind), expected, options)


@pytest.mark.parametrize("world", [2, 3])
def test_options_of_the_module(ranks, world):
    ranks(world).run(with_options)


def uneven_batches(weighed):
    with connected() as c:

        def rows(step):
            # A batch may be empty where rows are weighed; otherwise the mean over no rows is none.
            sizes = ((1, 4, 2), (5, 1, 3), (2, 2, 0))[step][: c.world]
            return [size if weighed else size + 1 for size in sizes]

        expected = in_one_process(build(), c.world, rows=rows, weighed=weighed)
        states = {}
        for strategy in STRATEGIES:
            found = on_ranks(c, *synced(c, build(), strategy), rows=rows, weighed=weighed)
            check(found, expected, strategy)
            states[strategy] = found[1]
        all_same(states)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_and_empty_batches(ranks, world, weighed):
    ranks(world).run(uneven_batches, weighed)


def empty_images():
    """An empty batch of a rank leaves the statistics to the others."""
    with connected() as c:
        model, _ = synced(c, build("2d"))
        plain = build("2d")
        data = batch(1, kind="2d")
        expected = errors(plain, data)
        expected.sum().backward()
        x, y = data if c.rank == 1 else batch(0, rows=0, kind="2d")
        found = errors(model, (x.detach().requires_grad_(), y))
        found.sum().backward()
        assert found.shape == (len(x),)
        expected = {name: gradient for name, gradient in grads(plain).items() if name not in NOISE}
        close({name: model.get_parameter(name).grad * c.world for name in expected}, expected)
        close(dict(model.named_buffers()), dict(plain.named_buffers()))


def weightless():
    """A backward of weight 0 counts nothing, even if it is NaN; its rows are in the statistics all the same."""
    with connected() as c:
        for strategy in STRATEGIES:
            model, _ = synced(c, build(), strategy)
            plain = build()
            losses = errors(plain, (torch.cat([batch(0)[0], batch(1)[0].detach()]), torch.cat([batch(0)[1]] * 2)))
            losses[:3].mean().backward()
            sherd.weigh(model, 1 - c.rank)
            (errors(model, batch(c.rank)).mean() * (float("nan") if c.rank else 1.0)).backward()
            for name in ("head.weight", "last.weight", "last.bias"):
                found = model.get_parameter(name).grad
                assert found.isfinite().all(), (strategy, name)
            # Nothing of rank 1 comes before the last norm's own parameters.
            for name in ("last.weight", "last.bias"):
                close({name: model.get_parameter(name).grad}, {name: plain.get_parameter(name).grad}, strategy)


def test_a_backward_of_weight_0(ranks):
    ranks(2).run(weightless)


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def test_an_empty_batch_of_images(ranks):
    ranks(2).run(empty_images)


def accumulated(how):
    with connected() as c:
        expected = in_one_process(build(how=how), c.world, steps=6, accumulate=3)
        found = {}
        for strategy, at in EVERYWHERE:
            model, optimizer = synced(c, build(how=how), strategy, accumulate=3, accumulate_at=at)
            found[strategy, at] = on_ranks(c, model, optimizer, steps=6)
            check(found[strategy, at], expected, (strategy, at))
        for at in ("rank", "owner"):
            all_same({strategy: found[strategy, at][1] for strategy in STRATEGIES})


@pytest.mark.parametrize("how", [None, "reentrant", "not reentrant"])
def test_accumulation_and_checkpointing(ranks, how):
    ranks(2).run(accumulated, how)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing_on_3_ranks_and_small_buckets(ranks, how):
    ranks(3).run(checkpointed, how)


def checkpointed(how):
    with connected() as c:
        expected = in_one_process(build("2d", how=how), c.world, kind="2d")
        for strategy in STRATEGIES:
            check(on_ranks(c, *synced(c, build("2d", how=how), strategy, bucket_bytes=1024), kind="2d"), expected)


# -------------------------------------------------------------------- dtypes


def gradients_of(model, data):
    errors(model, data).mean().backward()
    return {"input": data[0].grad, **grads(model)}


def lower_precision(dtype, rtol):
    """Inputs far from zero, where squares minus squared means would be nothing but noise."""
    with connected() as c:
        for kind in ("rows", "2d"):
            norm = KINDS[kind][1]
            data = [batch(r, rows=8, kind=kind)[0].detach() + 100 for r in range(c.world)]
            plain = norm(5).double()
            whole = torch.cat(data).to(dtype).double().requires_grad_()
            (plain(whole).tanh() * whole.detach().sin()).sum().backward()
            model = synced(c, nn.Sequential(norm(5)).to(dtype))[0]
            x = data[c.rank].to(dtype).requires_grad_()
            output = model(x)
            assert output.dtype == dtype
            (output.tanh() * x.detach().sin()).sum().backward()
            expected = whole.grad.chunk(c.world)[c.rank]
            assert x.grad.dtype == dtype
            close({"x": x.grad.double()}, {"x": expected}, (kind, dtype), rtol)
            found = {"mean": model[0].running_mean.double(), "var": model[0].running_var.double()}
            close(found, {"mean": plain.running_mean, "var": plain.running_var}, (kind, dtype), rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
def test_lower_precision(ranks, dtype, rtol):
    ranks(2).run(lower_precision, dtype, rtol)


def mixed():
    """bf16 activations and fp32 parameters, as under autocast."""
    with connected() as c:
        model, _ = synced(c, nn.Sequential(nn.BatchNorm2d(5)))
        x = batch(c.rank, kind="2d")[0].detach().bfloat16().requires_grad_()
        output = model(x)
        output.square().sum().backward()
        assert output.dtype == x.grad.dtype == torch.bfloat16
        assert model[0].weight.grad.dtype == model[0].running_mean.dtype == torch.float32
        everybody = c.all_gather(output.detach()).wait().float()
        assert everybody.mean((0, 2, 3)).abs().max() < 1e-2
        assert (everybody.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-2
        last = x.detach().to(memory_format=torch.channels_last)
        assert model(last).is_contiguous(memory_format=torch.channels_last)


def test_parameters_in_fp32_and_inputs_in_bf16(ranks):
    ranks(2).run(mixed)


# -------------------------------------------------------------------- what is exchanged


def exchanged():
    with connected() as c:
        model, _ = synced(c, nn.Sequential(nn.Linear(5, CHANNELS), nn.BatchNorm1d(CHANNELS)))
        x = torch.randn(3, 5)
        others = c.world - 1
        c.counters.reset()
        loss = model(x).square().mean()
        assert c.counters.total().payload == 8 * (2 * CHANNELS + 1) * others
        assert c.counters.total().calls == 1
        c.counters.reset()
        torch.autograd.grad(loss, model[0].weight)
        assert c.counters.total().payload == 8 * 2 * CHANNELS * others
        model.eval()
        c.counters.reset()
        if c.rank == 0:  # alone
            model(x)
            assert c.counters.total().calls == 0
            bare = nn.SyncBatchNorm(CHANNELS)
            bare.load_state_dict(model[1].state_dict())
            assert torch.equal(model[1](torch.ones(2, CHANNELS)), bare.eval()(torch.ones(2, CHANNELS)))
        assert model.state_dict().keys() == nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).state_dict().keys()


def test_one_exchange_forward_one_backward_and_none_in_eval_mode(ranks):
    ranks(3).run(exchanged)


def different_ways():
    with connected(timeout=20) as c:
        model, _ = synced(c, build())
        with pytest.raises(Diverged) as caught:
            if c.rank:
                model(batch(c.rank)[0])
            else:
                model.last(torch.ones(2, 3).double())
            c.barrier().wait()
    return str(caught.value)


def test_ranks_that_go_different_ways_are_told_both(ranks):
    for text in ranks(2).run(different_ways):
        for word in ("rank 0", "rank 1", "batch norm of 'last'", "batch norm of 'body.1'"):
            assert word in text, text


def refused():
    with connected() as c:
        model, _ = synced(c, build())
        with pytest.raises(ConfigError, match=r"batch norm of 'last' takes inputs of 3 channels, found \(2, 4\)"):
            model.last(torch.ones(2, 4).double())
        with pytest.raises(ConfigError, match=r"batch norm of 'last' needs more than one value .* found 1"):
            model.last(torch.ones(int(c.rank == 0), 3).double())
        x = batch(c.rank)[0]
        inner = torch.autograd.grad(errors(model, batch(c.rank)).mean(), model.body[0].weight, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            inner[0].square().sum().backward()
        assert model(x).shape == (3, 3)


def test_what_cannot_be_right_is_refused(ranks):
    ranks(2).run(refused)


# -------------------------------------------------------------------- which modules


class Own(nn.SyncBatchNorm):
    pass


def copies():
    with connected() as c:
        model, optimizer = synced(c, build())
        on_ranks(c, model, optimizer, steps=1)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        twin, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (unpickled, torch.load(file, weights_only=False)):
            assert type(other.last) is type(other.body[1]) is nn.SyncBatchNorm
            same(other.state_dict(), before)
            assert torch.equal(other.eval()(batch(0)[0]), copy.deepcopy(model).eval()(batch(0)[0]))
        assert isinstance(twin.last, nn.SyncBatchNorm)
        if c.rank == 0:  # alone, as a plain batch norm
            plain = build()
            plain.load_state_dict(before)
            for each in (twin, plain):
                optimizer_of_its_own = sgd(each)
                errors(each, batch(0)).mean().backward()
                optimizer_of_its_own.step()
            same(twin.state_dict(), plain.state_dict())
        same(model.state_dict(), before)
        expected = in_one_process(build(), c.world)
        for again in (copy.deepcopy(build_synced()), copy.deepcopy(synced(c, build())[0])):
            check(on_ranks(c, *synced(c, again)), expected)  # copies can be distributed again


def build_synced():
    return nn.SyncBatchNorm.convert_sync_batchnorm(build())


def test_copies_are_by_themselves_and_pickles_are_plain(ranks):
    ranks(2).run(copies)


def left_alone():
    with connected() as c:
        model = nn.Sequential(
            Own(3), nn.SyncBatchNorm(3, process_group=object()), nn.BatchNorm1d(3), nn.SyncBatchNorm(3)
        )
        sherd.distribute(model, comm=c)
        assert [type(module) for module in model[:3]] == [Own, nn.SyncBatchNorm, nn.BatchNorm1d]
        assert type(model[3]) is not nn.SyncBatchNorm


def test_other_modules_are_left_alone(ranks):
    ranks(2).run(left_alone)


@pytest.mark.fake
def test_a_world_of_one_leaves_the_module_alone():
    model = build_synced()
    sherd.distribute(model, optimizer := sgd(model))
    assert type(model.last) is nn.SyncBatchNorm
    plain = build()
    for each, stepper in ((model, optimizer), (plain, sgd(plain))):
        errors(each, batch(0)).mean().backward()
        stepper.step()
    same(model.state_dict(), plain.state_dict())


def outlived():
    with connected() as c:
        model, optimizer = synced(c, build())
        last = model.last
        del model, optimizer
        gc.collect()
        if c.rank == 0:
            plain = nn.BatchNorm1d(3).double()
            plain.load_state_dict(last.state_dict())
            x = batch(0)[1]
            assert torch.equal(last(x), plain(x))


def test_a_module_that_outlives_its_model_is_by_itself(ranks):
    ranks(2).run(outlived)


def uneven_end(strategy):
    """Two samples are left for three ranks, so that one of them repeats a sample."""
    with connected() as c:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(dealt_network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(dealt_samples(), 1)
        options = {"strategy": strategy, "comm": c, "global_batch": 6}
        return dealt_training(*sherd.distribute(model, optimizer, loader, **options))


def dealt_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()


def dealt_samples():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(14, n, generator=generator, dtype=torch.float64) for n in (5, 3)))


def dealt_training(model, optimizer, loader):
    for _ in range(2):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.double() for name, value in model.state_dict().items() if "tracked" not in name}


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_sample_that_is_only_repeated_is_no_part_of_the_statistics(ranks, strategy):
    model = dealt_network()
    expected = dealt_training(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dealt_samples(), 6))
    for found in ranks(3).run(uneven_end, strategy):
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 1e-9 * value.abs().max(), name
