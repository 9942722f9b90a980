"""The one line that changes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from sherd.api import optimizer as optimizers
from sherd.api.arguments import sort_out
from sherd.api.foreign import refuse_foreign_steps
from sherd.api.membership import enrol
from sherd.api.schedulers import guard_schedulers
from sherd.api.training import Training
from sherd.api.updaters import check_optimizer, check_parameters, updater_for
from sherd.api.wrappers import refuse_wrappers
from sherd.comm import Communicator, connect
from sherd.config import CommOptions, LoaderOptions, StepOptions
from sherd.data import shard
from sherd.engine.choices import AccumulateAt, Choices, Gradients
from sherd.engine.engine import Engine
from sherd.engine.inventory import Inventory
from sherd.engine.settings import compare_optimizers
from sherd.engine.sync_batch_norm import share_statistics
from sherd.errors import ConfigError, Diverged, nearest
from sherd.strategies import Strategy, resolve

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
    strategy: str | Strategy = "zero2",
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

    strategy: "ddp", "zero1", "zero2", "zero3", or an object with options such as `sherd.ZeRO(stage=2, ...)`.
    accumulate: every K-th `step()` is the real one; `step()`, `zero_grad()` and a scheduler's `step()` do nothing in
        between. The gradient is the mean over ranks and backwards (the sum, with `loss_reduction="sum"`). Strategies
        then give the same bits if you write the same `accumulate_at="rank"` or `"owner"`: their defaults differ.
    accumulate_at, clip_norm, nonfinite, loss_reduction, sync_buffers, bucket_bytes, check: see `sherd.StepOptions`.
    global_batch, iterable: see `sherd.LoaderOptions`.
    comm: options for the communicator, or one that exists.
    """
    for name in unknown:
        raise ConfigError(_unknown(name))
    chosen = resolve(strategy)
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
    models, optimizer, loaders = sort_out(things)
    loading = LoaderOptions(global_batch=global_batch, iterable=iterable)
    if not loaders and loading != LoaderOptions():
        raise ConfigError(f"{loading} is about a loader; pass it: sherd.distribute(model, optimizer, loader)")
    if optimizer is None and options.accumulate > 1:
        raise ConfigError(
            f"accumulate={options.accumulate} counts the optimizer's step() calls, and no optimizer was passed; write "
            f"sherd.distribute(model, optimizer, accumulate={options.accumulate})"
        )
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    inventory = Inventory.of(model, dry=isinstance(comm, Communicator) and comm.dry)
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        check_parameters(group["params"], inventory.parameters, f"the optimizer's group {index}")
    ranks = comm if isinstance(comm, Communicator) else connect(comm)
    _compare(ranks, (chosen, options, loading))
    inventory.compare(ranks)
    choices = _choices(chosen.choose(ranks, inventory.device), options)
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in zip(inventory.names, inventory.parameters, strict=True)}
        compare_optimizers(ranks, optimizer, names)
        check_optimizer(optimizer, choices, chosen)
    for loader in loaders:
        first = loader is loaders[0]  # the one to train with; others keep their own batch size
        its = loading if first else loading.replace(global_batch=None)
        shard(loader, ranks, its, options.accumulate, announce=first)
    engine = Engine(ranks, inventory, choices, options, optimizer)
    updater = None
    if optimizer is not None:
        updater = updater_for(optimizer, engine)
        optimizers.adopt(optimizer)
    training = Training(engine, chosen, updater)
    for thing in (*models, optimizer):
        if thing is not None:
            training.own(thing)
    enrol(model, engine)
    refuse_foreign_steps()
    refuse_wrappers()
    share_statistics(model, engine)
    if options.accumulate > 1:
        guard_schedulers()
    return things if len(things) > 1 else things[0]


def _unknown(name: str) -> str:
    if name in ("model", "optimizer", "loader"):
        return f"distribute takes the {name} by position: sherd.distribute(model, optimizer, loader, strategy=...)"
    fields = (*dataclasses.fields(StepOptions), *dataclasses.fields(LoaderOptions))
    valid = ("strategy", "comm", *(field.name for field in fields))
    return f"distribute has no option {name!r}; {nearest(name, valid)}"


def _choices(choices: Choices, options: StepOptions) -> Choices:
    """What the strategy chose, with what the user said about accumulation."""
    if options.accumulate_at is not None:
        choices = dataclasses.replace(choices, accumulate_at=AccumulateAt(options.accumulate_at))
    if choices.accumulate_at is AccumulateAt.RANK and choices.gradients is Gradients.SLICES:
        # A rank that adds up its own gradient needs room for all of it.
        choices = dataclasses.replace(choices, gradients=Gradients.WHOLE)
    return choices


def _compare(comm: Communicator, mine: tuple[Strategy, StepOptions, LoaderOptions]) -> None:
    """Refuse options that differ between ranks. Collective."""
    everybody, rank = comm.compare_object(mine)
    for first, other in zip(everybody[0], everybody[rank], strict=True):
        if first != other:
            raise Diverged(
                f"the ranks' options differ: rank 0 has {first} where rank {rank} has {other}; "
                f"call sherd.distribute with the same options on every rank",
                ranks=(0, rank),
            )
