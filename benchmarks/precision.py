"""What 16 bits cost in model quality: `python -m benchmarks.precision`.

A small GPT learns Python's standard library on two ranks, once in each precision, from the same weights and with the
same batches in the same order. Compared is the mean loss of the last 50 steps over all ranks; it should be within 1% of
that of fp32. `fp16` scales its loss. Where a CPU has no kernels for 16 bits they are emulated, so the model is narrow:
on two cores with bf16 kernels a run takes about 6 minutes, most of it for fp16.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader

import sherd
from benchmarks.line_plot import Curve, line_plot
from benchmarks.training import publish
from benchmarks.training_report import new_table
from sherd.recipes import gpt

RANKS, BATCH, LENGTH, RATE, LAST = 2, 8, 64, 3e-3, 50
WIDTH, LAYERS = 64, 2
PRECISIONS = ("fp32", "bf16", "bf16-autocast", "fp16")
BAR = 0.01
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def learn(precision: Any, strategy: Any, steps: int, seed: int) -> list[float]:
    """The loss of all ranks in each step."""
    torch.set_num_threads(1)
    sherd.seed(seed)
    model = gpt.Gpt(WIDTH, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: gpt.warm_up_then_cosine(step, steps))
    loader = DataLoader(gpt.Windows(gpt.read(None)[0], LENGTH), BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = sherd.distribute(
        model, optimizer, loader, strategy=strategy, precision=precision, clip_norm=1.0
    )
    losses = []
    for _, (x, y) in zip(range(steps), gpt.forever(loader), strict=False):
        loss = gpt.loss_of(model, x, y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(sherd.mean(loss.detach())))
    return losses


def smoothed(losses: list[float], over: int = 10) -> list[tuple[float, float]]:
    """Means over some steps: single ones would hide each other."""
    return [(float(end), statistics.fmean(losses[end - over : end])) for end in range(over, len(losses) + 1, over)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--only", nargs="+", choices=PRECISIONS[1:], default=PRECISIONS[1:], help="beside fp32")
    parser.add_argument("--no-save", action="store_true", help="write no results and no picture")
    arguments = parser.parse_args()
    console = Console(width=110, highlight=False)
    found: dict[str, list[float]] = {}
    for name in ("fp32", *arguments.only):
        found[name] = sherd.launch(learn, RANKS, name, arguments.strategy, arguments.steps, arguments.seed)[0]
        console.print(f"{name}: loss {statistics.fmean(found[name][-LAST:]):.4f}")
    title = f"GPT of width {WIDTH}, {LAYERS} layers, {RANKS} ranks x {BATCH} x {LENGTH} tokens, {arguments.steps} steps"
    table = new_table(title, "precision", f"mean of the last {LAST} losses", "to fp32's", f"within {BAR:.0%}")
    ends = {name: statistics.fmean(losses[-LAST:]) for name, losses in found.items()}
    for name, end in ends.items():
        away = end / ends["fp32"] - 1
        table.add_row(name, f"{end:.4f}", f"{100 * away:+.2f}%", "yes" if abs(away) <= BAR else "no")
    saved = {"steps": arguments.steps, "seed": arguments.seed, "strategy": arguments.strategy, "results": found}
    publish("precision", [table], saved, console, not arguments.no_save)
    if not arguments.no_save:
        curves = [Curve(name, smoothed(losses)) for name, losses in found.items()]
        (IMAGES / "precision.svg").write_text(line_plot("Training loss, nats per byte", "steps", "loss", curves))


if __name__ == "__main__":
    main()
