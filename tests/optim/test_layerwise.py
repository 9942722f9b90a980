"""LARS and LAMB as plain optimizers, in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import ConfigError
from sherd.layout.norms import added, block_norms
from sherd.optim import LAMB, LARS, layerwise
from tests.helpers.training import close, differ, same
from tests.optim.layerwise import CASES, STEPS, Net, Plain, build, dense, loss_of, weights

pytestmark = pytest.mark.fake

OPTIONS = [
    (LARS, {"lr": 0.3}),
    (LARS, {"lr": 0.3, "momentum": 0.0, "weight_decay": 0.1, "adapt": True}),
    (LARS, {"lr": 0.3, "nesterov": True, "maximize": True, "trust_coefficient": 0.05, "eps": 0.1}),
    (LARS, {"lr": torch.tensor(0.3), "adapt": False, "weight_decay": 0.1}),
    (LAMB, {}),
    (LAMB, {"lr": 0.1, "betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.0, "adapt": True}),
    (LAMB, {"lr": torch.tensor(0.1), "maximize": True, "adapt": False}),
]


def train(model, optimizer, first=0, last=STEPS, dtype=torch.float64, accumulate=1):
    for step in range(first, last):
        (loss_of(model, 0, step, dtype) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            model.zero_grad()


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_the_formulas(kind, options):
    model, other = Net(torch.float64), Net(torch.float64)
    train(model, kind(model.parameters(), **options))
    train(other, Plain(kind(other.parameters(), **options)))
    close(weights(model), weights(other), rtol=1e-12)
    assert differ(weights(model), weights(Net(torch.float64)))


@pytest.mark.parametrize("case", CASES)
def test_groups_and_what_adapts(case):
    model = Net(torch.float64)
    train(model, build(case, model))
    close(weights(model), weights(dense(case, world=1)), rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_pieces_change_no_bit(case, monkeypatch):
    found = []
    for piece in (256, layerwise.PIECE):
        monkeypatch.setattr(layerwise, "PIECE", piece)
        for dtype in (torch.float32, torch.bfloat16):
            model = Net(dtype)
            train(model, build(case, model), dtype=dtype)
            found.append(weights(model))
    same(found[0], found[2])
    same(found[1], found[3])


def test_norms_do_not_depend_on_cuts():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.randn(2501, dtype=torch.float64).to(dtype)
        whole = block_norms(flat)
        for cut in (256, 1024, 2304):
            assert torch.equal(torch.cat([block_norms(flat[:cut]), block_norms(flat[cut:])]), whole)
        assert abs(float(added(whole)) - float(flat.double().norm())) < 1e-5
    assert added(block_norms(flat[:0])) == 0.0


@pytest.mark.parametrize("case", CASES)
def test_memory_that_is_not_contiguous(case):
    """Channels last, transposed, with gaps; and state that was loaded in another order."""
    torch.manual_seed(0)
    start = [torch.randn(5, 7, 3, 3), torch.randn(40, 31), torch.randn(9, 20)]
    gradients = [[torch.randn_like(each) for each in start] for _ in range(3)]
    room = torch.zeros(9, 40)
    arranged = [start[0].clone(memory_format=torch.channels_last), start[1].T.clone().T, room[:, ::2].copy_(start[2])]
    found = []
    for tensors in (start, arranged):
        parameters = [nn.Parameter(each) for each in tensors]
        kind, options = CASES[case]
        optimizer = kind(parameters, **{**options, "adapt": False})  # with a ratio, blocks are others
        for number, grads in enumerate(gradients):
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            if number == 1:
                state = optimizer.state_dict()
                for kept in state["state"].values():
                    kept.update({k: v.contiguous() for k, v in kept.items() if v.dim()})
                optimizer.load_state_dict(state)
        found.append([each.detach() for each in parameters])
    assert all(map(torch.equal, *found))
    assert not room[:, 1::2].any(), "it wrote between the elements"


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_optimizer_goes_on(case):
    model, other = Net(), Net()
    optimizer = build(case, model)
    train(model, optimizer, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    loaded = build(case, other)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (other, loaded)):
        train(*each, first=STEPS, last=2 * STEPS, dtype=torch.float32)
    same(weights(other), weights(model))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_world_of_one_has_the_bits_of_the_plain_loop(case, strategy):
    model, other = Net(), Net()
    train(model, build(case, model), dtype=torch.float32, last=6, accumulate=2)
    distributed = sherd.distribute(other, build(case, other), strategy=strategy, accumulate=2)
    train(*distributed, dtype=torch.float32, last=6)
    same(weights(other), weights(model))


def test_a_closure_is_called_once():
    model = Net(torch.float64)
    optimizer, calls = LAMB(model.parameters()), []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, len(calls), torch.float64)
        loss.backward()
        calls.append(loss)
        return loss

    before = weights(model)
    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert differ(weights(model), before)


def test_what_is_not_used_is_left_alone():
    model = Net()
    optimizer = LAMB(model.parameters())
    before = weights(model)
    train(model, optimizer, first=2, last=3, dtype=torch.float32)  # a step without `extra`
    unused = {"extra.weight", "extra.bias"}
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == set(before) - unused
    assert not optimizer.state[model.extra.weight]
    assert optimizer.state[model.nothing]["step"] == 1


def test_a_schedule_counts_and_hyper_parameters_are_read_live():
    model = Net()
    optimizer = LARS(model.parameters(), lr=0.1)
    before = weights(model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, dtype=torch.float32, last=1)
    same(weights(model), before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: LARS(p, lr=-1.0), "lr=-1.0; write a rate"),
        (lambda p: LARS(p, lr=1.0, momentum=-0.1), "momentum=-0.1"),
        (lambda p: LARS(p, lr=1.0, momentum=0.0, nesterov=True), "nesterov=True needs a momentum"),
        (lambda p: LARS(p, lr=1.0, trust_coefficient=0.0), "trust_coefficient=0.0; write a positive one"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "betas=.* write two numbers"),
        (lambda p: LAMB(p, eps=-1e-6), "eps=-1e-06"),
        (lambda p: LAMB([{"params": p, "weight_decay": -0.1}]), "weight_decay=-0.1"),
        (lambda p: LAMB(p, adapt="all"), "adapt='all'; write True, False, or None"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make(list(nn.Linear(2, 2).parameters()))


def test_sparse_and_complex_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = LAMB(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="has a sparse gradient"):
        optimizer.step()
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="is complex"):
        LARS([parameter], lr=0.1).step()


class Centred(LAMB):
    """Its step is not only LAMB's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad -= p.grad.mean()
        return super().step(closure)


def test_a_step_of_ones_own_is_not_taken_for_ours():
    parameters = list(nn.Linear(2, 2).parameters())
    assert layerwise.is_layerwise(LAMB(parameters))
    assert not layerwise.is_layerwise(Centred(parameters))
    assert not layerwise.is_layerwise(torch.optim.SGD(parameters))
