"""`sync_buffers=`: buffers that changed are made equal at every real step, others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd import ConfigError, Diverged
from tests.helpers.training import (
    STRATEGIES,
    all_same,
    batch,
    connected,
    distributed,
    loss_of,
    network,
    same,
    sgd,
    train,
)

STEPS = 3


def normed(dtype=torch.float32):
    """A network with running statistics in it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 5)).to(dtype)


def buffers(model):
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def everybodys(c, found):
    """Every rank's buffers, by name."""
    return {name: list(c.all_gather(buffer[None]).wait()) for name, buffer in found.items()}


def backward(c, model, step=0):
    loss_of(model, batch(c.rank, step)).backward()


def expected_of(values, how, rank):
    """What a buffer becomes."""
    if how == "none":
        return values[rank]
    if how == "leader" or not values[0].is_floating_point():
        return values[0]
    return torch.stack(values).double().mean(0).to(values[0].dtype)


def stepped(transport, how):
    found = {}
    with connected(transport) as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, normed, sync_buffers=how)
            for step in range(STEPS):
                backward(c, model, step)
                before = everybodys(c, buffers(model))
                means = before["1.running_mean"]
                assert not torch.equal(means[0], means[1])  # or there is nothing to see
                optimizer.step()
                optimizer.zero_grad()
                same(buffers(model), {name: expected_of(all_, how, c.rank) for name, all_ in before.items()}, strategy)
                assert model[1].num_batches_tracked == step + 1
            found[strategy] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        all_same(found)
    return found["ddp"]


@pytest.mark.parametrize("how", ["mean", "leader", "none"])
@pytest.mark.parametrize(("transport", "world"), [("host", 2), ("c10d", 2), ("host", 3)])
def test_buffers_become_the_mean_or_the_leaders_or_stay(ranks, transport, world, how):
    first, *others = ranks(world).run(stepped, transport, how)
    for other in others:
        if how == "none":
            assert not torch.equal(other["1.running_mean"], first["1.running_mean"])
        else:
            same(other, first)


def windows():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, normed, accumulate=2)
            for step in range(4):
                train(model, optimizer, [batch(c.rank, step)])
                means = everybodys(c, buffers(model))["1.running_mean"]
                assert torch.equal(*means) == (step % 2 == 1), (strategy, step)


def test_inside_a_window_buffers_are_each_ranks_own(ranks):
    ranks(2).run(windows)


def skipped(nonfinite):
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, normed, nonfinite=nonfinite)
            weight = model[0].weight.detach().clone()
            x, y = batch(c.rank)
            loss = loss_of(model, (x, y)) * (float("nan") if c.rank else 1.0)
            loss.backward()
            if nonfinite == "raise":
                with pytest.raises(sherd.SherdError, match="not finite"):
                    optimizer.step()
            else:
                optimizer.step()
            assert torch.equal(model[0].weight, weight)
            assert torch.equal(*everybodys(c, buffers(model))["1.running_mean"])


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_is_skipped_makes_buffers_equal_too(ranks, nonfinite):
    ranks(2).run(skipped, nonfinite)


# -------------------------------------------------------------------- which buffers


class Holder(nn.Module):
    """A network with further buffers."""

    def __init__(self, **buffers):
        super().__init__()
        self.net = network()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.net(x)


def held(c, strategy="zero2", model=None, **named):
    made = Holder(**named) if model is None else model
    sherd.distribute(made, optimizer := sgd(made), strategy=strategy, comm=c)
    return made, optimizer


def payload(c, model, optimizer, step=0):
    """Payload bytes of one step."""
    backward(c, model, step)
    c.counters.reset()
    optimizer.step()
    sent = c.counters.total().payload
    optimizer.zero_grad()
    return sent


def kinds(rank):
    """A buffer of every kind, with other values on every rank."""
    return {
        "short": torch.full((3,), 1.0 + rank, dtype=torch.bfloat16),
        "matrix": torch.full((2, 3), 1.0 + rank),
        "long": torch.full((), 1.0 + rank, dtype=torch.float64),
        "column": torch.full((3, 2), 1.0 + rank).T,
        "count": torch.tensor(7 + rank),
        "mask": torch.tensor([rank == 0, True]),
        "phase": torch.full((2,), 1j + rank),
        "empty": torch.zeros(0),
    }


def changed_by_one_rank():
    """Only rank 1 changes its buffers: what the others have takes part all the same."""
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = held(c, strategy, **kinds(0))
            backward(c, model)
            if c.rank == 1:
                for name, value in kinds(1).items():
                    getattr(model, name).copy_(value)
            optimizer.step()
            values = {name: [kinds(int(r == 1))[name] for r in range(c.world)] for name in kinds(0)}
            same(buffers(model), {name: expected_of(all_, "mean", c.rank) for name, all_ in values.items()}, strategy)


@pytest.mark.parametrize("world", [2, 3])
def test_what_one_rank_changed_is_made_equal_everywhere(ranks, world):
    ranks(world).run(changed_by_one_rank)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.left, self.right = network(), nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.number = 0

    def forward(self, x):
        return (self.left, self.right)[self.number](self.net(x))


def branches():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = held(c, strategy, Branches())
            model.number = c.rank
            train(model, optimizer, [batch(c.rank)])
            for name, values in everybodys(c, buffers(model)).items():
                assert torch.equal(*values), (strategy, name)
            assert model.left.num_batches_tracked == 1 and model.right.num_batches_tracked == 0  # rank 0's
            for branch in (model.left, model.right):
                assert branch.running_mean.abs().min() > 0


def test_ranks_that_took_different_branches(ranks):
    ranks(2).run(branches)


def constants():
    table, mask = torch.randn(11, 4), torch.ones(9, 9, dtype=torch.bool)
    with connected() as c:
        plain = payload(c, *held(c))
        model, optimizer = held(c, table=table, mask=mask, frequencies=torch.randn(5))
        assert payload(c, model, optimizer) == plain
        model.table.add_(c.rank)
        others = c.world - 1
        sent = payload(c, model, optimizer)
        # One of at most 32 KB is one exchange of whole contributions; sums are taken in fp64.
        assert sent == plain + 8 * table.numel() * others
        assert payload(c, model, optimizer) == plain
        normal = held(c, model=nn.Sequential(network(), nn.BatchNorm1d(5)))
        with_statistics = payload(c, *normal)
        normal[0].eval()
        assert payload(c, *normal) < with_statistics  # nothing but gradients


def test_buffers_that_do_not_change_are_not_sent(ranks):
    ranks(2).run(constants)


class Twice(Holder):
    """The same buffer at two places."""

    def __init__(self):
        super().__init__(one=torch.zeros(4, 2))
        self.inner = Holder(two=self.one)


def shared():
    with connected() as c:
        model, optimizer = held(c, model=Twice())
        plain = payload(c, model, optimizer)
        model.one.add_(c.rank)
        assert payload(c, model, optimizer) == plain + 8 * model.one.numel() * (c.world - 1)
        assert model.inner.two is model.one
        assert torch.equal(model.one, torch.full((4, 2), 0.5))
        model.inner.two = torch.full((4, 2), 4.0 * c.rank)  # not any more
        payload(c, model, optimizer)
        assert torch.equal(model.one, torch.full((4, 2), 0.5))
        assert torch.equal(model.inner.two, torch.full((4, 2), 2.0))


def test_a_shared_buffer_is_sent_once(ranks):
    ranks(2).run(shared)


def replaced():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = held(c, strategy, table=torch.zeros(2, 3), later=None, gone=torch.zeros(3))
            for shape in ((2, 3), (4, 1), (5,)):
                model.table = torch.full(shape, 2.0 * c.rank)
                train(model, optimizer, [batch(c.rank)])
                assert torch.equal(model.table, torch.full(shape, 1.0)), (strategy, shape)
            model.later, model.gone = torch.full((3,), 4.0 * c.rank), None
            train(model, optimizer, [batch(c.rank)])
            assert torch.equal(model.later, torch.full((3,), 2.0))
            backward(c, model)
            if c.rank == 1:
                model.table = torch.zeros(2, 2)
            with pytest.raises(Diverged) as caught:
                optimizer.step()
            for word in ("'table'", "rank 0 has float32[5]", "rank 1 has float32[2, 2]", 'sync_buffers="none"'):
                assert word in str(caught.value), caught.value
            assert caught.value.ranks == (0, 1)


def test_buffers_that_were_replaced_and_their_shapes(ranks):
    ranks(2).run(replaced)


def expanded(transport):
    with connected(transport) as c:
        for strategy in STRATEGIES:
            model, optimizer = held(c, strategy, wide=torch.full((1,), 3.0 + c.rank).expand(4))
            assert torch.equal(model.wide, torch.full((4,), 3.0))
            model.wide = torch.full((1, 1), 2.0 * c.rank).expand(3, 4)
            train(model, optimizer, [batch(c.rank)])
            assert torch.equal(model.wide, torch.full((3, 4), 1.0))
            parameter = nn.Parameter(torch.full((1,), 3.0 + c.rank).expand(4))
            other = nn.ParameterDict({"p": parameter})
            sherd.distribute(other, strategy=strategy, comm=c)
            assert torch.equal(parameter.detach(), torch.full((4,), 3.0))


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_expanded_buffers(ranks, transport):
    ranks(2).run(expanded, transport)


def loaded():
    """Loading touches every buffer, but changes none."""
    with connected() as c:
        torch.manual_seed(5)
        model, optimizer = held(c, model=nn.Sequential(Holder(table=torch.randn(50, 50)), nn.BatchNorm1d(5)))
        model[1].eval()
        state = {name: torch.randn(t.shape).to(t.dtype) for name, t in model.state_dict().items()}
        model.load_state_dict(state)
        train(model, optimizer, [batch(c.rank)])
        same(buffers(model), {name: state[name] for name in buffers(model)})


def test_the_mean_of_equal_values_has_the_same_bits(ranks):
    ranks(3).run(loaded)


@pytest.mark.fake
def test_a_world_of_one_has_torchs_own_bits():
    model, plain = normed(), normed()
    sherd.distribute(model, optimizer := sgd(model))
    for each in ((model, optimizer), (plain, sgd(plain))):
        train(*each, [batch(0, step) for step in range(STEPS)])
    same(model.state_dict(), plain.state_dict())


@pytest.mark.fake
def test_a_wrong_name_is_refused():
    with pytest.raises(ConfigError, match="unknown sync_buffers='leeder'; did you mean 'leader'"):
        sherd.distribute(network(), sync_buffers="leeder")


def different_options():
    with connected() as c, pytest.raises(Diverged, match="options differ"):
        distributed(c, "zero2", sync_buffers="none" if c.rank else "mean")


def test_options_that_differ_are_refused(ranks):
    ranks(2).run(different_options)
