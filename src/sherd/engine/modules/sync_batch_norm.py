"""`nn.SyncBatchNorm` over the engine's own communicator: on any device, over any transport.

A rank computes the count, mean and squared deviations of its own batch; one all-gather in forward combines them over
all ranks. In backward the shared statistics give every rank a share of every other's gradient: one all-reduce. The
results are gradients of the sum of the ranks' losses with respect to this rank's input, and of this rank's loss with
respect to weight and bias; the engine reduces the latter like all others.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sherd.comm import Communicator, labelled
from sherd.data import batch_weight
from sherd.engine.buckets.groups import Groups
from sherd.engine.gradients.gradient import LossWeights, Trained
from sherd.engine.parameters.mesh import Teams
from sherd.errors import ConfigError
from sherd.patches.batch_norm import Forward, SyncedBatchNorm, forget, install


class Trainer(Protocol):
    """The engine whose ranks share statistics, for as long as it lives."""

    comm: Communicator
    teams: Teams
    trained: Trained

    @property
    def weights(self) -> LossWeights: ...


def share_statistics(model: nn.Module, engine: Trainer, undo: ExitStack) -> None:
    """Make the `nn.SyncBatchNorm` modules of `model` compute their statistics over the ranks of `engine`.

    Subclasses, and modules with their own process group, are left unchanged. A rank that trains alone among others has
    statistics of its own: torch's would refuse the CPU, or wait for all ranks.
    """
    if engine.teams.everyone.world == 1:
        return
    for name, module in model.named_modules():
        if type(module) in (nn.SyncBatchNorm, SyncedBatchNorm) and module.process_group is None:
            _refuse_partly_held(name, module, engine.trained.inventory.groups)
            undo.callback(setattr, module, "__class__", type(module))
            undo.callback(forget, module)
            install(module, partial(_forward_of, weakref.ref(engine), name))
            engine.trained.modules_communicate = engine.comm.world > 1


def _refuse_partly_held(name: str, module: nn.Module, groups: Groups) -> None:
    """Refuse a module that only some ranks hold: the others would not take part in its statistics."""
    for key in (*module._parameters, *module._buffers):
        if groups.ranks_of(f"{name}.{key}" if name else key) is not None:
            raise ConfigError(
                f"module {name!r} is an nn.SyncBatchNorm that groups= gives to some ranks only; use nn.BatchNorm "
                f"there, or set its process_group"
            )


def _forward(ranks: Ranks, module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """The forward of a module in training."""
    module._check_input_dim(input)
    if input.size(1) != module.num_features:
        raise ConfigError(f"{ranks} takes inputs of {module.num_features} channels, found {tuple(input.shape)}")
    statistics = ranks.statistics(input.detach())
    _track(module, statistics)
    output: Tensor = _Normalise.apply(input, module.weight, module.bias, module.eps, statistics, ranks)  # type: ignore[no-untyped-call]
    return output


@torch.no_grad()
def _track(module: nn.SyncBatchNorm, statistics: Statistics) -> None:
    """Update the running statistics with those of this batch."""
    if not module.track_running_stats:
        return
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    share = module.momentum
    if share is None:  # the mean over all batches so far
        share = 0.0 if module.num_batches_tracked is None else 1.0 / module.num_batches_tracked.item()
    unbiased = statistics.squares / (statistics.count - 1)
    for running, new in ((module.running_mean, statistics.mean), (module.running_var, unbiased)):
        if running is not None:
            running.mul_(1.0 - share).add_(new.to(running.dtype), alpha=share)


@dataclass(frozen=True)
class Statistics:
    """Statistics over the batches of all ranks, per channel, in fp64."""

    count: float
    mean: Tensor
    squares: Tensor
    """the sum of squared deviations from the mean"""


@dataclass(frozen=True)
class Ranks:
    """The ranks with which the module of that name shares its statistics."""

    name: str
    comm: Communicator
    weights: LossWeights

    def __str__(self) -> str:
        return f"rank {self.comm.number}: batch norm of {self.name!r}"

    def statistics(self, input: Tensor) -> Statistics:
        """Combine the statistics of all ranks' inputs, whatever their sizes. Collective."""
        channels = input.size(1)
        repeated = not batch_weight.current()  # a repeated batch does not count
        count = 0 if repeated else input.numel() // channels
        mine = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
        if count:
            mean, variance = torch.batch_norm_update_stats(input.to(_working(input)), None, None, 0.0)
            mine[0], mine[1 : 1 + channels] = count, mean
            torch.mul(variance.double(), count, out=mine[1 + channels :])
        with labelled(f"batch norm of {self.name!r}"):
            rows = self.comm.all_gather(mine).wait().view(self.comm.world, -1)
        counts, means, squares = torch.split(rows, [1, channels, channels], dim=1)
        total = counts.sum()
        if total <= 1:
            raise ConfigError(f"{self} needs more than one value per channel on all ranks together, found {int(total)}")
        mean = (counts * means).sum(0) / total
        return Statistics(total.item(), mean, (squares + counts * (means - mean).square()).sum(0))

    def total(self, sums: Tensor) -> Tensor:
        """Sum the ranks' partial sums, each with the weight of its backward. Collective."""
        weight = self.weights.current
        # The engine applies this rank's weight to its gradients, but these contain shares of other ranks' gradients.
        weighed = sums.double() * weight if weight else torch.zeros_like(sums, dtype=torch.float64)
        with labelled(f"backward of the batch norm of {self.name!r}"):
            total = self.comm.all_reduce(weighed).wait()
        return total / weight if weight else total


class _Normalise(torch.autograd.Function):
    """`(input - mean) / deviation * weight + bias`, differentiated through the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: Statistics,
        ranks: Ranks,
    ) -> Tensor:
        working = _working(input)
        variance = statistics.squares / statistics.count
        mean, inverse = statistics.mean.to(working), (variance + eps).rsqrt().to(working)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.eps, ctx.count, ctx.ranks = eps, statistics.count, ranks
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale, shift = (None if each is None else each.to(working) for each in (weight, bias))
        return functional.batch_norm(input, mean, variance.to(working), scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        sums = torch.zeros(2, mean.numel(), dtype=mean.dtype, device=mean.device)  # of dy, and of dy * normalised
        if input.numel():  # for an empty input the kernel would divide by 0
            # The kernel uses the given means, so these are this rank's part of the sums.
            local = torch.ops.aten.native_batch_norm_backward(
                gradient, input, None, None, None, mean, inverse, True, ctx.eps, [False, True, True]
            )
            sums[0], sums[1] = local[2], local[1]
        to_input = None
        if ctx.needs_input_grad[0]:
            average, along = (ctx.ranks.total(sums) / ctx.count).to(mean.dtype)
            scale = inverse if weight is None else inverse * weight
            shape = (1, -1, *(1 for _ in input.shape[2:]))
            scale, shift, slope = (each.view(shape) for each in (scale, -scale * average, -scale * inverse * along))
            to_input = torch.addcmul(shift, gradient, scale).addcmul_(input - mean.view(shape), slope).to(input.dtype)
        to_weight = None if weight is None else sums[1].to(weight.dtype)
        to_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        return to_input, to_weight, to_bias, None, None, None


def _forward_of(engine: weakref.ref[Trainer], name: str) -> Forward | None:
    """The forward of the module of that name, as long as its engine lives; None for that of `nn.BatchNorm`."""
    living = engine()
    return (
        None
        if living is None or living.comm.world == 1
        else partial(_forward, Ranks(name, living.comm, living.weights))
    )


def _working(input: Tensor) -> torch.dtype:
    """The dtype to compute in: 16 bits are too coarse for statistics."""
    return torch.promote_types(input.dtype, torch.float32)
