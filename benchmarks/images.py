"""The network for images that `benchmarks.resnet` trains, and its data: the ResNet-50 of the recipe, on noise.

It has the shapes of a GPT's output, a sequence of one token, so that the contenders' steps fit it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.gpt import cross_entropy
from sherd.recipes.vision import ResNet

NAME = "resnet50"
CLASSES = 1000


class ImageNet(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self(x), y)


def model() -> ImageNet:
    return ImageNet(NAME, channels=3, classes=CLASSES, large=True)


def batch(ranks: Iterable[int], step: int, images: int, pixels: int) -> tuple[Tensor, Tensor]:
    """What these ranks see in this step. How fast a network is does not depend on what it sees."""
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        label = torch.randint(CLASSES, (images, 1), generator=generator)
        parts.append((torch.randn(images, 3, pixels, pixels, generator=generator), label))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
