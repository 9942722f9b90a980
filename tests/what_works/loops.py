"""Training loops: what happens between one `step()` and the next."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.helpers.training import adamw, double, loss_of, network, sgd, train, weights
from tests.what_works.cases import case, refused, together


@case("Loops", "The plain loop", "the losses of each step agree too")
def plain_loop(run):
    model = double()
    model, optimizer = run.distribute(model, adamw(model))
    losses = []
    for data in run.batches():
        loss = loss_of(model, data)
        losses.append(run.mean(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), **weights(model)}


@case("Loops", "`zero_grad()` before `backward()`", "at the head of the loop or at its end, it is the same")
def zero_grad_first(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
    return weights(model)


@case("Loops", "Several `backward()` before a `step()`", "their gradients add up, as in torch")
def several_backwards(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for step in range(3):
        for data in run.batches(steps=2, start=2 * step):
            loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "No `zero_grad()` at all", "gradients of all steps add up, as in torch")
def never_zeroed(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        loss_of(model, data).backward()
        optimizer.step()
    return weights(model)


@case("Loops", "Several losses, `backward(retain_graph=True)`", "each adds its gradient")
def retained_graph(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.batches():
        out = model(x)
        (out - y).square().mean().backward(retain_graph=True)
        (out.abs().mean() * 0.1).backward(retain_graph=True)
        (out[:, 0].square().mean() * 0.01).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "`torch.autograd.backward([loss, other])`", "one backward from several losses")
def one_backward_of_two_losses(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.batches():
        out = model(x)
        torch.autograd.backward([(out - y).square().mean(), out.abs().mean() * 0.1])
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "The model called twice before one `backward()`", "as in contrastive losses")
def called_twice(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.batches():
        ((model(x) - y).square().mean() + (model(-x) - model(x).detach()).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "`torch.autocast`", "around the forward, or around the backward too; bfloat16", rtol=None)
def autocast(run):
    found = {}
    for around in ("forward", "both"):
        model = network()
        model, optimizer = run.distribute(model, sgd(model))
        for x, y in run.batches():
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, (x.float(), y.float()))
                if around == "both":
                    loss.backward()
            if around == "forward":
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[around] = weights(model)
    return together(**found)


@case("Loops", "A backward on some steps only", "on every rank alike; a `step()` without a gradient changes nothing")
def steps_without_backward(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for step, data in enumerate(run.batches(5)):
        if step % 2:
            loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "A `backward()` whose gradient is thrown away", "`zero_grad()` without a `step()`")
def thrown_away(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for step, data in enumerate(run.batches(5)):
        loss_of(model, data).backward()
        if step % 2 == 0:
            optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "`optimizer.step(closure)`", "the closure's loss is returned")
def closure(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    losses = []
    for data in run.batches():

        def evaluate(data=data):
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        losses.append(run.mean(optimizer.step(evaluate)))
    return {"losses": torch.stack(losses), **weights(model)}


@case(
    "Loops",
    '`LBFGS`, with `line_search_fn="strong_wolfe"` and without',
    "its closure's loss is reduced over the ranks as the gradient is, and `step(closure)` returns it on every rank",
    strategies=("ddp",),
)
def line_search(run):
    found = {}
    for search in ("strong_wolfe", None):
        model = double()
        lr = 1.0 if search else 0.1
        optimizer = torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=5, line_search_fn=search)
        model, optimizer = run.distribute(model, optimizer)
        losses = []
        for data in run.batches(rows=10):

            def evaluate(data=data, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, data)
                loss.backward()
                return loss

            losses.append(optimizer.step(evaluate).detach())
        found[str(search)] = {"losses": torch.stack(losses), **weights(model)}
    return together(**found)


@refused(
    "Loops",
    "A closure without `return loss`, for an optimizer that decides by the loss",
    "end the closure with `return loss`",
    match="the closure of LBFGS.* returned None .*`return loss`",
    strategies=("ddp",),
)
def closure_without_a_loss(run):
    model = double()
    model, optimizer = run.distribute(model, torch.optim.LBFGS(model.parameters()))
    data = next(run.batches())
    optimizer.step(lambda: loss_of(model, data).backward())


@case(
    "Loops",
    "`accumulate=2`",
    "every second `step()` is real; gradients are averaged over the backwards, so that nothing is divided by hand; the "
    "bits are the same under all strategies with the same `accumulate_at`, whose defaults differ",
)
def accumulated(run):
    found = {}
    for where in ("rank", "owner"):  # the two round differently
        model = double()
        model, optimizer = run.distribute(model, sgd(model), accumulate=2, accumulate_at=where)
        for micro, data in enumerate(run.batches(6)):
            loss = loss_of(model, data)
            (loss / 2 if run.plain else loss).backward()
            if micro % 2 or not run.plain:
                optimizer.step()
                optimizer.zero_grad()
        found[where] = weights(model)
    return together(**found)


# -------------------------------------------------------------------- dropping the gradient


@case("Loops", "`model.zero_grad()` instead of the optimizer's", "the same")
def model_zero_grad(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        model.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
    return weights(model)


@case("Loops", "`for p in model.parameters(): p.grad = None`", "the same")
def none_by_hand(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        loss_of(model, data).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return weights(model)


@case(
    "Loops",
    "`zero_grad(set_to_none=False)`",
    "a parameter without a new gradient is updated with zeros: momentum and weight decay go on",
)
def zeros_are_kept(run):
    found = {}
    for whose in ("optimizer", "model"):
        model = double()
        model, optimizer = run.distribute(model, sgd(model))
        for step, (x, y) in enumerate(run.batches(4)):
            hidden = model[:2](x) if step < 2 else torch.tanh(x[:, :7])  # the first layer is not used any more
            (model[2](hidden) - y).square().mean().backward()
            optimizer.step()
            (optimizer if whose == "optimizer" else model).zero_grad(set_to_none=False)
        found[whose] = weights(model)
    return together(**found)


# -------------------------------------------------------------------- schedulers


@case("Loops", "`LambdaLR` warm-up", "built before `distribute` or after it")
def warm_up(run):
    found = {}
    for when in ("before", "after"):
        model = double()
        optimizer = sgd(model)
        if when == "before":
            scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        model, optimizer = run.distribute(model, optimizer)
        if when == "after":
            scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        rates = []
        for data in run.batches(5):
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        found[when] = {"rates": rates, **weights(model)}
    return together(**found)


@case("Loops", "`OneCycleLR`", "momentum or betas that it changes count too")
def one_cycle(run):
    model = double()
    model, optimizer = run.distribute(model, adamw(model))
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    seen = []
    for data in run.batches(5):
        loss_of(model, data).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
    return {"seen": seen, **weights(model)}


@case("Loops", "`ReduceLROnPlateau`", "give every rank the same number: the loss averaged over the ranks")
def plateau(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model, lr=2.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    rates = []
    for data in run.batches(5):
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(round(run.mean(loss).item(), 6))
        rates.append(scheduler.get_last_lr()[0])
    assert rates[-1] < 2.0, "the rate was never reduced, so nothing was tested"
    return {"rates": rates, **weights(model)}


@case("Loops", "A learning rate set by hand in `optimizer.param_groups`", "counts from the next step")
def rate_by_hand(run):
    model = double()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    model, optimizer = run.distribute(model, torch.optim.SGD(groups, lr=0.1))
    for step, data in enumerate(run.batches()):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 ** (step + 1)
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


# -------------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    """A block that is used twice, in a checkpoint each time."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(15, 9)
        self.block = nn.Sequential(nn.Linear(9, 9), nn.Tanh())
        self.last = nn.Linear(9, 5)
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def _checkpointed(run, reentrant):
    model = Checkpointed(reentrant)
    # Small buckets: the block's second gradient comes when the bucket of its first one has been sent.
    model, optimizer = run.distribute(model, sgd(model), bucket_bytes=1024)
    train(model, optimizer, run.batches())
    return weights(model)


@case("Loops", "Activation checkpointing", "`use_reentrant=False`; blocks may be used several times")
def checkpointing(run):
    return _checkpointed(run, reentrant=False)


@case("Loops", "Activation checkpointing, reentrant", "`use_reentrant=True`, with its backwards inside the backward")
def checkpointing_reentrant(run):
    return _checkpointed(run, reentrant=True)


# -------------------------------------------------------------------- backwards out of the ordinary


@case(
    "Loops",
    "A gradient penalty on inputs (WGAN-GP)",
    "by `torch.autograd.grad(..., create_graph=True)` inside the loss, then `backward()`",
)
def gradient_penalty(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.batches():
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (loss_of(model, (x, y)) + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "`torch.autograd.grad` on parameters", "gives this rank's own gradient, and leaves `p.grad` alone")
def grad_of_parameters(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    first = None
    for data in run.batches():
        own = torch.autograd.grad(loss_of(model, data), list(model.parameters()))
        assert all(parameter.grad is None for parameter in model.parameters())
        first = [run.mean(each) for each in own] if first is None else first
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**weights(model), **{f"own {index}": each for index, each in enumerate(first)}}


@case("Loops", "`backward(inputs=[x])`", "the parameters get no gradient from it")
def backward_to_an_input(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    slopes = []
    for x, y in run.batches():
        x.requires_grad_(True)
        loss_of(model, (x, y)).backward(inputs=[x])
        assert all(parameter.grad is None for parameter in model.parameters())
        slopes.append(run.mean(x.grad.abs().sum()))  # each row's is that of the mean over a rank's rows
        loss_of(model, (x.detach() + x.grad.sign() * 0.01, y)).backward()  # an adversarial example
        optimizer.step()
        optimizer.zero_grad()
    return {"slopes": torch.stack(slopes), **weights(model)}


@case("Loops", "`backward(inputs=[...])` of some parameters", "the others have no gradient, and are not updated")
def backward_to_some_parameters(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches():
        loss_of(model, data).backward(inputs=list(model[2].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case("Loops", "A backward through a graph from before `step()`", "raises torch's own error: its weights have changed")
def stale_graph(run):
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    first, second = (loss_of(model, data) for data in run.batches(2))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    raised = ""
    try:
        second.backward()
    except RuntimeError as error:
        raised = str(error)
    return {"raised": "modified by an inplace operation" in raised, **weights(model)}


@case("Loops", "Truncated backpropagation through time", "a hidden state that is detached between steps")
def truncated(run):
    torch.manual_seed(0)
    model = nn.RNNCell(15, 5).double()
    model, optimizer = run.distribute(model, sgd(model))
    hidden = torch.zeros(6 // run.world, 5, dtype=torch.float64)
    for x, y in run.batches(4):
        hidden = model(x, hidden.detach())
        (hidden - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@refused(
    "Loops",
    "`loss.backward(create_graph=True)`",
    "the graph of the gradients would be lost: take the inner one with `torch.autograd.grad(..., create_graph=True)`",
    match=r"rank \d: backward\(create_graph=True\).* take the inner gradient with torch\.autograd\.grad",
)
def create_graph(run):
    model = double()
    model, _ = run.distribute(model, sgd(model))
    for data in run.batches():
        loss_of(model, data).backward(create_graph=True)
