"""Who takes part in `benchmarks.overhead`: each contender is a function from a model and its optimizer to a step.

The loops are the same but for what each library asks for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.overhead_networks import Batch, loss_of

DECAY = 0.1
MAX_NORM = 1.0
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(AdamW, lr=3e-4),
    "SGD with momentum": partial(SGD, lr=1e-3, momentum=0.9),
    "fused AdamW": partial(AdamW, lr=3e-4, fused=True),
}

Step = Callable[[Sequence[Batch]], Tensor]
"""Micro-batches in, the last one's loss out; the model was updated. The gradient is clipped if there are several."""


def optimizer_of(model: nn.Module, kind: str) -> Optimizer:
    """With two groups: matrices and kernels decay, biases and norms do not."""
    decaying = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return OPTIMIZERS[kind](groups)


def _plain(model: nn.Module, optimizer: Optimizer) -> Step:
    return _loop(model, optimizer)


def _torch_ddp(model: nn.Module, optimizer: Optimizer) -> Step:
    wrapped = DistributedDataParallel(model)

    def sync(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    return _loop(wrapped, optimizer, sync)


def _sherd(model: nn.Module, optimizer: Optimizer, *, strategy: str | None) -> Step:
    sherd: Any = importlib.import_module("sherd")
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy)
    return _loop(model, optimizer)


def _loop(model: nn.Module, optimizer: Optimizer, sync: Callable[[bool], None] | None = None) -> Step:
    def step(batches: Sequence[Batch]) -> Tensor:
        count = len(batches)
        for number, (x, y) in enumerate(batches, 1):
            if sync is not None and count > 1:
                sync(number == count)
            loss = loss_of(model(x), y)
            (loss / count if count > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if count > 1:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@dataclass(frozen=True)
class Contender:
    title: str
    build: Callable[[nn.Module, Optimizer], Step]
    connected: bool = True  # its ranks have a process group
    package: str = "torch"  # imported when it joins


def _of_sherd(strategy: str | None) -> Contender:
    title = f"sherd {strategy}" if strategy else "sherd"
    return Contender(title, partial(_sherd, strategy=strategy), package="sherd")


PLAIN, TORCH_DDP, SHERD = "plain", "torch-ddp", "sherd"
CONTENDERS = {
    PLAIN: Contender("no communication", _plain, connected=False),
    TORCH_DDP: Contender("torch DDP", _torch_ddp),
    SHERD: _of_sherd(None),  # its default, in a world of one
    "sherd-ddp": _of_sherd("ddp"),
    "sherd-zero1": _of_sherd("zero1"),
    "sherd-zero2": _of_sherd("zero2"),
    "sherd-zero3": _of_sherd("zero3"),
}


@contextmanager
def alone(name: str) -> Iterator[None]:
    """A turn of this contender. sherd's models are told of every backward of their process: not of the plain loop's,
    which would pay for that."""
    patch = sys.modules.get("sherd.patches.backward") if name == PLAIN else None
    listeners = [] if patch is None else [one for reference in patch._listeners if (one := reference()) is not None]
    for listener in listeners:
        patch.forget(listener)  # type: ignore[union-attr]
    try:
        yield
    finally:
        for listener in listeners:
            patch.listen(listener)  # type: ignore[union-attr]
