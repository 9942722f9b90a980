"""The one line that changes."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from sherd.api import process, seeding
from sherd.api.carrying_out import carry_out
from sherd.api.plan import Plan
from sherd.api.together import together
from sherd.comm import Communicator, labelled
from sherd.config import CommOptions, LoaderOptions, StepOptions
from sherd.errors import ConfigError, nearest
from sherd.strategies import Strategy, default, resolve

Model = TypeVar("Model", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)
Loader = TypeVar("Loader")


@overload
def distribute(model: Model, /, **options: Any) -> Model: ...
@overload
def distribute(model: Model, optimizer: Opt, /, **options: Any) -> tuple[Model, Opt]: ...
@overload
def distribute(model: Model, optimizer: Opt, loader: Loader, /, **options: Any) -> tuple[Model, Opt, Loader]: ...
@overload
def distribute(*things: Any, **options: Any) -> Any: ...
def distribute(
    *things: Any,
    strategy: str | Strategy | None = None,
    accumulate: int = 1,
    accumulate_at: str | None = None,
    clip_norm: float | None = None,
    nonfinite: str = "skip",
    loss_reduction: str = "mean",
    sync_buffers: str = "mean",
    bucket_bytes: int | None = None,
    check: str = "versions",
    global_batch: int | None = None,
    iterable: str | None = None,
    comm: CommOptions | Communicator | None = None,
    **unknown: Any,
) -> Any:
    """Train a model on all ranks of this job. Returns what it was given: the same objects, ready for the same loop.

        model, optimizer, loader = sherd.distribute(model, optimizer, loader)

    Takes the model, its optimizer and loaders, by position; of these only the model is a must. Several models come
    together if one optimizer trains them all: `sherd.distribute(encoder, decoder, optimizer)`; models with optimizers
    of their own, as in a GAN, are distributed one after the other.

    Collective: all ranks call it, with the same models, and take rank 0's weights. Under torchrun or `sherd run` it
    starts torch.distributed if nobody has; without them it is a world of one.

    All or nothing: what is wrong on one rank is refused on every rank, and then model, optimizer and loaders are as
    before, to be passed again.

    strategy: "ddp", "zero1", "zero2", "zero3", or an object with options such as `sherd.ZeRO(stage=2, ...)`. Without
        one, what `sherd run --strategy` says, else "zero2".
    accumulate: every K-th `step()` is the real one; `step()`, `zero_grad()` and a scheduler's `step()` do nothing in
        between. The gradient is the mean over ranks and backwards (the sum, with `loss_reduction="sum"`). Strategies
        then give the same bits if you write the same `accumulate_at="rank"` or `"owner"`: their defaults differ.
    accumulate_at, clip_norm, nonfinite, loss_reduction, sync_buffers, bucket_bytes, check: see `sherd.StepOptions`.
    global_batch, iterable: see `sherd.LoaderOptions`.
    comm: options for the communicator, or one that exists.
    """
    if not isinstance(comm, CommOptions | Communicator | None):
        raise ConfigError(f"distribute takes comm=sherd.CommOptions(...) or a communicator, got {comm!r}")
    with ExitStack() as undo:
        ranks = comm if isinstance(comm, Communicator) else process.connect_for(comm)
        if ranks is not comm:
            undo.push(ranks)  # closes it with the error, which other ranks then hear of

        def make() -> Plan:
            for name in unknown:
                raise ConfigError(_unknown(name))
            options = StepOptions(
                accumulate=accumulate,
                accumulate_at=accumulate_at,
                clip_norm=clip_norm,
                nonfinite=nonfinite,
                loss_reduction=loss_reduction,
                sync_buffers=sync_buffers,
                bucket_bytes=bucket_bytes,
                check=check,
            )
            loading = LoaderOptions(global_batch=global_batch, iterable=iterable)
            return Plan.of(things, default() if strategy is None else resolve(strategy), options, loading, ranks)

        plan = together(ranks, make)
        with labelled("sherd.distribute"):
            plan.compare(ranks)
            carry_out(plan, ranks, undo)
        undo.pop_all()
    process.distributed_over(ranks, accumulate, made_here=ranks is not comm)
    seeding.by_rank(ranks)
    return things if len(things) > 1 else things[0]


def _unknown(name: str) -> str:
    if name in ("model", "optimizer", "loader"):
        return f"distribute takes the {name} by position: sherd.distribute(model, optimizer, loader, strategy=...)"
    fields = (*dataclasses.fields(StepOptions), *dataclasses.fields(LoaderOptions))
    valid = ("strategy", "comm", *(field.name for field in fields))
    return f"distribute has no option {name!r}; {nearest(name, valid)}"
