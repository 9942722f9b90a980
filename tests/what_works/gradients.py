"""What is done to gradients: clipping, hooks, reading and editing, sparse ones, unused parameters."""

from __future__ import annotations

import torch
from torch import nn

import sherd
from tests.helpers.log_lines import log_lines
from tests.helpers.training import double, gradients, loss_of, sgd, train, weights
from tests.what_works.cases import case, refused


@case(
    "Gradients",
    "`torch.nn.utils.clip_grad_norm_`",
    "clips the gradient over all ranks; under ZeRO it sends a number for each and what ranks share",
)
def clipped_by_torch(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    norms = []
    for data in run.batches():
        loss_of(model, data).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms).double(), **weights(model)}


@case("Gradients", "`sherd.clip_grad_norm_`, `clip_norm=`", "the same clipping, and nothing is gathered")
def clipped_by_sherd(run):
    found = {}
    for how in ("call", "option"):
        model = double()
        options = {"clip_norm": 0.3} if how == "option" else {}
        model, optimizer = run.distribute(model, sgd(model), **options)
        for data in run.batches():
            loss_of(model, data).backward()
            if run.plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            elif how == "call":
                sherd.clip_grad_norm_(model, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        found.update({f"{how}.{name}": weight for name, weight in weights(model).items()})
    return found


@case("Gradients", "`torch.nn.utils.clip_grad_value_`", "clips the elements of the gradient over all ranks")
def clipped_by_value(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        loss_of(model, data).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Gradients", "`p.grad` read after `backward()`", "it is the gradient over all ranks; read it on every rank")
def read(run):
    model = double()
    model, _ = run.distribute(model, sgd(model))
    loss_of(model, next(run.batches())).backward()
    return gradients(model)


@case("Gradients", "`p.grad` edited, in place or by assignment", "counts in the next step, if every rank does it")
def edited(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        loss_of(model, data).backward()
        model[0].weight.grad.mul_(0.5)
        model[0].bias.grad = torch.ones_like(model[0].bias)
        model[2].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


# -------------------------------------------------------------------- hooks


@case(
    "Gradients",
    "`p.register_hook(...)`",
    "runs on each rank's own gradient, before they are averaged, registered before `distribute` or after it",
)
def tensor_hooks(run):
    model = double()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model, optimizer = run.distribute(model, sgd(model))
    model[2].weight.register_hook(lambda gradient: gradient * 3)
    train(model, optimizer, run.batches())
    return weights(model)


@case("Gradients", "Forward hooks and full backward hooks of modules", "are kept, and may change what passes them")
def module_hooks(run):
    model = double()
    calls = []

    def before(module, inputs):
        calls.append("before")
        return (inputs[0] * 2,)

    def after(module, inputs, output):
        calls.append("after")
        return output + 1

    def back(module, grad_input, grad_output):
        calls.append("back")
        return (grad_input[0] * 2,)

    model[0].register_forward_pre_hook(before)
    model[2].register_full_backward_hook(back)
    model, optimizer = run.distribute(model, sgd(model))
    handle = model[0].register_forward_hook(after)
    train(model, optimizer, run.batches(2))
    handle.remove()
    train(model, optimizer, run.batches(2))
    return {"calls": calls, **weights(model)}


@case("Gradients", "Hooks of `optimizer.step()`", "`register_step_pre_hook` and `register_step_post_hook` are called")
def step_hooks(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, run.batches())
    return {"calls": calls, **weights(model)}


@refused(
    "Gradients",
    "`p.register_post_accumulate_grad_hook(...)`",
    "it would find no gradient: use `p.grad` after `backward()`, or `p.register_hook` for this rank's own",
    match=r"'0\.weight' has a hook of register_post_accumulate_grad_hook.* use p\.grad after backward\(\)",
)
def post_accumulate_hooks(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    train(model, optimizer, run.batches())


# -------------------------------------------------------------------- sparse and unused


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 5, sparse=True)
        self.out = nn.Linear(5, 5)
        self.double()

    def forward(self, x):
        return self.out(self.words(x))


@case("Gradients", "`nn.Embedding(sparse=True)`", "is reduced as a dense gradient; a warning says so once")
def sparse(run):
    model = Words()
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with log_lines() as lines:
        for step, (_, y) in enumerate(run.batches()):
            words = run.rows(torch.tensor([0, 3, 3, 7, 7, step]))
            loss_of(model, (words, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [line for line in lines if "'words.weight' is sparse" in line]
    assert run.plain or len(said) == 1, said
    return weights(model)


class Branches(nn.Module):
    """Each row of a batch goes through the branch that is named beside it."""

    def __init__(self, branches=3, width=15):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(width, 5) for _ in range(branches))
        self.double()

    def forward(self, x, branch):
        parts = [self.branches[index](row) for row, index in zip(x, branch.tolist(), strict=True)]
        return torch.stack(parts)


def _branches(run, chosen, branches=3, **options):
    """Train with the branch of each of six rows chosen by step and row."""
    model = Branches(branches)
    model, optimizer = run.distribute(model, sgd(model), **options)
    for step, (x, y) in enumerate(run.batches(4)):
        branch = run.rows(torch.tensor([chosen(step, row) for row in range(6)]))
        (model(x, branch) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Gradients", "Parameters that no rank uses", "are left alone as in torch: no weight decay, no momentum")
def unused(run):
    return _branches(run, lambda step, row: step % 2)


@case("Gradients", "Parameters that only some ranks use", "count as zeros where they are not used; nothing to set")
def unused_on_some_ranks(run):
    return _branches(run, lambda step, row: row // 3 if step else row % 2)


@case("Gradients", "Other parameters unused in each step, in many small buckets", "`bucket_bytes=1024`, 24 layers")
def unused_in_many_buckets(run):
    return _branches(run, lambda step, row: (7 * step + 5 * row) % 24, branches=24, bucket_bytes=1024)


class Dropped(nn.Module):
    """Layers that are skipped at will."""

    def __init__(self, layers=16):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(layers))
        self.out = nn.Linear(15, 5)
        self.double()

    def forward(self, x, skip):
        for index, layer in enumerate(self.layers):
            if index not in skip:
                x = x + torch.tanh(layer(x))
        return self.out(x)


@case("Gradients", "Layers skipped at random (stochastic depth)", "other layers in each step, the same on every rank")
def skipped_layers(run):
    model = Dropped()
    model, optimizer = run.distribute(model, sgd(model), bucket_bytes=1024)
    for step, (x, y) in enumerate(run.batches(4)):
        skip = {(5 * step + 3 * index) % 16 for index in range(9)}
        (model(x, skip) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Gradients", "Layers skipped by each rank as it likes", "the ranks' mean, with zeros for what a rank skipped")
def skipped_by_rank(run):
    model = Dropped()
    model, optimizer = run.distribute(model, sgd(model), bucket_bytes=1024)
    for step, (x, y) in enumerate(run.batches(4)):
        halves = ((x, y, run.rank),)
        if run.plain:
            halves = tuple(zip(x.split(3), y.split(3), (0, 1), strict=True))
        losses = [(model(x, {step + rank, 9 + rank, 15 * rank}) - y).square().mean() for x, y, rank in halves]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Gradients", "A gradient that is kept over `zero_grad()`", "stays what it was: cosines of successive gradients")
def kept(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    last, turns = None, []
    for data in run.batches(4):
        loss_of(model, data).backward()
        now = [parameter.grad for parameter in model.parameters()]
        if last is not None:
            turns.append(sum((gradient * before).sum() for gradient, before in zip(now, last, strict=True)))
        last = now
        optimizer.step()
        optimizer.zero_grad()
    return {**weights(model), "turns": torch.stack(turns)}
