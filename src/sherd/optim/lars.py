"""LARS: momentum with a rate of its own for each layer (You, Gitman and Ginsburg, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from sherd.errors import ConfigError
from sherd.optim.layerwise import Layerwise, Piece


class LARS(Layerwise):
    """SGD with momentum, in which a layer moves by a fixed part of its own norm. For a parameter w with gradient g:

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)        1, if |w| or |g| is 0
        d     = ratio * (g + weight_decay * w)
        v     = momentum * v + d
        w     = w - lr * v                                                       nesterov: w - lr * (d + momentum * v)

    `adapt` says which parameters have a ratio: None those of two or more dimensions, so that biases and the scales of
    normalisations have 1 and move as under SGD; True all of them; False none. As every option it can be set by group.

    A step needs no memory besides v: what is measured is the gradient. It works alone and under `sherd.distribute`,
    with the same bits under every strategy that sums gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        maximize: bool = False,
        adapt: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "maximize": maximize,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    keys = ("momentum_buffer",)

    def _kept(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.keys if group["momentum"] else ()

    def _check(self, group: Mapping[str, Any]) -> None:
        if group["momentum"] < 0:
            raise ConfigError(f"LARS: momentum={group['momentum']}; write one of at least 0")
        if group["trust_coefficient"] <= 0:
            raise ConfigError(
                f"LARS: trust_coefficient={group['trust_coefficient']}; write a positive one, such as 0.001"
            )
        if group["nesterov"] and not group["momentum"]:
            raise ConfigError("LARS: nesterov=True needs a momentum; write momentum=0.9")

    def _direction(self, piece: Piece) -> Tensor:
        return piece.grad

    def _ratio(self, group: Mapping[str, Any], value: float, direction: float) -> float:
        ratio: float = group["trust_coefficient"] * value / (direction + group["weight_decay"] * value + group["eps"])
        return ratio

    def _apply(self, piece: Piece, direction: Tensor, ratio: float) -> None:
        group, momentum = piece.group, piece.group["momentum"]
        update = direction.add(piece.value, alpha=group["weight_decay"]) if group["weight_decay"] else direction
        update = update.mul(ratio) if ratio != 1.0 else update
        if momentum:
            buffer = piece.state["momentum_buffer"].mul_(momentum).add_(update)
            update = update.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        piece.value.add_(update, alpha=-float(group["lr"]))
