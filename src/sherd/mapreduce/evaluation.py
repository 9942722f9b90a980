"""`sherd.evaluate`: exact metrics of a model over all samples of a loader, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sherd.api.helpers.process import communicator
from sherd.api.members import engines_of
from sherd.comm import Communicator
from sherd.engine.consensus import consensus
from sherd.errors import ConfigError
from sherd.mapreduce import randomness
from sherd.mapreduce.agreeing import Settings, compared
from sherd.mapreduce.grouping import Entry, merging, reduced
from sherd.mapreduce.lock_step import LockStep
from sherd.mapreduce.mapping import Job, MapPhase, Partial
from sherd.mapreduce.metrics import Metric, metrics_of
from sherd.mapreduce.reducing import checked_options, record
from sherd.mapreduce.sources import Source, source_of

WHAT = "sherd.evaluate"
Forward = Callable[[Any, Any], tuple[Any, Any]]
"""forward(model, batch): the output of the model, and the target."""


def evaluate(
    model: nn.Module,
    loader: DataLoader[Any],
    metrics: Any,
    *,
    forward: Forward | None = None,
    chunk: int | None = None,
    retries: int = 0,
    desc: str = "evaluate",
    progress: bool = True,
) -> dict[str, Any]:
    """The metrics of a model over every sample of a loader, each counted once; the same on every rank. Collective.

        found = sherd.evaluate(model, loader, {"loss": F.cross_entropy, "accuracy": lambda out, y: out.argmax(1) == y})

    Works under every strategy and in the middle of training, which it does not change: modules are in eval mode inside
    and get their own mode back, there are no gradients, and random numbers are untouched.

    model: distributed, or a plain one that is the same on every rank.
    loader: distributed or not. It is read as a whole, in the order of its dataset, also what `drop_last` leaves out.
    metrics: by name, functions of output and target, or objects of torchmetrics. A function returns the mean over the
        batch, which is weighted by its samples, or one value for each sample, or a pair (mean, weight), such as the
        loss per token and the number of tokens. Objects are copied: yours stay as they are.
    forward: `forward(model, batch)` returns output and target. Default: the last item of a batch is the target, and the
        others are the model's arguments.
    chunk, retries, desc, progress: as in `sherd.map_reduce`; items are batches. Where a forward is collective, as under
        zero3 across hosts, batches are dealt in turn and nothing is retried.
    """
    comm = communicator_for(model)
    work: dict[str, Any] = {}

    def prepare() -> Settings:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"got a {type(model).__name__} as model; write sherd.evaluate(model, loader, metrics)")
        if forward is not None and not callable(forward):
            raise ConfigError(f"got forward={forward!r}; write a function of model and batch")
        found = metrics_of(metrics)
        with randomness.untouched():
            randomness.begin(0, -1)
            source = source_of(loader)
        options = checked_options(source, chunk, retries, 0)
        work.update(source=source, metrics=found, options=options)
        return {"data": (source.kind, source.count, source.checksum), "metrics": list(found), **options}

    name = compared(comm, WHAT, prepare)
    source: Source = work["source"]
    source.agree(comm.broadcast_object)
    found: dict[str, Metric] = work["metrics"]
    step = forward or _default_forward
    job = Job(
        WHAT,
        source,
        fold=_folding(model, source, found, step),
        merge=merging(found.__getitem__),
        desc=desc,
        progress=progress,
        **work["options"],
    )
    began = time.monotonic()
    with evaluation_view(model), evaluating(model):
        together = any(not engine.store.whole for engine in engines_of(model)) and comm.world > 1
        phase = LockStep(comm, job, lambda batch: step(model, batch)) if together else MapPhase(comm, job, name)
        phase.run()
    record(job, phase.done, time.monotonic() - began)
    results = reduced(comm, WHAT, phase.forest, found.__getitem__)
    if not results:
        raise ConfigError(f"rank {comm.rank}: {WHAT} got a loader without batches, and so there is nothing to average")
    return results


def communicator_for(model: Any) -> Communicator:
    """The one of the model's ranks. The only place that says who takes part."""
    engines = engines_of(model) if isinstance(model, nn.Module) else []
    return engines[0].teams.everyone if engines else communicator()


@contextmanager
def evaluation_view(model: nn.Module) -> Iterator[None]:
    """Inside, all ranks have the same model: the one to evaluate. Collective.

    Parameters are the same already under strategies that sum gradients. Buffers that ranks have not made equal yet, as
    between a forward and the step, are what the step would make of them. Under strategies whose ranks differ between
    exchanges it is their consensus.
    """
    with ExitStack() as view:
        for engine in engines_of(model):
            engine.torn.refuse(WHAT)
            if engine.teams.count > 1:
                view.enter_context(consensus(engine))
            else:
                for buffers in engine.buffers:
                    view.enter_context(buffers.agreed())
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every module is in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _folding(model: nn.Module, source: Source, metrics: dict[str, Metric], forward: Forward) -> Callable[..., Partial]:
    def fold(batches: Iterator[tuple[int, Any]]) -> Partial:
        for metric in metrics.values():
            metric.begin()
        for number, batch in batches:
            output, target = forward(model, batch)
            samples = source.samples(number, batch)
            for metric in metrics.values():
                metric.update(output, target, samples)
        named = enumerate(metrics.items())
        return {name: Entry((position, 0), 1, metric.collected()) for position, (name, metric) in named}

    return fold


def _default_forward(model: Any, batch: Any) -> tuple[Any, Any]:
    if type(batch) not in (tuple, list) or len(batch) < 2:
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, so it is not known what the model takes and what the target is; "
            f"write forward=lambda model, batch: (model(...), ...), which returns output and target"
        )
    parameter = next(model.parameters(), None)
    *inputs, target = _moved(batch, None if parameter is None else parameter.device)
    return model(*inputs), target


def _moved(value: Any, device: torch.device | None) -> Any:
    if device is None or device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if type(value) is dict:
        return {key: _moved(each, device) for key, each in value.items()}
    return type(value)(_moved(each, device) for each in value) if type(value) in (tuple, list) else value
