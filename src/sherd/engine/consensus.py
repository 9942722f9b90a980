"""The consensus of all teams, for a while: what evaluation and saving should see where teams train apart.

Every rank keeps its own values aside, takes the consensus, and takes its own back at the end. Parameters must not be
changed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.engine import Engine, Update
from sherd.engine.parameters.isolation import isolated
from sherd.engine.policy import StepContext
from sherd.errors import SherdError

Kept = list[tuple[Tensor, Tensor]]
"""Tensors, each with a copy of what it had."""


@contextmanager
def consensus(engine: Engine) -> Iterator[None]:
    """Inside, parameters and buffers are the same on all ranks. Collective, at both ends."""
    if engine.teams.count == 1 or engine.at_consensus:
        yield
        return
    engine.torn.refuse("sherd.consensus")
    if engine.unchanged.lent:
        raise SherdError(f"rank {engine.comm.number}: sherd.consensus inside full_parameters; leave that first")
    s = StepContext(engine.steps, engine.teams, engine.buckets.buckets, engine.store, None)
    engine.unchanged.check()
    mine, buffers = _copies(bucket.values.owned for bucket in s.buckets), _copies(engine.inventory.model.buffers())
    with engine.teams.everyone.counters.between_steps(), isolated():
        _replace(engine, s, "the beginning of sherd.consensus", partial(engine.policy.agree_values, s))
        engine.share_buffers_of_all()
    engine.at_consensus, touched = True, False
    try:
        yield
        touched = engine.unchanged.touched()
    finally:
        engine.at_consensus = False
        engine.unchanged.accept()  # whatever was written inside is overwritten now
        with engine.teams.everyone.counters.between_steps(), isolated():
            _replace(engine, s, "the end of sherd.consensus", partial(_put_back, mine))
        _put_back(buffers)
    if touched:
        raise SherdError(
            f"rank {engine.comm.number}: parameters were changed inside sherd.consensus, and are lost at its end; "
            f"change them outside"
        )


def distance(engine: Engine) -> float:
    """How far this rank's team is from the mean of all teams: the 2-norm, over all parameters. Collective."""
    owner = engine.comm.rank if engine.store.updates_slices else None
    squared = 0.0
    with isolated(), engine.teams.everyone.counters.agreeing(), engine.teams.everyone.counters.between_steps():
        for bucket in engine.buckets.buckets:
            own = bucket.values.owned.detach()
            difference = own - engine.teams.across.all_reduce(own.clone(), op="mean").wait()
            squared += sum(float(difference[place].double().square().sum()) for place in _elements(bucket, owner))
        share = engine.comm.world if owner is None else 1  # without slices, every rank has all of it
        total = engine.comm.all_reduce(torch.tensor([squared / share], dtype=torch.float64)).wait()
    return float(total.sqrt())


def _elements(bucket: Bucket, owner: int | None) -> Iterator[slice]:
    """Where parameters are in what this rank owns of a bucket, without the padding between them."""
    for _, segment in bucket.segments(owner):
        yield slice(segment.offset, segment.offset + segment.numel)


def _replace(engine: Engine, s: StepContext, label: str, change: Callable[[], None]) -> None:
    """Change what this rank owns, and show it to the other ranks of its team."""
    with engine.changing(s, label, Update()):
        s.store.acquire(s.buckets)
        change()
        s.store.publish(s.buckets)


def _copies(tensors: Iterable[Tensor]) -> Kept:
    return [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]


def _put_back(kept: Kept) -> None:
    for tensor, before in kept:
        with (
            torch.inference_mode(tensor.is_inference()),
            torch.no_grad(),
        ):  # only this may write into an inference tensor
            tensor.copy_(before)
