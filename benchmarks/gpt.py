"""The model that the training benchmarks train, and its data: a small GPT in plain torch.

Pre-norm blocks, causal attention, learned positions, the embedding shared with the head, all weights fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

ALPHABET = 256  # tokens that occur; the rest of the vocabulary only makes the model as large as it should be
LARGEST_STRIDE = 8


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int = 256


SIZES = {
    "small": Size(layers=4, width=128, heads=4, vocabulary=1024),  # 0.96 M parameters
    "33.7m": Size(layers=10, width=512, heads=8, vocabulary=4096),  # 33.75 M
    "98m": Size(layers=20, width=640, heads=10, vocabulary=256),  # 98.79 M, on bytes
    # Autograd keeps two gradients of a tied embedding at a time, on every rank: the larger it is, the more that is.
    "98m-8k": Size(layers=13, width=768, heads=12, vocabulary=8192),  # 98.63 M
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        hidden = functional.gelu(self.up(self.mlp_norm(x)))
        return x + self.down(hidden)  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        sequences, tokens, width = x.shape
        q, k, v = self.qkv(x).view(sequences, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return functional.linear(self.norm(h), self.tokens.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self(x), y)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(ranks: Iterable[int], step: int, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
    """What these ranks see in this step: sequences that count upwards from some token in some stride.

    Two tokens tell how a sequence goes on, so there is something to learn. It depends on nothing but the arguments.
    """
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        start = torch.randint(ALPHABET, (sequences, 1), generator=generator)
        stride = torch.randint(1, LARGEST_STRIDE + 1, (sequences, 1), generator=generator)
        parts.append((start + stride * torch.arange(tokens + 1)) % ALPHABET)
    whole = torch.cat(parts)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
