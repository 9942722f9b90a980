"""torch.compile, before and after `distribute`.

Graphs are whole (`fullgraph=True` refuses a break), and counted: as many as in plain torch, or something would make
them anew at each step. The backend runs them without a compiler.
"""

from __future__ import annotations

import shutil

import torch
from torch import nn

from tests.helpers.training import loss_of, sgd, weights
from tests.what_works.cases import ENDS, case

SECTION = "torch.compile"
TRACED = {"backend": "aot_eager", "fullgraph": True}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(15), nn.Linear(15, 7), nn.Linear(7, 15)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(15, 5)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def net():
    """A new model, and graphs counted from zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    return Net().double()


def graphs():
    """How many were made since."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_blocks(model, **options):
    """In both ways: in place, and by a module in its place."""
    model.first.compile(**options)
    model.second = torch.compile(model.second, **options)


def train(run, model, optimizer):
    for data in run.batches():
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(run, model, plain):
    """What the model gives for inputs that all ranks share, which is what its weights give uncompiled."""
    inputs = torch.linspace(-1, 1, 30, dtype=torch.float64).view(2, 15)
    with torch.no_grad():
        found, expected = model(inputs), plain(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return found


@case(
    SECTION,
    "Blocks compiled before `distribute`",
    "`block.compile()` and `model.block = torch.compile(model.block)`; no graph breaks, and as many graphs as in plain "
    "torch",
    often=ENDS,
)
def blocks_before(run):
    model = net()
    compile_blocks(model, **TRACED)
    model, optimizer = run.distribute(model, sgd(model))
    train(run, model, optimizer)
    return {**weights(model), "graphs": graphs()}


@case(
    SECTION, "Blocks compiled after `distribute`", "the same; a module that only wraps another is no change", often=ENDS
)
def blocks_after(run):
    model = net()
    model, optimizer = run.distribute(model, sgd(model))
    compile_blocks(model, **TRACED)
    train(run, model, optimizer)
    return {**weights(model), "graphs": graphs()}


@case(
    SECTION,
    "`torch.compile(model)` passed to `distribute`",
    "evaluation between steps sees the new weights",
    often=ENDS,
)
def model_before(run):
    plain = net()
    model = torch.compile(plain, **TRACED)
    model, optimizer = run.distribute(model, sgd(model))
    found = {}
    for epoch in range(2):
        train(run, model.train(), optimizer)
        found[f"seen {epoch}"] = seen(run, model.eval(), plain)
    return {**weights(model), **found, "graphs": graphs()}


@case(SECTION, "`torch.compile(model)` after `distribute`", "the same, also after `load_state_dict`", often=ENDS)
def model_after(run):
    plain = net()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    plain, optimizer = run.distribute(plain, sgd(plain))
    model = torch.compile(plain, **TRACED)
    found = {}
    for epoch in range(2):
        train(run, model, optimizer)
        found[f"seen {epoch}"] = seen(run, model, plain)
        plain.load_state_dict(start)
        found[f"seen from the start {epoch}"] = seen(run, model, plain)
    return {**weights(model), **found, "graphs": graphs()}


@case(
    SECTION,
    "A compiled training step",
    "a function of forward, `backward()` and `step()`; graphs break around sherd",
    often=ENDS,
)
def step_function(run):
    model = net()
    model, optimizer = run.distribute(model, sgd(model))

    def step(data):
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if not run.plain:
        step = torch.compile(step, backend="aot_eager")
    losses = [run.mean(step(data)) for data in run.batches()]
    return {**weights(model), "losses": torch.stack(losses)}


@case(SECTION, "Inductor", "torch's own compiler; tested where there is a C++ compiler", often=ENDS)
def inductor(run):
    model = net()
    model, optimizer = run.distribute(model, sgd(model))
    options = {"options": {"compile_threads": 1}} if shutil.which("g++") else TRACED
    model.first.compile(**options)
    train(run, model, optimizer)
    return {**weights(model), "graphs": graphs()}
