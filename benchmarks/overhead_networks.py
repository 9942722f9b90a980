"""The small networks of `benchmarks.overhead`, and what each rank feeds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpt import ALPHABET, Gpt, Size
from benchmarks.gpt import batch as text

CLASSES = 10
FEATURES = 8  # of the MLP, which are its classes too

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network:
    """A model, the batch of one rank in one step, and how many steps of it make a turn of about 0.4 s."""

    title: str
    shape: str
    new: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]  # rank, step
    steps: int
    many: bool = False  # small tensors, so that what is done for each of them dominates


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), y.flatten())


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )
        projection = nn.Conv2d(channels, width, 1, stride, bias=False)
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """As for CIFAR: it starts with a 3 x 3 convolution and does not reduce the image."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [Residual(channels, width, 1 if width == 64 else 2), Residual(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Mlp(nn.Module):
    """Residual layers of a few numbers each: nearly nothing to compute, nearly nothing to send, but many tensors."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.add(x, functional.relu(layer(x)), alpha=0.01)
        return x


def tokens(sequences: int, length: int) -> Callable[[int, int], Batch]:
    return partial(_tokens, sequences=sequences, length=length)


def _tokens(rank: int, step: int, *, sequences: int, length: int) -> Batch:
    return text((rank,), step, sequences, length)


def _noise(rank: int, step: int, *, shape: tuple[int, ...], classes: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator), torch.randint(classes, shape[:1], generator=generator)


def _gpt(layers: int, width: int) -> Callable[[], nn.Module]:
    return partial(Gpt, Size(layers=layers, width=width, heads=4, vocabulary=ALPHABET))


NETWORKS = {
    "gpt-0.4m": Network("GPT 0.4 M", "2 x 16 tokens", _gpt(3, 96), tokens(2, 16), steps=40),
    "gpt-1.2m-deep": Network("GPT 1.2 M, deep", "2 x 16 tokens", _gpt(24, 64), tokens(2, 16), steps=8, many=True),
    "gpt-1.2m": Network("GPT 1.2 M", "2 x 64 tokens", _gpt(6, 128), tokens(2, 64), steps=15),
    "gpt-3.7m": Network("GPT 3.7 M", "2 x 64 tokens", _gpt(6, 224), tokens(2, 64), steps=8),
    "resnet18": Network(
        "ResNet-18",
        "4 images of 32 x 32",
        resnet18,
        partial(_noise, shape=(4, 3, 32, 32), classes=CLASSES),
        steps=2,
    ),
    "mlp-3000": Network(
        "MLP of 3,000 tensors",
        "16 rows",
        partial(Mlp, 1500),
        partial(_noise, shape=(16, FEATURES), classes=FEATURES),
        steps=2,
        many=True,
    ),
}
