"""A small byte-level GPT that learns to write the text it reads: by default Python's own standard library.

sherd train gpt                       # as many ranks as cores, a live display, a report
python gpt.py                         # a copy of this file, on one process
sherd run -n 4 gpt.py --steps 500     # the same copy on four ranks
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import sherd

BYTES = 256  # the vocabulary
HEAD = 32  # elements of an attention head
HELD_OUT = 1024  # sequences at most
WARM_UP = 50  # steps


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)  # a block starts as the identity, so deep models start as well as shallow ones

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of elements by angles that grow with the position, so that attention sees distances."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embedding(x))) @ self.embedding.weight.T  # type: ignore[no-any-return]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, evenly spaced if there are more than `most`; each with the same piece one byte later."""

    def __init__(self, text: bytes, length: int, most: int = sys.maxsize) -> None:
        self.text = torch.frombuffer(bytearray(text or b"\n"), dtype=torch.uint8)
        self.length = length
        self.count = min((len(self.text) - 1) // length, most)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * ((len(self.text) - 1) // self.count)
        piece = self.text[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]


def read(corpus: Path | None) -> tuple[bytes, bytes]:
    """Training text and held-out text: every tenth file, or the end of a single one."""
    library = Path(sysconfig.get_paths()["stdlib"])
    where = corpus or library
    if not where.exists():
        raise sherd.ConfigError(f"--corpus {where}: there is no such file or directory; write the path of some text")
    others = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    found = where.rglob("*.py" if corpus is None else "*") if where.is_dir() else [where]
    files = sorted(file for file in found if file.is_file() and not others & set(file.relative_to(where).parts))
    try:
        texts = [text for file in files if b"\0" not in (text := file.read_bytes())]  # the others are not text
    except OSError as error:
        raise sherd.ConfigError(f"--corpus {where}: {error.filename} cannot be read ({error.strerror})") from None
    if not any(texts):
        raise sherd.ConfigError(
            f"--corpus {where}: found no text in {len(files)} files; those with NUL bytes are skipped"
        )
    if len(texts) >= 10:
        return b"".join(text for index, text in enumerate(texts) if index % 10), b"".join(texts[::10])
    text = b"".join(texts)
    end = len(text) * 9 // 10
    return text[:end], text[end:]


def bigram_entropy(text: Tensor) -> float:
    """Nats per byte of the best prediction from one byte: what a table of byte pairs would reach on this text."""
    pairs = torch.bincount(text[:-1].int() * BYTES + text[1:], minlength=BYTES * BYTES).view(BYTES, BYTES).double()
    chances = pairs / pairs.sum(dim=1, keepdim=True)
    return -(pairs / pairs.sum() * chances.log())[pairs > 0].sum().item()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sequence: the mean over its bytes."""
    return functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(dim=1)


@torch.no_grad()
def held_out_loss(model: nn.Module, loader: DataLoader[Any]) -> float:
    """The mean over all sequences: each counts once, however they are dealt to the ranks."""
    losses = torch.cat([loss_of(model, x, y) for x, y in loader])
    return sherd.gather(losses, loader=loader).mean().item()  # type: ignore[no-any-return]


@torch.no_grad()
def continued(model: nn.Module, prompt: str, count: int, length: int, temperature: float = 0.7) -> str:
    """What the model writes after a prompt. Call it on all ranks: under zero3 hosts gather parameters together."""
    chance = torch.Generator().manual_seed(0)
    text = list(prompt.encode())
    for _ in range(count):
        logits = model(torch.tensor([text[-length:]]))[0, -1]
        text.append(int(torch.multinomial(functional.softmax(logits / temperature, dim=0), 1, generator=chance)))
    return bytes(text).decode(errors="replace")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = options.add_argument
    add(
        "--strategy",
        metavar="NAME",
        help="ddp, zero1, zero2, zero3, local-sgd, diloco or gossip (default: zero3 in sherd train, else that of sherd "
        "run, or zero2)",
    )
    add(
        "--precision",
        default="fp32",
        metavar="NAME",
        help="fp32, bf16 or fp16, with fp32 masters, or bf16-autocast (default: %(default)s)",
    )
    add("--steps", type=int, default=1600, help="updates of the model (default: %(default)s)")
    add("--corpus", type=Path, metavar="FILE|DIR", help="text to learn from (default: Python's standard library)")
    add("--batch", type=int, default=8, help="sequences per rank and step (default: %(default)s)")
    add("--length", type=int, default=64, help="bytes of a sequence (default: %(default)s)")
    add("--width", type=int, default=128, help=f"of the model, a multiple of {HEAD} (default: %(default)s)")
    add("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    add("--lr", type=float, default=4e-3, help="the highest learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    add("--every", type=int, default=200, help="print the held-out loss after so many steps (default: %(default)s)")
    add("--prompt", default="def ", help="how the text at the end begins (default: %(default)r)")
    add("--write", type=int, default=400, metavar="BYTES", help="length of that text (default: %(default)s)")
    return options


def check(arguments: argparse.Namespace, world: int) -> tuple[Windows, Windows]:
    """The training and the held-out text; `ConfigError` for what cannot work on that many ranks."""
    if arguments.strategy is not None:
        sherd.strategies.resolve(arguments.strategy)
    sherd.StepOptions(precision=arguments.precision)  # refuses what is none
    for name in ("steps", "batch", "length", "width", "layers", "lr", "every", "write"):
        if not getattr(arguments, name) > 0:
            raise sherd.ConfigError(f"--{name} {getattr(arguments, name)}: expected more than 0")
    if arguments.width % HEAD:
        raise sherd.ConfigError(f"--width {arguments.width}: expected a multiple of {HEAD}, such as {4 * HEAD}")
    if not arguments.prompt:
        raise sherd.ConfigError("--prompt is empty: write at least one character")
    text, other = read(arguments.corpus)
    learned, held_out = Windows(text, arguments.length), Windows(other, arguments.length, HELD_OUT)
    batch = arguments.batch * world
    if len(learned) < batch or not len(held_out):
        raise sherd.ConfigError(
            f"the corpus has {len(learned)} training sequences of {arguments.length} bytes and {len(held_out)} "
            f"held-out ones; a step takes {batch}: write a smaller --batch or --length, or a larger --corpus"
        )
    return learned, held_out


def warm_up_then_cosine(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def train(arguments: argparse.Namespace, learned: Windows, held_out: Windows) -> None:
    entropy = bigram_entropy(learned.text)
    sherd.seed(arguments.seed)
    sherd.observe.expect(arguments.steps)
    model = Gpt(arguments.width, arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, arguments.steps))
    loader = DataLoader(learned, arguments.batch, shuffle=True, drop_last=True)
    judges = DataLoader(held_out, 4 * arguments.batch)
    model, optimizer, loader, judges = sherd.distribute(
        model,
        optimizer,
        loader,
        judges,
        strategy=arguments.strategy,
        precision=arguments.precision,
        clip_norm=1.0,
    )
    sherd.print(sherd.describe(model))
    sherd.print(
        f"{len(learned.text):,} bytes of training text; its bigram entropy, which a table of byte pairs would reach, "
        f"is {entropy:.3f} nats per byte"
    )

    for step, (x, y) in zip(range(1, arguments.steps + 1), forever(loader), strict=False):
        loss = loss_of(model, x, y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        sherd.log(loss=loss, tokens=y.numel())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % arguments.every == 0 or step == arguments.steps:
            with sherd.consensus(model):  # where ranks differ between exchanges, that of all of them is judged
                judged = held_out_loss(model, judges)
            sherd.log(held_out=judged)
            sherd.print(f"step {step:5d}  held-out loss {judged:.3f} nats per byte  (bigram entropy {entropy:.3f})")

    with sherd.consensus(model):
        text = continued(model, arguments.prompt, arguments.write, arguments.length)
    sherd.observe.emit("sample", text=text, title=f"after {arguments.steps} steps")
    sherd.print(f"\nIt writes:\n\n{text}\n")


def main() -> None:
    arguments = parser().parse_args()
    try:
        learned, held_out = check(arguments, sherd.world())
    except sherd.ConfigError as error:
        sherd.print(f"gpt: {error}", file=sys.stderr)
        sherd.barrier()  # or a rank could exit, which ends the others, before rank 0 has printed
        sys.exit(2)
    train(arguments, learned, held_out)


if __name__ == "__main__":
    main()
