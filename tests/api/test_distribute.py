"""`sherd.distribute`: what it takes, what it gives back, what it refuses."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import sherd
from sherd import ConfigError, Diverged
from tests.helpers.training import (
    STRATEGIES,
    adamw,
    all_same,
    batch,
    connected,
    differ,
    distributed,
    loss_of,
    network,
    same,
    sgd,
    train,
    weights,
)

pytestmark = pytest.mark.fake


def same_objects():
    with connected() as c:
        for strategy in STRATEGIES:
            model = network()
            optimizer, loader = sgd(model), DataLoader([1, 2])
            keys, parameters, kind = list(model.state_dict()), list(model.parameters()), type(optimizer)
            found = sherd.distribute(model, optimizer, loader, strategy=strategy, comm=c)
            assert len(found) == 3
            assert all(a is b for a, b in zip(found, (model, optimizer, loader), strict=True))
            assert list(model.state_dict()) == [name for name, _ in model.named_parameters()] == keys
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            assert isinstance(optimizer, kind)
            assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
            model = network()
            assert sherd.distribute(model, strategy=strategy, comm=c) is model
            assert len(distributed(c, strategy)) == 2
            model, loader = network(), DataLoader([1, 2])
            assert sherd.distribute(model, loader, strategy=strategy, comm=c) == (model, loader)
            one, two = network(), network()
            both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
            found = sherd.distribute(one, two, both, strategy=strategy, comm=c)
            assert all(a is b for a, b in zip(found, (one, two, both), strict=True))
            assert sherd.describe(one) == sherd.describe(two)


def test_the_same_objects_come_back_as_many_as_were_given(ranks):
    ranks(2).run(same_objects)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_launcher_it_is_a_world_of_one_with_torchs_own_bits(strategy):
    model, optimizer = distributed(None, strategy, optimizer=adamw)
    plain = network()
    for each in ((model, optimizer), (plain, adamw(plain))):
        train(*each, [batch(0, step) for step in range(4)])
    same(weights(model), weights(plain))
    assert "ranks      1 over" in sherd.describe(model)


def network_with_buffers(seed):
    model = nn.Sequential(network(seed), nn.BatchNorm1d(5))
    model[1].running_mean.fill_(seed)
    model[1].num_batches_tracked.fill_(seed)
    model.register_buffer("flag", torch.tensor(seed == 3))
    return model


def leaders_values(transport):
    with connected(transport) as c:
        for strategy in STRATEGIES:
            model = network_with_buffers(3 + c.rank)
            model[0][0].bias.requires_grad_(False)
            sherd.distribute(model, strategy=strategy, comm=c)
            same(model.state_dict(), network_with_buffers(3).state_dict(), strategy)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_rank_0s_parameters_and_buffers_are_taken_everywhere(ranks, transport):
    ranks(2).run(leaders_values, transport)


class Bag(nn.Module):
    """Parameters by name; `forward` is their product with the mean of its input, summed up."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return sum((p.double() * x.double().mean()).square().sum() for p in self.parameters())


def different_models():
    one = torch.ones(3, 2)
    frozen = Bag(w=one)
    frozen.w.requires_grad_(False)
    buffered = Bag(w=one)
    buffered.register_buffer("seen", torch.zeros(1))
    cases = [
        (Bag(w=one), Bag(v=one), ["'w'", "'v'"]),
        (Bag(w=one), Bag(w=one.T), ["'w' float32[3, 2]", "'w' float32[2, 3]"]),
        (Bag(w=one), Bag(w=one.double()), ["'w' float32", "'w' float64"]),
        (Bag(w=one), frozen, ["'w' float32[3, 2] where", "frozen"]),
        (Bag(w=one), Bag(w=one, b=one), ["1 parameters", "2"]),
        (buffered, Bag(w=one), ["2 parameters", "1"]),
    ]
    with connected() as c:
        for strategy in ("ddp", "zero3"):
            for left, right, words in cases:
                with pytest.raises(Diverged) as caught:
                    sherd.distribute(right if c.rank else left, strategy=strategy, comm=c)
                assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
                assert all(word in str(caught.value) for word in words), caught.value
                assert caught.value.ranks == (0, 1)


def test_models_that_differ_between_ranks_are_refused_with_both_named(ranks):
    ranks(2).run(different_models)


def different_options(left, right):
    with connected(timeout=10) as c, pytest.raises(sherd.CommError) as caught:
        distributed(c, **(right if c.rank else left))
    return str(caught.value)


ZERO2 = {"strategy": "zero2"}


@pytest.mark.parametrize("left", [{"strategy": "ddp"}, {"strategy": "zero1"}, {**ZERO2, "clip_norm": 1.0}])
def test_options_that_differ_between_ranks_are_refused(ranks, left):
    for text in ranks(2).run(different_options, left, ZERO2):
        assert "rank 0" in text and "rank 1" in text


def test_unknown_names_are_refused_with_the_nearest():
    for options, message in (
        ({"strategy": "zero22"}, "did you mean 'zero2'"),
        ({"strategy": "fsdp"}, "unknown strategy 'fsdp'; here it is called 'zero3': write strategy='zero3'"),
        ({"strategy": "FSDP2"}, "here it is called 'zero3'"),
        ({"strategy": "zero-3"}, "unknown strategy 'zero-3'; write strategy='zero3'"),
        ({"strategy": "ZeRO3"}, "write strategy='zero3'"),
        ({"strategy": "DDP"}, "write strategy='ddp'"),
        ({"strategy": "deepspeed"}, "here it is 'zero1', 'zero2' or 'zero3': write strategy='zero3', or another"),
        ({"strategy": "deepspeed_stage_2"}, "here it is called 'zero2'"),
        ({"strategy": "zero"}, "here it is 'zero1', 'zero2' or 'zero3'"),
        ({"strategy": "horovod"}, "here it is called 'ddp'"),
        ({"strategy": "dp"}, "here it is called 'ddp'"),
        ({"strategy": sherd.ZeRO}, r"write an object of it: strategy=ZeRO\(\)"),
        ({"nonfinite": "skipp"}, "did you mean 'skip'"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"accumulate_at": "owners"}, "did you mean 'owner'"),
        ({"loss_reduction": "men"}, "did you mean 'mean'"),
        ({"check": "edit"}, "did you mean 'edits'"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 must be"),
        ({"acumulate": 3}, "did you mean 'accumulate'"),
    ):
        model = network()
        with pytest.raises(ConfigError, match=message):
            sherd.distribute(model, sgd(model), **options)
    with pytest.raises(ConfigError, match="stage=4 must be 1, 2 or 3"):
        sherd.ZeRO(stage=4)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_what_cannot_be_distributed_is_refused(strategy):
    model, other = network(), network()
    cases = [
        ((model, None), "takes models, optimizers and DataLoaders, found None; leave it out"),
        ((), "takes a torch.nn.Module first; found none"),
        ((model, model), "the same object twice"),
        (
            (model, sgd(model), sgd(model)),
            r"parameter .0\.weight. is in two optimizers, optimizer 0 .* and optimizer 1 \(SGD\)",
        ),
        ((nn.DataParallel(model),), r"wrapped in torch's DataParallel; .*model\.module"),
        ((model, sgd(other)), r"group 0 has a parameter of shape \(7, 15\) at position 0.*model.parameters\(\)"),
        ((nn.Linear(3, 3, device="meta"),), "'weight' is on the meta device"),
        ((nn.LazyLinear(3),), "'weight' has no shape yet"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            sherd.distribute(*arguments, strategy=strategy)
    optimizer = sgd(model)
    sherd.distribute(model, optimizer, strategy=strategy)  # none of these left a trace
    for again in (model, nn.Sequential(model), model[0]):
        with pytest.raises(ConfigError, match="already distributed"):
            sherd.distribute(again, strategy=strategy)
    with pytest.raises(ConfigError, match="this optimizer is already distributed"):
        sherd.distribute(other, optimizer, strategy=strategy)
    other[0].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"'0\.weight' also belongs to another distributed model"):
        sherd.distribute(other, strategy=strategy)
    with pytest.raises(ConfigError, match="not distributed"):
        sherd.describe(other)


MODEL_ITSELF = r"pass the model itself: sherd\.distribute\(model, optimizer\)"
LOOP = "is not passed: use it in the loop as before"
DATA = "other sources of data are not passed"


def mistaken(model, optimizer):
    """What is passed by mistake, and what the error says it is, and what to write."""
    dataset = TensorDataset(torch.ones(4, 15))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return [
        (scheduler, r"a scheduler \(StepLR\); it is not passed: it keeps its optimizer"),
        (plateau, r"a scheduler \(ReduceLROnPlateau\); it is not passed"),
        (model.parameters(), f"the parameters of a model; {MODEL_ITSELF}"),
        (model.named_parameters(), f"the parameters of a model; {MODEL_ITSELF}"),
        (list(model.parameters()), rf"parameters \(list\); {MODEL_ITSELF}"),
        (list(model.named_parameters()), rf"parameters \(list\); {MODEL_ITSELF}"),
        ([{"params": list(model.parameters())}], rf"parameters \(list\); {MODEL_ITSELF}"),
        (model[0].weight, f"a parameter; {MODEL_ITSELF}"),
        (model.state_dict(), r"tensors \(OrderedDict\); load a state with model\.load_state_dict\(state\)"),
        ([model, network()], r"several objects in one \(list\); pass them one by one"),
        (dataset, r"a dataset \(TensorDataset\); pass a loader for it: DataLoader\(dataset, batch_size=\.\.\.\)"),
        (RandomSampler(dataset), r"a sampler \(RandomSampler\); pass the loader that uses it"),
        (nn.CrossEntropyLoss(), rf"a loss \(CrossEntropyLoss\); it has no parameters and {LOOP}"),
        (nn.functional.mse_loss, rf"a function \(mse_loss\); a loss, a metric or a collate function {LOOP}"),
        (torch.amp.GradScaler("cpu"), rf"a gradient scaler \(GradScaler\); it {LOOP}"),
        (torch.ones(4, 15), r"a tensor; .* DataLoader\(TensorDataset\(x, y\), batch_size=\.\.\.\)"),
        (sherd.ZeRO(stage=3), r"a strategy \(ZeRO\); pass it by keyword: strategy=\.\.\."),
        ("zero3", "the string 'zero3'; pass options by keyword: strategy='zero3'"),
        (torch.optim.SGD, r"the class SGD; pass an object of it: SGD\(\.\.\.\)"),
        ([1, 2], f"an object of type list; {DATA}"),
        ((number for number in range(3)), f"a generator; {DATA}"),
        (7, f"an object of type int; {DATA}"),
    ]


def test_what_is_passed_by_mistake_is_named():
    model = network()
    optimizer = sgd(model)
    for thing, message in mistaken(model, optimizer):
        with pytest.raises(ConfigError, match=f"takes models, optimizers and DataLoaders, found {message}"):
            sherd.distribute(model, optimizer, thing)
    sherd.distribute(model, optimizer)  # none of these left a trace


def test_a_loss_with_parameters_is_a_model():
    class Learned(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    model, criterion = network(), Learned()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    sherd.distribute(model, criterion, optimizer)


def without_parameters():
    with connected() as c:
        for strategy in STRATEGIES:
            model = sherd.distribute(nn.Tanh(), strategy=strategy, comm=c)
            assert "0 trainable elements in 0 parameters" in sherd.describe(model)
            x = torch.ones(3, requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None
            frozen = network(c.rank).requires_grad_(False)
            sherd.distribute(frozen, strategy=strategy, comm=c)
            same(weights(frozen), weights(network(0)))


def test_models_without_parameters_and_without_trainable_ones(ranks):
    ranks(2).run(without_parameters)


def half_frozen():
    model = network()
    model[0].bias.requires_grad_(False)
    return model


def unusual_models():
    makers = {
        "frozen": half_frozen,
        "fp32 and fp64": lambda: Bag(a=torch.ones(300), b=torch.ones(7, 15).double(), c=torch.ones(5), d=torch.ones(2)),
        "bf16": lambda: Bag(a=torch.ones(300).bfloat16(), b=torch.ones(7)),
        "0-dim": lambda: Bag(a=torch.tensor(2.0), b=torch.tensor(3.0).double(), c=torch.ones(3)),
        "empty": lambda: Bag(a=torch.ones(0, 3), b=torch.ones(3)),
    }
    with connected() as c:
        for what, make in makers.items():
            found = {}
            for strategy in STRATEGIES:
                model, optimizer = distributed(c, strategy, make, adamw)
                before = weights(model)
                for step in range(3):
                    data = batch(c.rank, step)
                    (loss_of(model, data) if what == "frozen" else model(data[0])).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found[strategy] = weights(model)
                for name, parameter in model.named_parameters():
                    moved = not torch.equal(parameter, before[name])
                    assert moved == (parameter.requires_grad and parameter.numel() > 0), (what, strategy, name)
                optimizer.state_dict()
            all_same(found)


def test_frozen_mixed_dtypes_and_0_dim_parameters(ranks):
    ranks(2).run(unusual_models)


def descriptions(transport):
    with connected(transport) as c:
        return {s: sherd.describe(distributed(c, s, optimizer=adamw)[0]) for s in STRATEGIES}


def calls_described(transport):
    """What is said about the calls of a step, and what was counted meanwhile."""
    found = {}
    with connected(transport) as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, optimizer=adamw)
            line = lambda model=model: sherd.describe(model).split("\ncalls      ")[1].splitlines()[0]  # noqa: E731
            said = [line()]
            for step in range(3):
                before = {name: (n.calls, n.payload, n.control) for name, n in c.counters.by_operation.items()}
                train(model, optimizer, [batch(c.rank, step)])
                counts = {}
                for name, n in c.counters.by_operation.items():
                    calls, payload, control = before.get(name, (0, 0, 0))
                    if n.calls > calls:
                        counts[name] = n.calls - calls, n.payload - payload, n.control - control
                said += [line(), line()]
            found[strategy] = said, counts
    return found


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_describe_shows_the_calls_and_bytes_of_the_last_step(ranks, transport):
    for found in ranks(2).run(calls_described, transport):
        for strategy, (said, counts) in found.items():
            assert said[0] == "not known before the first step", strategy
            assert said[-1] == said[-2]  # what it calls itself belongs to no step
            calls, payload, control = map(sum, zip(*counts.values(), strict=True))
            assert said[-1].startswith(f"{calls:,} in the last step (")
            assert said[-1].endswith(f"; this rank sent {payload:,} bytes of tensors and {control:,} of control")
            shown = said[-1].partition("(")[2].partition(")")[0].split(", ")
            assert dict(reversed(each.split()) for each in shown) == {name: str(n[0]) for name, n in counts.items()}
            assert payload > 0


def test_describe_of_a_world_of_one_counts_no_bytes():
    model, optimizer = distributed(None, "zero2", optimizer=adamw)
    train(model, optimizer, [batch(0, 0)])
    assert "; this rank sent 0 bytes of tensors and 0 of control\n" in sherd.describe(model)


DEFAULTS = {"ddp": "rank", "zero1": "rank", "zero2": "owner", "zero3": "owner"}


def accumulations():
    """What a model says about its accumulation, and its weights, by where it is to accumulate."""
    found = {}
    with connected() as c:
        for where, strategy in itertools.product((None, "rank", "owner"), STRATEGIES):
            model, optimizer = distributed(c, strategy, accumulate=3, accumulate_at=where)
            train(model, optimizer, (batch(c.rank, step) for step in range(6)))
            lines = [line for line in sherd.describe(model).splitlines() if line.startswith("accumulate ")]
            found[where, strategy] = lines, weights(model)
        assert not any(line.startswith("accumulate ") for line in sherd.describe(distributed(c, "ddp")[0]).splitlines())
    return found


def test_describe_says_where_gradients_are_accumulated_which_decides_bits(ranks):
    for found in ranks(2).run(accumulations):
        for (where, strategy), ((line,), _) in found.items():
            expected = where or DEFAULTS[strategy]
            assert f"3 backwards per step, added up at the {expected}, " in line
            assert line.endswith(f'with accumulate_at="{expected}"')
        for strategy, where in DEFAULTS.items():
            same(found[None, strategy][1], found[where, "ddp"][1])
        assert differ(found[None, "ddp"][1], found[None, "zero2"][1])


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_describe_says_strategy_ranks_transport_bytes_and_buckets(ranks, transport):
    for found in ranks(2).run(descriptions, transport):
        for strategy, text in found.items():
            assert f"strategy   {strategy}" in text
            assert f"ranks      2 over {transport}" in text
            assert "152 trainable elements in 4 parameters" in text
            owned = text.partition("of these, what each rank owns")[2]
            _, total, _ = re.search(r"^  parameters +([\d,]+) +([\d,]+) +([\d.]+)$", owned, re.M).groups()
            assert total == "608", (strategy, owned)  # 152 elements, wherever they are
            for kind in ("parameters", "gradients", "buckets", "optimizer state"):
                mine, total, _ = re.search(rf"^  {kind} +([\d,]+) +([\d,]+) +([\d.]+)$", text, re.M).groups()
                assert int(mine.replace(",", "")) <= int(total.replace(",", "")) < 300_000, (strategy, kind)
