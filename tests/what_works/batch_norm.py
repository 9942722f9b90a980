"""Cases of buffers, and of normalisation over the batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.training import sgd, weights
from tests.what_works.cases import STEPS, case, refused, together


def _network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), norm(7), nn.Tanh(), nn.Linear(7, 5)).double()


def _train(model, optimizer, batches):
    for x, y in batches:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    buffers = {name: value.double() for name, value in model.named_buffers()}
    return together(weights=weights(model), buffers=buffers)


def _ghost(run, norm, buffers):
    """What ranks with batches of their own do, in one process: a forward for each part of the batch."""
    model = _network(norm)
    optimizer = sgd(model)
    for step in range(STEPS):
        parts, before = [], [b.clone() for b in model.buffers()]
        for rank in range(2):
            for now, then in zip(model.buffers(), before, strict=True):
                now.copy_(then)
            x, y = (whole.tensor_split(2)[rank] for whole in list(run.batches(STEPS))[step])
            ((model(x) - y).square().mean() / 2).backward()
            parts.append([b.clone() for b in model.buffers()])
        for now, first, other in zip(model.buffers(), *parts, strict=True):
            now.copy_((first + other) / 2 if buffers == "mean" and now.is_floating_point() else first)
        optimizer.step()
        optimizer.zero_grad()
    return together(weights=weights(model), buffers={n: b.double() for n, b in model.named_buffers()})


@case(
    "Buffers and batch norm",
    "`nn.BatchNorm1d` and its like",
    "each rank normalises its own batch; running statistics become their mean at each step, so that all ranks evaluate "
    "alike (compared with plain torch that normalises the parts one after the other)",
)
def batch_norm(run):
    if run.plain:
        return _ghost(run, nn.BatchNorm1d, "mean")
    model = _network(nn.BatchNorm1d)
    return _train(*run.distribute(model, sgd(model)), run.batches())


@case("Buffers and batch norm", '`sync_buffers="leader"`', "running statistics are rank 0's, as under torch's DDP")
def leader(run):
    if run.plain:
        return _ghost(run, nn.BatchNorm1d, "leader")
    model = _network(nn.BatchNorm1d)
    return _train(*run.distribute(model, sgd(model), sync_buffers="leader"), run.batches())


@case(
    "Buffers and batch norm",
    "`nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
    "statistics of the batches of all ranks, on CPU too: exactly `nn.BatchNorm` on the whole batch",
)
def sync_batch_norm(run):
    model = _network(nn.BatchNorm1d)
    if not run.plain:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    found = _train(*run.distribute(model, sgd(model)), run.batches())
    with torch.no_grad():
        judged = model.eval()(torch.ones(2, 15, dtype=torch.float64))
    return {**found, "judged": judged}


@case("Buffers and batch norm", "Running statistics left out", "`track_running_stats=False`, `momentum=None`")
def unusual_statistics(run):
    def norm(width):
        return nn.Sequential(
            nn.SyncBatchNorm(width, track_running_stats=False, affine=False),
            nn.Sigmoid(),
            nn.SyncBatchNorm(width, momentum=None),
        )

    def plain(width):
        return nn.Sequential(
            nn.BatchNorm1d(width, track_running_stats=False, affine=False),
            nn.Sigmoid(),
            nn.BatchNorm1d(width, momentum=None),
        )

    model = _network(plain if run.plain else norm)
    return _train(*run.distribute(model, sgd(model)), run.batches())


class Counting(nn.Module):
    """A buffer that the forward changes alike everywhere, one that it replaces, and a constant one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(15, 5).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(15, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(15, dtype=torch.bool))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x * self.mask)


@case("Buffers and batch norm", "Buffers of your own", "averaged if they are floats and changed, otherwise rank 0's")
def own_buffers(run):
    model = Counting()
    return _train(*run.distribute(model, sgd(model)), run.batches())


@case("Buffers and batch norm", "`nn.LayerNorm`, `nn.GroupNorm`, `nn.InstanceNorm1d`", "know nothing of the batch")
def other_norms(run):
    def norm(width):
        return nn.Sequential(nn.LayerNorm(width), nn.GroupNorm(1, width), nn.Unflatten(1, (width, 1)), nn.Flatten())

    model = _network(norm)
    return _train(*run.distribute(model, sgd(model)), run.batches())


class Cached(nn.Module):
    """A table that grows as longer inputs come, also during evaluation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(15, 5).double()
        self.register_buffer("table", torch.zeros(0, dtype=torch.float64), persistent=False)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=torch.float64)
        return self.layer(x) + 0 * self.table[: len(x), None]


@case(
    "Buffers and batch norm", "A buffer that is rebuilt under `torch.inference_mode`", "caches that grow in evaluation"
)
def cached(run):
    model = Cached()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.batches():
        with torch.inference_mode():
            model(torch.ones(9, 15, dtype=torch.float64))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(15, 7), nn.Linear(15, 7)]).double()
        self.norms = nn.ModuleList(nn.BatchNorm1d(7) for _ in range(3)).double()
        self.between = nn.ModuleList(nn.Linear(7, 7) for _ in range(3)).double()
        self.head = nn.Linear(7, 5).double()

    def forward(self, x, part):
        x = torch.cat([self.branches[index](rows) for index, rows in zip(part, x.split(3), strict=True)])
        for norm, layer in zip(self.norms, self.between, strict=True):
            x = torch.tanh(norm(layer(x)))
        return self.head(x)


@case(
    "Buffers and batch norm",
    "`nn.SyncBatchNorm`, and parameters that are used on one rank only",
    "gradients are then exchanged at the end of the backward",
)
def sync_batch_norm_and_branches(run):
    model = Branching()
    if not run.plain:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model, optimizer = run.distribute(model, sgd(model), bucket_bytes=1024)
    for x, y in run.batches():
        (model(x, (0, 1) if run.plain else (run.rank,)) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@refused(
    "Buffers and batch norm",
    "Sparse buffers",
    "keep them as plain attributes, or make them dense",
    match="buffer 'adjacency' is sparse",
)
def sparse_buffer(run):
    model = nn.Linear(15, 5)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    run.distribute(model)
