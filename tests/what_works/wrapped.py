"""Torch's own wrappers, applied to a model that is already distributed."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.training import double, sgd, train
from tests.what_works.cases import refused

SECTION = "After distribute"


def _match(wrapper):
    return rf"rank \d: torch's {wrapper} was applied to a model .*; drop the wrapper and use `model` as it is"


def _wrap(run, wrap):
    """A step, then the wrapper, then more steps through it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = double()
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(1))
    train(wrap(model), optimizer, run.batches(2, start=1))


@refused(
    SECTION,
    "`DistributedDataParallel(model)`, as by Accelerate or a trainer that stands on it",
    "the model is ready as it is: drop the wrapper",
    match=_match("DistributedDataParallel"),
)
def ddp_around(run):
    _wrap(run, DistributedDataParallel)


@refused(
    SECTION,
    "`DistributedDataParallel` around a module that contains the model, or a part of it",
    "wrap the rest, and leave the distributed model outside",
    match=_match("DistributedDataParallel"),
)
def ddp_around_more(run):
    if run.strategy in ("ddp", "zero2"):
        _wrap(run, lambda model: DistributedDataParallel(module=nn.Sequential(model, nn.Linear(5, 5).double())))
    else:
        _wrap(run, lambda model: DistributedDataParallel(model[2]))


@refused(
    SECTION,
    "`nn.DataParallel(model)`",
    "the same",
    match=_match("DataParallel"),
)
def data_parallel_around(run):
    _wrap(run, nn.DataParallel)


@refused(
    SECTION,
    "FSDP around the model: `fully_shard(model)`, `FullyShardedDataParallel(model)`",
    'the same; `strategy="zero3"` shards it. (Where FSDP is imported after `distribute` the next backward finds it.)',
    match=_match("(fully_shard|FullyShardedDataParallel)"),
)
def fsdp_around(run):
    from torch.distributed import fsdp  # by the ranks that need it: it takes seconds

    _wrap(run, fsdp.fully_shard if run.strategy in ("ddp", "zero2") else fsdp.FullyShardedDataParallel)
