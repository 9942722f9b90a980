"""zero3 where ranks share no memory: parameters are gathered while they are used, and released."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.api.training import training_of
from sherd.engine.parameters.gathered.gathering import WINDOW
from sherd.engine.parameters.gathered.on_use import GatheredView
from sherd.engine.parameters.gathered.pages import resident_bytes
from sherd.engine.parameters.gathered.route import Route
from tests.helpers.training import adamw, all_same, batch, connected, loss_of, network, same, sgd, weights

GATHERED = sherd.ZeRO(stage=3, share_host_memory=False)
LAYER = 5120  # bytes: a bucket of its own for each layer of `deep`
WIDTH, DEPTH = 31, 12


def deep(depth=DEPTH, width=WIDTH):
    """Equal layers, each of 5 blocks of 256 floats."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def both(c, make, step, steps=3, optimizer=sgd, bucket_bytes=1024, gathered=GATHERED):
    """Weights and losses under ddp and gathered."""
    found = {}
    for name, strategy in {"ddp": "ddp", "gathered": gathered}.items():
        torch.manual_seed(0)
        model = make()
        model, stepper = sherd.distribute(model, optimizer(model), strategy=strategy, comm=c, bucket_bytes=bucket_bytes)
        losses = []
        for number in range(steps):
            loss = step(model, number)
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            losses.append(loss.detach())
        found[name] = {**weights(model), "losses": torch.stack(losses)}
    return found


def store_of(model):
    return training_of(model).engine.store


def resident(model):
    """Bytes of parameters that are in memory, by bucket."""
    return [resident_bytes(bucket.values.whole) for bucket in training_of(model).engine.buckets.every]


# -------------------------------------------------------------------- the same bits


class Tied(nn.Module):
    """An embedding whose weight the root uses too, and views of weights that outlive other layers."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(9))
        self.recurrent = nn.LSTM(16, 16, num_layers=2)

    def forward(self, x):
        x = self.tokens(x)
        kept = [self.layers[0].weight.t(), self.layers[1].weight[3:7].detach(), self.layers[2].weight.data]
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        x, _ = self.recurrent(x @ kept[0])
        return x @ self.tokens.weight.T + kept[1].sum() + kept[2].square().mean()


def tied(model, number):
    tokens = torch.randint(40, (5, 3), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Keeping(torch.autograd.Function):
    """A function that keeps more parameters than the window has room for."""

    @staticmethod
    def forward(ctx, x, *parameters):
        ctx.save_for_backward(x, *parameters)
        return sum((x @ p for p in parameters), torch.zeros_like(x))

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        of_x = sum((gradient @ p.t() for p in parameters), torch.zeros_like(x))
        return of_x, *(x.flatten(0, -2).t() @ gradient.flatten(0, -2) for _ in parameters)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(9))

    def forward(self, x):
        return Keeping.apply(torch.tanh(self.layers[0](x)), *(layer.weight for layer in self.layers))


def inputs(number, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def plain(model, number):
    return model(inputs(number, 4, model_width(model))).square().mean()


def model_width(model):
    return next(p for p in model.parameters() if p.dim() == 2).shape[1]


def checkpointed(reentrant):
    def step(model, number):
        x = inputs(number, 4, model_width(model)).requires_grad_()
        for layers in (list(model)[:5], list(model)[5:]):
            x = checkpoint(nn.Sequential(*layers), x, use_reentrant=reentrant)
        return x.square().mean()

    return step


def checkpointed_function(model, number):
    return checkpoint(model, inputs(number, 4, 16).requires_grad_(), use_reentrant=False).square().mean()


def offloaded(model, number):
    with torch.autograd.graph.save_on_cpu():
        return plain(model, number)


def kept(model, number):
    return model(inputs(number, 4, 16)).square().mean()


def detached_by_hooks(model, number):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        return kept(model, number)


def without_hooks(model, number):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return plain(model, number)


def penalised(model, number):
    x = inputs(number, 4, model_width(model)).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    of_weights = torch.autograd.grad(out.square().sum(), list(model.parameters()), create_graph=True)
    return out.square().mean() + slope.square().mean() + sum(g.square().mean() for g in of_weights)


def norms_of_weights(model, number):
    return plain(model, number) + sum(p.square().sum() for p in model.parameters())


def in_one_node(model, number):
    """One node of the graph that has saved more than the window has room for."""
    squares = torch._foreach_mul(list(model.parameters()), list(model.parameters()))
    return plain(model, number) + sum(square.sum() for square in squares)


class Recurrent(nn.Module):
    """Weights and biases of one node of the graph in buckets of their own, and more than the window has room for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(40, 40, num_layers=4)

    def forward(self, x):
        return self.layers(x)[0]


def recurrent(model, number):
    return model(inputs(number, 5, 3, 40).requires_grad_()).square().mean()


def in_half(model, number):
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, number).float()


def compiled(model, number):
    if number == 0:
        torch._dynamo.reset()
        for layer in list(model)[3:6]:
            layer.compile(backend="aot_eager")
    return plain(model, number)


def wandering(model, number):
    """Modules out of order, twice or never, another way in each step, the same on all ranks."""
    way = random.Random(number)
    x = inputs(number, 4, model_width(model))
    for index in way.choices(range(len(model)), k=way.randrange(3, 2 * len(model))):
        x = x + model[index](x)
    return x.square().mean()


def evaluated_between(model, number):
    with torch.inference_mode():
        plain(model, number)
    with torch.no_grad():
        wandering(model, number)
    return plain(model, number)


WAYS = {
    "plain": (deep, plain),
    "tied": (Tied, tied),
    "kept": (Kept, kept),
    "reentrant": (deep, checkpointed(True)),
    "checkpointed": (deep, checkpointed(False)),
    "checkpointed function": (Kept, checkpointed_function),
    "offloaded": (deep, offloaded),
    "detached by hooks": (Kept, detached_by_hooks),
    "without hooks": (deep, without_hooks),
    "penalised": (deep, penalised),
    "norms": (deep, norms_of_weights),
    "recurrent": (Recurrent, recurrent),
    "one node": (deep, in_one_node),
    "half": (deep, in_half),
    "compiled": (deep, compiled),
    "wandering": (deep, wandering),
    "evaluated": (deep, evaluated_between),
}


def way(name, transport, steps):
    with connected(transport) as c:
        all_same(both(c, *WAYS[name], steps=steps))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_through_a_model_trains_the_bits_of_ddp(ranks, name):
    ranks(2).run(way, name, "host", 3)


@pytest.mark.parametrize("name", ["wandering", "tied"])
def test_the_bits_over_c10d(ranks, name):
    ranks(3).run(way, name, "c10d", 6)


@pytest.mark.fuzz
def test_many_ways_through_a_model(ranks):
    ranks(3).run(way, "wandering", "host", 200)


# -------------------------------------------------------------------- bytes and memory


def gathered(c, model, optimizer=adamw, bucket_bytes=LAYER, **options):
    model = model.requires_grad_()
    return sherd.distribute(model, optimizer(model), strategy=GATHERED, comm=c, bucket_bytes=bucket_bytes, **options)


def sent(transport):
    """Padded bytes of parameters, bytes of the largest buckets that stay, and the payload of some steps."""
    with connected(transport) as c:
        model, optimizer = gathered(c, deep())
        store, found = store_of(model), []
        for number in range(6):
            c.counters.reset()
            loss = model(inputs(number, 4, WIDTH).requires_grad_()).square().mean()
            if number >= 4:
                store.gathering.drop(store.gathering.gathered)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(c.counters.total().payload)
        layout = training_of(model).engine.layout
        return layout.padded_numel * 4, WINDOW * layout.buckets[0].numel * 4, found


@pytest.mark.parametrize(("transport", "world"), [("host", 2), ("c10d", 3)])
def test_a_step_sends_three_times_the_parameters_but_for_what_the_window_spares(ranks, transport, world):
    for padded, window, payload in ranks(world).run(sent, transport):
        exact = 3 * padded * (world - 1) // world
        spared = window * (world - 1) // world
        assert payload == [exact - spared] * 4 + [exact] * 2


def held():
    """Buckets in memory around every layer, forward and backward, and in the end; bytes by kind."""
    with connected() as c:
        model, optimizer = gathered(c, deep())
        seen, ahead = [], []

        def look(number=None):
            pages, engine = resident(model), training_of(model).engine
            seen.append(sum(each > 0 for each in pages))
            there = {bucket for bucket, each in zip(engine.buckets.every, pages, strict=True) if each}
            assert there <= set(engine.store.gathering.gathered)
            if number is not None:
                members = engine.inventory.members
                ahead.append([members[2 * index].bucket for index in (number, *range(number + 1, DEPTH))])
                ahead[-1] = [bucket in store_of(model).gathering.gathered for bucket in ahead[-1][:4]]

        look()
        for number, layer in enumerate(model):
            layer.register_forward_hook(lambda *_, number=number: look(number))
            layer[0].weight.register_hook(lambda _: look())
        for step in range(3):
            model(inputs(step, 4, WIDTH).requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            look()
        training = training_of(model)
        kinds = {"parameters": store_of(model).bytes(), "optimizer": training.state_bytes()}
        kinds["gradients"] = training.engine.gradient_bytes()["gradients"]
        return seen, ahead, kinds, training.engine.layout


def test_only_the_window_is_in_memory_and_nothing_after_a_step(ranks):
    by_rank = ranks(2).run(held)
    for seen, ahead, kinds, layout in by_rank:
        passes = 2 * DEPTH + 1
        assert seen[0] == 0
        assert [seen[(step + 1) * passes] for step in range(3)] == [0, 0, 0]
        assert max(seen) == WINDOW
        assert seen[1 + DEPTH] == WINDOW  # backward begins with what forward left
        assert kinds["parameters"] == kinds["gradients"] == layout.padded_numel * 4 // 2
        first, second = ahead[:DEPTH], ahead[2 * DEPTH :]
        assert all(each[:2] in ([True, False], [True]) for each in first)  # nothing is known yet
        assert all(each[:3] == [True] * len(each[:3]) for each in second)
        assert second[3] == [True, True, True, False]
    state = sum(kinds["optimizer"] for _, _, kinds, _ in by_rank)
    assert state == pytest.approx(8 * by_rank[0][3].numel, rel=0.05)


@pytest.mark.pure
def test_a_route_is_foretold_where_it_was_always_the_same():
    route = Route()
    for _ in range(3):  # the first has nothing before it
        foretold = []
        for bucket in (0, 0, 1, 2, 3, 2, 1, 0, -1):
            route.visit(bucket)
            foretold.append(route.ahead(2))
    assert foretold == [[1, 2], [1, 2], [2, 3], [3, 2], [2, 1], [1, 0], [0], [], [0, 1]]
    for bucket in (0, 1, 3):
        route.visit(bucket)
    route.end()
    for bucket in (0, 1):
        route.visit(bucket)
    assert route.ahead(2) == []  # 2 or 3


# -------------------------------------------------------------------- what is not a step


def looked_at():
    with connected() as c:
        model, optimizer = gathered(c, network(), bucket_bytes=1024)
        expected, stepper = sherd.distribute(*_pair(network()), strategy="ddp", comm=c)
        for number in range(2):
            for each, its in ((model, optimizer), (expected, stepper)):
                loss_of(each, batch(c.rank, number)).backward()
                its.step()
                its.zero_grad()
        right = weights(expected)
        same(weights(model), right)
        same(dict(model.state_dict()), right, "state_dict")
        assert all(type(value) is torch.Tensor for value in model.state_dict().values())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            same(dict(copied.state_dict()), right, "copy")
            assert all(type(p) is nn.Parameter for p in copied.parameters())
        for name, p in model.named_parameters():
            view = p.detach()
            assert type(view) is GatheredView
            array = view.numpy()
            store_of(model).gathering.drop(store_of(model).gathering.gathered)
            assert numpy.array_equal(array, right[name].numpy())
            for found in (numpy.asarray(view), view.tolist(), copy.deepcopy(view), nn.Parameter(view).detach()):
                assert torch.equal(torch.as_tensor(found), right[name])
            assert torch.equal(pickle.loads(pickle.dumps(view)), right[name])
            assert str(view.clone()) == str(right[name])
        with sherd.full_parameters(model):
            same(weights(model), right)
            with torch.no_grad():
                model[0].weight.mul_(2)
        right["0.weight"] *= 2
        same(weights(model), right)
        with torch.no_grad():
            model[0].bias.data.add_(1)
            model[2].weight[1].zero_()
        right["0.bias"] += 1
        right["2.weight"][1] = 0
        store_of(model).gathering.drop(store_of(model).gathering.gathered)
        same(weights(model), right)
        expected.load_state_dict(right)
        model.load_state_dict({name: value + c.rank for name, value in right.items()})  # rank 0's are taken
        same(weights(model), right)
        assert "parameters gathered" in sherd.describe(model)


def _pair(model):
    return model, adamw(model)


def test_parameters_that_are_looked_at_copied_and_edited(ranks):
    ranks(2).run(looked_at)


def frozen():
    with connected() as c:
        found = {}
        for name, strategy in {"ddp": "ddp", "gathered": GATHERED}.items():
            model = deep()
            model[3].requires_grad_(False)
            model, optimizer = sherd.distribute(model, adamw(model), strategy=strategy, comm=c, bucket_bytes=1024)
            for number in range(4):
                if number == 2:
                    model[3].requires_grad_()
                plain(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            found[name] = weights(model)
        all_same(found)
        assert (
            store_of(model).bytes() * c.world
            == sum(b.described.numel for b in training_of(model).engine.buckets.every) * 4
        )


def test_frozen_parameters_are_sharded_too_and_can_be_unfrozen(ranks):
    ranks(2).run(frozen)


def old_graph():
    with connected() as c:
        model, optimizer = gathered(c, deep())
        old = plain(model, 0)
        plain(model, 1).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


def test_a_backward_through_an_old_graph_fails_as_in_torch(ranks):
    ranks(2).run(old_graph)


def alone(how):
    with connected() as c:
        model, _ = gathered(c, deep())
        error = ""
        try:
            if c.rank == 0:
                model.state_dict() if how != "use" else model[2][0].weight.sum()
            elif how == "barrier":
                c.barrier().wait()
            else:
                model[3][0].weight.sum()
        except sherd.Diverged as raised:
            error = str(raised)
        return error


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("state_dict", r"^Where .* model\.state_dict\(\) is collective: call it on .* state_dict\(\) after step 0"),
        ("barrier", r"^Where .* model\.state_dict\(\) is collective: call it on .* state_dict\(\) after step 0"),
        ("use", r"2\.0\.weight"),
    ],
)
def test_a_rank_that_reads_alone_is_named(ranks, how, match):
    for error in ranks(2).run(alone, how):
        assert how == "barrier" or "3.0.weight" in error
        assert "ll ranks must" in error
        assert re.search(match, error), error


@pytest.mark.fake
def test_a_world_of_one():
    way("plain", "auto", 3)


def forgotten():
    with connected() as c:
        model, optimizer = gathered(c, deep())
        plain(model, 0).backward()
        optimizer.step()
        view, store = model[3][0].weight.detach(), weakref.ref(store_of(model))
        expected = view.clone()
        del model, optimizer
        gc.collect()
        assert torch.equal(view, expected)  # whoever can touch it keeps it
        del view
        gc.collect()
        return store() is None


def test_memory_is_given_back_with_the_model(ranks):
    assert ranks(2).run(forgotten) == [True, True]


def contained():
    with connected() as c:
        model, _ = gathered(c, deep())
        state = nn.ModuleDict({"inner": model}).state_dict()
        assert all(type(value) is torch.Tensor for value in state.values())
        same({name.removeprefix("inner."): value for name, value in state.items()}, weights(deep()))


def test_the_state_of_a_module_around_the_model(ranks):
    ranks(2).run(contained)


def traced():
    with connected() as c:
        model, optimizer = gathered(c, deep())
        x = inputs(0, 4, WIDTH)
        trace = torch.jit.trace(model, x)
        for number in range(2):
            assert torch.equal(trace(x), model(x))
            plain(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(trace(x), model(x))


def test_a_trace_goes_along_with_the_model(ranks):
    ranks(2).run(traced)


def biases_apart(transport):
    """A parameter that one rank does not use, in a bucket that both gather."""
    with connected(transport) as c:
        model, _ = gathered(c, deep())
        x = inputs(0, 4, WIDTH)
        for number, (layer, act) in enumerate(model):
            used = layer.bias if c.rank == 0 or number != 6 else None
            x = act(nn.functional.linear(x, layer.weight, used))
        try:
            x.square().mean().backward()
        except sherd.Diverged as error:
            return str(error)
        return None


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_parameter_that_only_some_ranks_use_is_an_error_and_no_hang(ranks, transport):
    for error in ranks(2).run(biases_apart, transport):
        assert "which all ranks must make under zero3" in error
