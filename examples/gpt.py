"""A small GPT that learns to write Python, trained on the source of Python's own standard library.

    python examples/gpt.py                               # one process
    sherd run -n 2 examples/gpt.py --strategy zero3      # two ranks; the only line that differs is marked

Bytes are its tokens. Every rank draws its own batches; the loss is the mean over the ranks.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import sherd


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, width: int = 192, layers: int = 4, heads: int = 6, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.norm(self.blocks(hidden)) @ self.tokens.weight.T  # type: ignore[no-any-return]


def corpus(limit: int = 4 << 20) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library: some to learn from, and other files to be judged by."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    held_out = b"".join(texts[::10])
    learned = b"".join(text for index, text in enumerate(texts) if index % 10)
    return torch.tensor(list(learned[:limit])), torch.tensor(list(held_out[: limit // 10]))


def batch(text: Tensor, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
    rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero2", help="ddp, zero1, zero2 or zero3")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(0)
    learned, held_out = corpus()
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=arguments.steps)
    model, optimizer = sherd.distribute(model, optimizer, strategy=arguments.strategy, clip_norm=1.0)  # this one
    description = sherd.describe(model)
    if rank == 0:
        print(description, flush=True)

    start = time.perf_counter()
    for step in range(arguments.steps):
        x, y = batch(learned, arguments.batch, model.length, seed=step * world + rank)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 25 == 0 or step == arguments.steps - 1:
            with torch.no_grad():  # on all ranks: zero3 on several hosts gathers what it uses from all of them
                x, y = batch(held_out, 16, model.length, seed=0)
                judged = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            speed = (step + 1) * arguments.batch * world * model.length / (time.perf_counter() - start)
            if rank == 0:
                print(f"step {step:4d}  loss {loss:.3f}  held out {judged:.3f}  {speed:8,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
