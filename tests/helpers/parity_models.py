"""Small models with odd shapes, and data for them that depends on nothing but numbers: what parity tests train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Causal attention and an MLP whose first matrix is larger than a bucket of 4 KB."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 5 * dim), nn.Linear(5 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A language model whose head is its embedding."""

    vocabulary, length, dim = 43, 7, 15

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.dim)
        self.positions = nn.Embedding(self.length, self.dim)  # (7, 15)
        self.blocks = nn.Sequential(Block(self.dim, 3))
        self.norm = nn.LayerNorm(self.dim)
        self.head = nn.Linear(self.dim, self.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight)))

    def batch(self, generator: torch.Generator, size: int, dtype: torch.dtype) -> Batch:
        text = torch.randint(self.vocabulary, (size, self.length + 1), generator=generator)
        return text[:, :-1], text[:, 1:]


class Convolutional(nn.Module):
    """Images of 9 x 9; the last matrix is several buckets of 4 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 7, 3),
            nn.GELU(),
            nn.Conv2d(7, 15, 3),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(15 * 25, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def batch(self, generator: torch.Generator, size: int, dtype: torch.dtype) -> Batch:
        images = torch.randn(size, 3, 9, 9, generator=generator, dtype=torch.float64).to(dtype)
        return images, torch.randint(10, (size,), generator=generator)


class Recurrent(nn.Module):
    """An LSTM language model."""

    vocabulary, length = 31, 7

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, 15)
        self.lstm = nn.LSTM(15, 19, num_layers=2, batch_first=True)
        self.narrow = nn.Linear(19, 15)
        self.head = nn.Linear(15, self.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.narrow(self.lstm(self.tokens(x))[0]))

    def batch(self, generator: torch.Generator, size: int, dtype: torch.dtype) -> Batch:
        text = torch.randint(self.vocabulary, (size, self.length + 1), generator=generator)
        return text[:, :-1], text[:, 1:]


MODELS = {"transformer": Transformer, "convolutional": Convolutional, "recurrent": Recurrent}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model of that name, the same wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)


def batch(model: nn.Module, number: int, rank: int, size: int = 2) -> Batch:
    """What `rank` sees in its backward of that number."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return model.batch(generator, size, next(model.parameters()).dtype)


def whole_batch(model: nn.Module, number: int, world: int, size: int = 2) -> Batch:
    """What all ranks see together."""
    inputs, targets = zip(*(batch(model, number, rank, size) for rank in range(world)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices, none for vectors."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.03, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}
