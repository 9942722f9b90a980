"""What the other scripts train: a small network, and for every step and rank a batch of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def network() -> nn.Sequential:
    """Sizes that divide by nothing, so that slices are uneven."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 5))


def batch(step: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """No row is on two ranks: they would learn nothing from it that one of them would not."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 15, generator=generator)
    return x, x[:, :5].sin()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return (model(x) - y).square().mean()  # type: ignore[no-any-return]


def weights(model: nn.Module) -> Tensor:
    """All of them, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def padded(tensor: Tensor, length: int) -> Tensor:
    """Its elements one after the other, then zeros."""
    return torch.cat([tensor.flatten(), tensor.new_zeros(length - tensor.numel())])


def memory(tensors: Iterable[Tensor | None]) -> int:
    """The bytes behind them. Views of one storage count once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it remembers of every element; for Adam two numbers. Its count of steps is no part of that."""
    return [value for by_name in optimizer.state.values() for value in by_name.values() if value.dim()]


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of any element."""
    return (found - expected).abs().max().item()
