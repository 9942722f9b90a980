"""The types of `distribute`, for type checkers. At run time `sherd.config` checks the options; a test compares the
two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import TypedDict

from sherd.comm import Communicator
from sherd.config import CommOptions, LossScale
from sherd.strategies import Strategy

StrategyName: TypeAlias = Literal["ddp", "diloco", "gossip", "local", "local-sgd", "zero1", "zero2", "zero3"]
AccumulateAt: TypeAlias = Literal["rank", "owner"]
NonFinite: TypeAlias = Literal["skip", "raise", "allow"]
LossReduction: TypeAlias = Literal["mean", "sum"]
SyncBuffers: TypeAlias = Literal["mean", "leader", "none"]
Check: TypeAlias = Literal["versions", "edits"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "bf16-autocast"]
Dtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
Streams: TypeAlias = Literal["split", "sharded"]

Thing: TypeAlias = nn.Module | Optimizer | DataLoader[Any]
"""What `distribute` takes by position."""


class DistributeOptions(TypedDict, total=False):
    """What `distribute` takes by name."""

    strategy: StrategyName | Strategy | None
    accumulate: int
    accumulate_at: AccumulateAt | None
    clip_norm: float | None
    nonfinite: NonFinite | None
    loss_scale: LossScale | None
    loss_reduction: LossReduction
    sync_buffers: SyncBuffers
    bucket_bytes: int | None
    check: Check
    groups: Mapping[str, Sequence[int]] | None
    precision: Precision
    grad_dtype: Literal["fp32", "bf16"] | None
    wire_dtype: Dtype | None
    keep_fp32: Sequence[str | type[nn.Module] | EllipsisType] | None
    global_batch: int | None
    iterable: Streams | None
    comm: CommOptions | Communicator | None
