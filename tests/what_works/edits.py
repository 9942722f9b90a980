"""Programs that write into parameters themselves."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.training import double, loss_of, sgd, train, weights
from tests.what_works.cases import case, refused, together

SECTION = "Writing into parameters"


def _distributed(run, **options):
    model = double()
    return run.distribute(model, sgd(model), **options)


@case(SECTION, "Updates written by hand through `.data`", "`p.data.add_(p.grad, alpha=-lr)`, without an optimizer")
def by_hand(run):
    model = run.distribute(double())
    for data in run.batches(5):
        model.zero_grad()
        loss_of(model, data).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
    return weights(model)


@case(SECTION, "Updates written by hand under `torch.no_grad()`", "`p -= lr * p.grad`, without an optimizer")
def by_hand_no_grad(run):
    model = run.distribute(double())
    for data in run.batches(5):
        loss_of(model, data).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return weights(model)


@case(SECTION, "An optimizer that `distribute` was not given", "steps this rank's copy", strategies=("ddp",))
def not_given(run):
    model = run.distribute(double())
    optimizer = sgd(model)
    train(model, optimizer, run.batches(4))
    return weights(model)


@refused(
    SECTION,
    "The same where ranks have parts",
    "pass it: `sherd.distribute(model, optimizer)`",
    match=r"this SGD steps a distributed model, but was not passed to sherd\.distribute.*write model, optimizer = ",
    strategies=("zero1", "zero2", "zero3"),
)
def not_given_under_zero(run):
    model = run.distribute(double())
    train(model, sgd(model), run.batches(1))


def _routes(model):
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    yield
    nn.init.constant_(model[2].bias, 0.25)
    yield
    model[2].weight.data[1:3] = 0.125
    yield
    model[0].bias.data = torch.linspace(-1, 1, 7, dtype=torch.float64)
    yield
    model[2].weight.data = model[2].weight.detach().flip(0)
    yield
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    yield


@case(SECTION, "Weights edited by every rank alike", "by `no_grad`, `nn.init`, `.data`, `p.data = x`, a vector")
def routes(run):
    model, optimizer = _distributed(run)
    seen = {}
    for number, (data, _) in enumerate(zip(run.batches(6), _routes(model), strict=True)):
        seen[f"after route {number}"] = weights(model)
        train(model, optimizer, [data])
    return together(**seen, end=weights(model))


@case(SECTION, "Weights edited between `backward()` and `step()`", "the step starts from them")
def before_the_step(run):
    model, optimizer = _distributed(run)
    for data, _ in zip(run.batches(6), _routes(model), strict=True):
        loss_of(model, data).backward()
        model[2].weight.data.mul_(1.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case(SECTION, "Weights clamped after every step", "`p.data.clamp_(-c, c)`, as a Wasserstein GAN does")
def clamped(run):
    model, optimizer = _distributed(run)
    for data in run.batches(4):
        train(model, optimizer, [data])
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    return weights(model)


@case(SECTION, "Averaged weights swapped in on rank 0, evaluated and swapped back", "no edit: nothing is compared")
def swapped(run):
    model, optimizer = _distributed(run, sync_buffers="none") if not run.plain else _distributed(run)
    average = weights(model)
    losses = []
    for data in run.batches(4):
        train(model, optimizer, [data])
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.data, 0.5)
        if run.rank == 0:
            before = weights(model)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(average[name])
            with torch.no_grad():
                losses.append(model(torch.ones(2, 15, dtype=torch.float64)).sum())
            for name, parameter in model.named_parameters():
                parameter.data.copy_(before[name])
            kept = {name: parameter.data for name, parameter in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.data = average[name]
            with torch.no_grad():
                again = model(torch.ones(2, 15, dtype=torch.float64)).sum()
            assert again == losses[-1]
            for name, parameter in model.named_parameters():
                parameter.data = kept[name]
    return together(average=average, end=weights(model))


@case(SECTION, "Weights edited by hooks of the optimizer's step", "before it and after it")
def by_step_hooks(run):
    model, optimizer = _distributed(run)
    seen = []

    def shrink(*_):
        for parameter in model.parameters():
            parameter.data.mul_(0.9)

    def clamp(*_):
        seen.append(sum(parameter.detach().sum() for parameter in model.parameters()))
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    optimizer.register_step_pre_hook(shrink)
    optimizer.register_step_post_hook(clamp)
    train(model, optimizer, run.batches(4))
    return together(weights=weights(model), seen=dict(enumerate(seen)))


@case(SECTION, "Gradients edited by a hook of the optimizer's step", "clipped there by torch's own function")
def gradients_by_step_hooks(run):
    model, optimizer = _distributed(run)

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    train(model, optimizer, run.batches(4))
    return weights(model)


@case(SECTION, "Two parameters whose data is swapped", "`a.data, b.data = b.data, a.data`")
def swapped_data(run):
    torch.manual_seed(0)
    model = nn.Sequential(double(), nn.Linear(5, 5).double(), nn.Tanh(), nn.Linear(5, 5).double())
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches(4):
        train(model, optimizer, [data])
        one, other = model[1].weight, model[3].weight
        one.data, other.data = other.data, one.data
    return weights(model)


@case(SECTION, "A weight that is transposed in place", "`p.data = p.data.t()`")
def transposed(run):
    torch.manual_seed(0)
    model = nn.Sequential(double(), nn.Linear(5, 5).double())
    model, optimizer = run.distribute(model, sgd(model))
    for data in run.batches(4):
        train(model, optimizer, [data])
        model[1].weight.data = model[1].weight.data.t()
    return weights(model)


class _Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as PEFT has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * base.in_features, dtype=torch.float64).view(2, -1))
        self.up = nn.Parameter(torch.linspace(-0.1, 0.1, 2 * base.out_features, dtype=torch.float64).view(-1, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


@case(SECTION, "Adapters merged into frozen weights", "`base.weight.data += up @ down`, as PEFT does")
def merged(run):
    torch.manual_seed(0)
    frozen = nn.Linear(15, 7).double().requires_grad_(False)
    model = nn.Sequential(_Adapted(frozen), nn.Tanh(), nn.Linear(7, 5).double())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = run.distribute(model, torch.optim.SGD(trained, lr=0.1))
    train(model, optimizer, run.batches(3))
    layer = model[0]
    layer.base.weight.data += (layer.up @ layer.down).detach()
    nn.init.zeros_(layer.up)
    merged = weights(model)
    total = {"sum": sum(parameter.sum() for parameter in merged.values())}
    train(model, optimizer, run.batches(2, start=3))
    return together(merged=merged, total=total, end=weights(model))


@refused(
    SECTION,
    "`model.share_memory()` later",
    "share a copy: updates would not reach it",
    match=r"'0\.weight' was moved into shared memory by share_memory.*copy\.deepcopy",
    strategies=("zero1", "zero2", "zero3"),
)
def shared_memory(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(1))
    model.share_memory()
    train(model, optimizer, run.batches(1))


@refused(
    "Ranks that disagree",
    "Weights edited through `.data` on one rank only",
    "make the same edits on every rank",
    match=r"(?=.*'0\.weight' was edited only on rank 1 of 2)(?=.*same edits on every rank)",
    strategies=("zero1", "zero2", "zero3"),
)
def edited_on_one_rank(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(2))
    if run.rank == 1:
        model[0].weight.data[3] += 1.0
    train(model, optimizer, run.batches(2))


@refused(
    "Ranks that disagree",
    "Rows of weights shuffled differently through `.data`",
    "shuffle them from the same seed",
    match=r"'2\.weight' was edited differently on rank 0 and rank 1",
    strategies=("zero1", "zero2", "zero3"),
)
def shuffled(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(2))
    model[2].weight.data = model[2].weight.data[[1, 0, 2, 3, 4]] if run.rank else model[2].weight.data[[0, 2, 1, 3, 4]]
    train(model, optimizer, run.batches(2))
