"""What exchanging less costs in model quality: `python -m benchmarks.convergence`.

A small GPT learns Python's standard library on four ranks of this machine: by `ddp`, which sums gradients in every
step; by `diloco`, whose ranks meet every 50 steps after a short warm-up with summed gradients; and by `gossip` with one
neighbour per step. All see the same tokens in the same order, with the same learning rates; judged is the loss on files
that nobody trains on, at the consensus of the ranks. The outer learning rate of `diloco` is chosen on another seed
first (`--choose`). On two cores a run takes about 15 minutes, or 6 with the rate that was chosen before.

How close `diloco` comes depends on the regime. Where one rank's batch is so small that ddp gains much by four times as
many samples in every step, no averaging can make up for it: a larger model with 4 sequences per rank ended 19% behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader

import sherd
from benchmarks.line_plot import Curve, line_plot
from benchmarks.training import publish
from benchmarks.training_report import new_table
from sherd.api.training import training_of
from sherd.recipes import gpt

RANKS, EVERY, BATCH, LENGTH, RATE = 4, 50, 16, 64, 2e-3
WIDTH, LAYERS = 32, 2
OUTER_RATES = (0.7, 0.9, 1.0)
CHOSEN = 0.9  # without --choose
OUTER_MOMENTUM = 0.5  # less than usual: a few thousand steps are only some dozen exchanges
IMAGES = Path(__file__).parent.parent / "docs" / "images"


@dataclass
class Learned:
    """How one run went."""

    held_out: list[tuple[float, float]] = field(default_factory=list)
    payload: int = 0  # bytes that all ranks sent for training

    @property
    def loss(self) -> float:
        return self.held_out[-1][1]


def strategies(steps: int, outer_lr: float) -> dict[str, Any]:
    return {
        "ddp": "ddp",
        "diloco": sherd.DiLoCo(every=EVERY, outer_lr=outer_lr, outer_momentum=OUTER_MOMENTUM, warmup=steps // 100),
        "gossip": sherd.Gossip(topology="one-peer-exponential"),
    }


def learn(strategy: Any, seed: int, steps: int, look_every: int) -> Learned:
    """One run on this rank."""
    torch.set_num_threads(1)
    sherd.seed(seed)
    text, other = gpt.read(None)
    model = gpt.Gpt(WIDTH, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: gpt.warm_up_then_cosine(step, steps))
    loader = DataLoader(gpt.Windows(text, LENGTH), BATCH, shuffle=True, drop_last=True)
    judges = DataLoader(gpt.Windows(other, LENGTH, gpt.HELD_OUT), 4 * BATCH)
    model, optimizer, loader, judges = sherd.distribute(
        model, optimizer, loader, judges, strategy=strategy, clip_norm=1.0
    )
    counters = training_of(model).engine.teams.everyone.counters
    learned, before = Learned(), counters.total().payload
    for step, (x, y) in zip(range(1, steps + 1), gpt.forever(loader), strict=False):
        gpt.loss_of(model, x, y).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % look_every == 0 or step == steps:
            learned.payload += counters.total().payload - before
            with sherd.consensus(model):
                learned.held_out.append((step, gpt.held_out_loss(model, judges)))
            before = counters.total().payload
    return learned


def run(strategy: Any, seed: int, arguments: argparse.Namespace) -> Learned:
    by_rank = sherd.launch(learn, RANKS, strategy, seed, arguments.steps, arguments.look_every)
    return Learned(by_rank[0].held_out, sum(each.payload for each in by_rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--look-every", type=int, default=100, help="steps between two looks at the held-out loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choose", action="store_true", help="choose the outer learning rate on the next seed first")
    parser.add_argument("--no-save", action="store_true", help="write no results and no picture")
    arguments = parser.parse_args()
    os.environ.setdefault("SHERD_SPIN", "0")  # more ranks than cores
    console, outer_lr = Console(width=110, highlight=False), CHOSEN
    tried: dict[float, float] = {}
    for rate in OUTER_RATES if arguments.choose else ():
        tried[rate] = run(strategies(arguments.steps, rate)["diloco"], arguments.seed + 1, arguments).loss
        console.print(f"outer learning rate {rate}: held-out loss {tried[rate]:.4f} with seed {arguments.seed + 1}")
        outer_lr = min(tried, key=lambda each: tried[each])
    found: dict[str, Learned] = {}
    for name, strategy in strategies(arguments.steps, outer_lr).items():
        found[name] = run(strategy, arguments.seed, arguments)
        console.print(f"{name}: held-out loss {found[name].loss:.4f}")
    table = new_table(
        f"GPT of width {WIDTH}, {LAYERS} layers, {RANKS} ranks x {BATCH} x {LENGTH} tokens, {arguments.steps} steps",
        "strategy", "held-out loss", "to ddp's", "MB sent by all ranks", "times fewer",
    )  # fmt: skip
    for name, one in found.items():
        ratio, fewer = one.loss / found["ddp"].loss, found["ddp"].payload / max(one.payload, 1)
        table.add_row(name, f"{one.loss:.4f}", f"{100 * (ratio - 1):+.2f}%", f"{one.payload / 1e6:.1f}", f"{fewer:.1f}")
    saved = {"steps": arguments.steps, "seed": arguments.seed, "outer_lr": outer_lr, "tried": tried}
    results = {"results": {name: asdict(one) for name, one in found.items()}}
    publish("convergence", [table], saved | results, console, not arguments.no_save)
    if not arguments.no_save:
        curves = [Curve(name, list(itertools.dropwhile(_early, one.held_out))) for name, one in found.items()]
        title = "Held-out loss at the consensus, nats per byte"
        (IMAGES / "convergence.svg").write_text(line_plot(title, "steps", "loss", curves))


def _early(point: tuple[float, float]) -> bool:
    """The first looks would hide the differences between the last ones."""
    return point[0] < 200


if __name__ == "__main__":
    main()
