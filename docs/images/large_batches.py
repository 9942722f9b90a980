"""The picture of docs/large-batches.md: `python docs/images/large_batches.py` writes it beside this file.

The cuts are those of a layout of `sherd.layout`, the rates those of `sherd.optim`. Both sets of colours, as in walk.py.
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import torch

from sherd.layout.entry import Entry
from sherd.layout.placement import BLOCK, padded
from sherd.layout.shard_layout import ShardLayout
from sherd.optim import LAMB, scaled_lr, warmup

RANKS = 3
LAYERS = (Entry("embedding", (24, 64)), Entry("hidden", (40, 80)), Entry("head", (10, 100)))
CELL, HIGH, LEFT, MARGIN = 27, 24, 150, 24
"""The width and height of a block, where blocks begin, and around the picture, in pixels."""
STEPS, WARM, PLOT, WIDTH = 100, 20, 120, 620
BATCH, REFERENCE, RATE = 8192, 512, 0.001
STYLE = (
    runpy.run_path(str(Path(__file__).with_name("walk.py")))["STYLE"]
    + """
    .rank0 { fill: #9ec5fe } .rank1 { fill: #a3d9b1 } .rank2 { fill: #f7c59f } .block { stroke: #57606a }
    .wire { stroke: #57606a; fill: none; stroke-opacity: 0.45 } .axis { stroke: #d0d7de }
    .linear { stroke: #e0674c; fill: none; stroke-width: 2 } .sqrt { stroke: #0969da; fill: none; stroke-width: 2 }
    @media (prefers-color-scheme: dark) {
      .rank0 { fill: #1f4b87 } .rank1 { fill: #1f6b3a } .rank2 { fill: #8a4b1c } .block { stroke: #9da7b3 }
      .wire { stroke: #9da7b3 } .axis { stroke: #30363d } .linear { stroke: #ff8a6e } .sqrt { stroke: #58a6ff }
    }
"""
)


def text(x: float, y: float, words: str, style: str = "soft", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, rank: int) -> str:
    return f'<rect class="block rank{rank}" x="{x:.0f}" y="{y:.0f}" width="{CELL - 3}" height="{HIGH}" rx="3"/>'


def layers(top: float) -> tuple[list[str], float]:
    """The slices of the ranks, and the same blocks layer by layer."""
    layout = ShardLayout.build(LAYERS, RANKS, bucket_numel=1 << 20)
    slices, below = top + 44, top + 150
    parts = [text(MARGIN, top, "what a rank has: the norms of its blocks, of parameters and of directions", "file")]
    places: dict[tuple[int, int], tuple[float, int]] = {}
    gap = 34
    for rank in range(RANKS):
        width = layout.buckets[0].slice_numel // BLOCK * CELL
        left = LEFT + rank * (width + gap)
        parts.append(text(left, slices - 8, f"rank {rank}"))
        for segment in layout.segments(rank):
            for block in range(segment.blocks):
                x = left + (segment.offset // BLOCK + block) * CELL
                places[segment.entry, segment.first_block + block] = x, rank
                parts.append(box(x, slices, rank))
    left = LEFT
    for index, entry in enumerate(LAYERS):
        count = padded(entry.numel) // BLOCK
        for block in range(count):
            x, rank = places[index, block]
            to = left + block * CELL
            middle = (slices + HIGH + below) / 2
            start, end = x + CELL / 2 - 1.5, to + CELL / 2 - 1.5
            curve = (
                f"M{start:.1f} {slices + HIGH}C{start:.1f} {middle:.1f} {end:.1f} {middle:.1f} {end:.1f} {below:.0f}"
            )
            parts += [f'<path class="wire" d="{curve}"/>', box(to, below, rank)]
        parts.append(text(left, below + HIGH + 20, f"{entry.name}: {count} blocks"))
        parts.append(text(left, below + HIGH + 40, "|w|, |r|, ratio", "file"))
        left += count * CELL + gap
    parts.append(text(MARGIN, (slices + HIGH + below) / 2 + 5, "one exchange", "file"))
    return parts, below + HIGH + 40


def rates(rule: str) -> list[float]:
    """The rate of each step, with a warm-up and a cosine after it."""
    lr = scaled_lr(RATE, BATCH, REFERENCE, rule=rule)
    optimizer = LAMB([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARM)
    scheduler = warmup(optimizer, WARM, after=after)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is trained here
        for _ in range(STEPS):
            found.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
    return found


def plot(top: float) -> tuple[list[str], float]:
    parts = [text(MARGIN, top, f"rates for a batch of {BATCH:,}, where {RATE} is good for {REFERENCE}", "file")]
    base, most = top + 24 + PLOT, scaled_lr(RATE, BATCH, REFERENCE)
    for value in (0.0, most / 4, most / 2, most):
        y = base - PLOT * value / most
        parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{LEFT + WIDTH}"/>')
        parts.append(text(LEFT - 10, y + 5, f"{value:g}", anchor="end"))
    for rule in ("linear", "sqrt"):
        found = rates(rule)
        points = [
            f"{LEFT + WIDTH * step / STEPS:.1f} {base - PLOT * rate / most:.1f}" for step, rate in enumerate(found)
        ]
        parts.append(f'<path class="{rule}" d="M{"L".join(points)}"/>')
        x = LEFT + WIDTH * WARM / STEPS
        parts.append(text(x, base - PLOT * max(found) / most - 6, f'rule="{rule}"'))
    parts.append(text(LEFT, base + 22, f"{STEPS} steps, of which {WARM} warm up"))
    return parts, base + 22


def picture() -> str:
    """The whole SVG."""
    above, end = layers(MARGIN + 14)
    below, end = plot(end + 48)
    wide, high = 900, int(end) + MARGIN
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    title = "<title>Blocks of layers that are cut across ranks, added up in order; rates with a warm-up</title>"
    page = f'<rect class="page" width="{wide}" height="{high}"/>'
    return "\n".join([start, title, f"<style>{STYLE}</style>", page, *above, *below, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("large_batches.svg").write_text(picture())
