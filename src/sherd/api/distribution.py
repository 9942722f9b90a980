"""The one line that changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import EllipsisType
from typing import Any, Literal, TypeVar, overload

from torch import nn
from typing_extensions import Unpack

from sherd.api.apply import carry_out, together
from sherd.api.helpers import process, seeding
from sherd.api.plan import Plan
from sherd.api.typing import (
    AccumulateAt,
    Check,
    DistributeOptions,
    Dtype,
    LossReduction,
    NonFinite,
    Precision,
    StrategyName,
    Streams,
    SyncBuffers,
    Thing,
)
from sherd.comm import Communicator, labelled
from sherd.config import CommOptions, LoaderOptions, LossScale, StepOptions
from sherd.errors import ConfigError, nearest
from sherd.patches.process import heap
from sherd.strategies import Strategy, chosen

A = TypeVar("A", bound=Thing)
B = TypeVar("B", bound=Thing)
C = TypeVar("C", bound=Thing)
D = TypeVar("D", bound=Thing)
E = TypeVar("E", bound=Thing)


@overload
def distribute(a: A, /, **options: Unpack[DistributeOptions]) -> A: ...
@overload
def distribute(a: A, b: B, /, **options: Unpack[DistributeOptions]) -> tuple[A, B]: ...
@overload
def distribute(a: A, b: B, c: C, /, **options: Unpack[DistributeOptions]) -> tuple[A, B, C]: ...
@overload
def distribute(a: A, b: B, c: C, d: D, /, **options: Unpack[DistributeOptions]) -> tuple[A, B, C, D]: ...
@overload
def distribute(a: A, b: B, c: C, d: D, e: E, /, **options: Unpack[DistributeOptions]) -> tuple[A, B, C, D, E]: ...
@overload
def distribute(
    a: Thing, b: Thing, c: Thing, d: Thing, e: Thing, f: Thing, /, *more: Thing, **options: Unpack[DistributeOptions]
) -> tuple[Any, ...]: ...
def distribute(
    *things: Any,
    strategy: StrategyName | Strategy | None = None,
    accumulate: int = 1,
    accumulate_at: AccumulateAt | None = None,
    clip_norm: float | None = None,
    nonfinite: NonFinite | None = None,
    loss_scale: LossScale | None = None,
    loss_reduction: LossReduction = "mean",
    sync_buffers: SyncBuffers = "mean",
    bucket_bytes: int | None = None,
    check: Check = "versions",
    groups: Mapping[str, Sequence[int]] | None = None,
    precision: Precision = "fp32",
    grad_dtype: Literal["fp32", "bf16"] | None = None,
    wire_dtype: Dtype | None = None,
    keep_fp32: Sequence[str | type[nn.Module] | EllipsisType] | None = None,
    global_batch: int | None = None,
    iterable: Streams | None = None,
    comm: CommOptions | Communicator | None = None,
    **unknown: Any,
) -> Any:
    """Train a model on all ranks of this job. Returns the objects it was given, ready for the same training loop.

        model, optimizer, loader = sherd.distribute(model, optimizer, loader)

    Takes the model, its optimizers and its loaders, by position; only the model is required. Pass several models in one
    call if one optimizer trains them all: `sherd.distribute(encoder, decoder, optimizer)`. Models with their own
    optimizers, as in a GAN, take a call each. Pass all the optimizers of a model in one call:
    `sherd.distribute(model, muon, adamw, loader)`; each steps its own parameters from the same backward.

    Collective: all ranks call it with the same models, and take rank 0's weights. Under torchrun or `sherd run` it
    initialises torch.distributed if needed; without a launcher it is a world of one. After `sherd.seed` it seeds each
    rank differently.

    All or nothing: an error on one rank is raised on every rank, and leaves model, optimizer and loaders unchanged.

    How ranks share the work:
    strategy: "ddp" replicates everything; "zero1" shards the optimizer state over the ranks, "zero2" the gradients too,
        "zero3" the parameters too. Or an object with options, such as `sherd.ZeRO(stage=2, ...)`. All of them give the
        same weights. "local-sgd" and "diloco" exchange parameters every so many steps instead, "gossip" with a few
        neighbours. "local" exchanges nothing, to measure what communication costs. Default: the one in `sherd run
        --strategy`, else "zero2".
    comm: `sherd.CommOptions(...)` for the communicator between the ranks, such as `timeout` and `transport`, or an
        existing communicator. Default: the fastest transport that works for these ranks.

    What a step is:
    accumulate: every K-th `step()` of an optimizer is a real one; in between, `step()`, `zero_grad()` and a scheduler's
        `step()` do nothing. The gradient is the mean over ranks and backwards (with `loss_reduction="sum"`, the sum).
        Default: 1.
    accumulate_at: where gradients accumulate: on the "rank" that computed them (one exchange per step, and memory for a
        local gradient) or at the "owner" of each slice (one exchange per backward, without that memory). Strategies
        with the same value give the same bits. Default: "rank" for ddp and zero1, "owner" for zero2 and zero3.
    clip_norm: scale the gradient of every step so that its 2-norm over all parameters is at most this. Default: None,
        no clipping.
    nonfinite: what to do about NaN or infinite gradients: "skip" the step on every rank, "raise" an error, or "allow"
        them. Default: "skip" where gradients are summed over ranks; "allow", as in plain torch, in a world of one.
    loss_scale: `sherd.LossScale(...)` scales losses before their backward and gradients back once they are summed, for
        16-bit models; the loop does not see it. A step whose gradient overflows is skipped on every rank, and the scale
        becomes smaller. Instead of `torch.amp.GradScaler`, not with it. Default: None, no scaling.
    loss_reduction: whether the loss is the "mean" over its batch, so that gradients are averaged over the ranks, or the
        "sum", so that they are added. Default: "mean".
    sync_buffers: how buffers that changed, such as the running statistics of batch norm, are synchronised at each step:
        "mean" averages floating-point buffers over the ranks and takes others from rank 0, "leader" takes all from rank
        0, "none" leaves them alone. Default: "mean".
    bucket_bytes: bytes of gradients that are reduced together, at least 1024. Default: a fraction of the model, at most
        2 MB; on one host models of up to 16 MB are reduced at the end of a backward.
    check: which writes to parameters are detected where every rank has its own copy: those that change torch's
        "versions", or all "edits", by checksums. Where ranks share a copy all are detected. Default: "versions".
    groups: which ranks hold which parameters and buffers, where ranks differ: patterns of names, each with its ranks,
        such as `{"experts.0.*": [0, 1], "experts.1.*": [2, 3]}`. Gradients of these are summed over the ranks that hold
        them, and divided by the number of all ranks. Default: None, all ranks hold everything.

    What it computes with:
    precision: "bf16" or "fp16" gives the model 16-bit parameters; their owners keep fp32 masters, which the optimizer
        steps. Inputs are cast on entry, outputs back to fp32 on exit; "fp16" scales the loss. "bf16-autocast" keeps
        fp32 parameters and runs the forward under torch.autocast. Default: "fp32", the dtypes that the model has.
    grad_dtype: the dtype in which sums of 16-bit gradients are kept, "fp32" or "bf16". Default: "fp32".
    wire_dtype: the dtype in which gradients travel, with fp32 parameters too. Default: that of the parameters.
    keep_fp32: modules and parameters that stay in fp32 under a 16-bit precision: names, patterns of names, classes of
        modules, and ... for what is kept by default. Default: None, norm layers and losses.

    What loaders yield:
    global_batch: samples per step on all ranks together; sets the first loader's batch size, which is per rank and
        backward, to global_batch / (ranks x accumulate). Default: the loader keeps its own batch size.
    iterable: what an IterableDataset yields on each rank: the whole stream, so that its batches are to be "split" among
        the ranks, or that rank's own part, because it is "sharded" already. Default: refused on several ranks.
    """
    step = {
        "accumulate": accumulate,
        "accumulate_at": accumulate_at,
        "clip_norm": clip_norm,
        "nonfinite": nonfinite,
        "loss_scale": loss_scale,
        "loss_reduction": loss_reduction,
        "sync_buffers": sync_buffers,
        "bucket_bytes": bucket_bytes,
        "check": check,
        "groups": groups,
        "precision": precision,
        "grad_dtype": grad_dtype,
        "wire_dtype": wire_dtype,
        "keep_fp32": keep_fp32,
    }
    return _distribute(things, strategy, comm, step, {"global_batch": global_batch, "iterable": iterable}, unknown)


def _distribute(
    things: tuple[Any, ...],
    strategy: StrategyName | Strategy | None,
    comm: CommOptions | Communicator | None,
    step: dict[str, Any],
    loading: dict[str, Any],
    unknown: dict[str, Any],
) -> Any:
    if not isinstance(comm, CommOptions | Communicator | None):
        raise ConfigError(f"distribute takes comm=sherd.CommOptions(...) or a communicator, got {comm!r}")
    with ExitStack() as undo:
        ranks = comm if isinstance(comm, Communicator) else process.connect_for(comm)
        if ranks is not comm:
            undo.push(ranks)  # closes it with the error, which the other ranks then get

        def make() -> Plan:
            for name in unknown:
                raise ConfigError(_unknown(name))
            options, loader_options = StepOptions(**step), LoaderOptions(**loading)
            return Plan.of(things, chosen(strategy, speak=ranks.rank == 0), options, loader_options, ranks)

        plan = together(ranks, make)
        with labelled("sherd.distribute"):
            plan.compare(ranks)
            carry_out(plan, ranks, undo)
        undo.pop_all()
    if ranks.world > 1:
        heap.return_freed()  # where parameters were: 10 MB on each of 8 ranks of a model of 98 M
    process.distributed_over(ranks, plan.options.accumulate, made_here=ranks is not comm)
    seeding.by_rank(ranks)
    return things if len(things) > 1 else things[0]


def _unknown(name: str) -> str:
    if name in ("model", "optimizer", "loader"):
        return f"distribute takes the {name} by position: sherd.distribute(model, optimizer, loader, strategy=...)"
    fields = (*dataclasses.fields(StepOptions), *dataclasses.fields(LoaderOptions))
    valid = ("strategy", "comm", *(field.name for field in fields))
    return f"distribute has no option {name!r}; {nearest(name, valid)}"
