"""LAMB: Adam with a rate of its own for each layer (You et al., arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from sherd.errors import ConfigError
from sherd.optim.layerwise import Layerwise, Piece


class LAMB(Layerwise):
    """AdamW, in which a layer moves by a fixed part of its own norm. For a parameter w with gradient g, in step t:

        m     = b1 * m + (1 - b1) * g
        v     = b2 * v + (1 - b2) * g * g
        r     = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w
        ratio = |w| / |r|                                                        1, if |w| or |r| is 0
        w     = w - lr * ratio * r

    `adapt` says which parameters have a ratio: None those of two or more dimensions, so that biases and the scales of
    normalisations have 1 and move as under AdamW; True all of them; False none. As every option it can be set by group.

    All r are measured before any is applied. They are not kept but computed twice: a step needs no memory besides m
    and v. It works alone and under `sherd.distribute`, with the same bits under every strategy that sums gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        adapt: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    keys = ("exp_avg", "exp_avg_sq")
    counts = True

    def _check(self, group: Mapping[str, Any]) -> None:
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"LAMB: betas={betas}; write two numbers from 0 to below 1, such as (0.9, 0.999)")

    def _move_on(self, piece: Piece) -> None:
        first, second = piece.group["betas"]
        piece.state["exp_avg"].mul_(first).add_(piece.grad, alpha=1 - first)
        piece.state["exp_avg_sq"].mul_(second).addcmul_(piece.grad, piece.grad, value=1 - second)

    def _direction(self, piece: Piece) -> Tensor:
        first, second = (1 - beta**piece.step for beta in piece.group["betas"])
        width = piece.state["exp_avg_sq"].div(second).sqrt_().add_(piece.group["eps"])
        direction = piece.state["exp_avg"].div(first).div_(width)
        decay = piece.group["weight_decay"]
        return direction.add_(piece.value, alpha=decay) if decay else direction

    def _ratio(self, group: Mapping[str, Any], value: float, direction: float) -> float:
        return value / direction

    def _apply(self, piece: Piece, direction: Tensor, ratio: float) -> None:
        piece.value.add_(direction, alpha=-float(piece.group["lr"]) * ratio)
