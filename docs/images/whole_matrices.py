"""The picture of docs/whole-matrices.md: `python docs/images/whole_matrices.py` writes its SVG beside this file.

A small GPT is distributed over ranks that do not exist, and what each would own is drawn to scale. Plain SVG with its
own background and both sets of colours, so that it can be read on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import sherd
from sherd.api.training import training_of
from sherd.testing import FakeCommunicator

RANKS, LAYERS, WIDTH, WORDS = 3, 4, 256, 2000
LEFT, ACROSS, ROW, GAP, MARGIN, HEAD = 76, 880, 46, 30, 24, 62
"""Of the labels, of the longest row, of a row, below it, around the picture and above the rows, in pixels."""
SHAPES = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}

STYLE = """
    .page { fill: #ffffff } .flat { fill: #f3f5f8; stroke: #7d8590 }
    .layer0 { fill: #ddf4ff; stroke: #0969da } .layer1 { fill: #fff6e0; stroke: #9a6700 }
    .layer2 { fill: #dafbe1; stroke: #1a7f37 } .layer3 { fill: #fbefff; stroke: #8250df }
    text { fill: #1f2328; font: 13px system-ui, sans-serif } .title { font-size: 17px; font-weight: 600 }
    .soft { fill: #57606a } .inside { text-anchor: middle }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .flat { fill: #161b22; stroke: #8b949e }
      .layer0 { fill: #0c2d4d; stroke: #58a6ff } .layer1 { fill: #2b2410; stroke: #d29922 }
      .layer2 { fill: #0f2d1a; stroke: #3fb950 } .layer3 { fill: #2a1a40; stroke: #bc8cff }
      text { fill: #e6edf3 } .soft { fill: #9da7b3 }
    }
"""


class Owned(NamedTuple):
    """What a rank owns of one parameter, or of all that are cut."""

    text: str
    kind: str
    numel: int


def model() -> nn.Module:
    """Without data: only its shapes are needed."""
    with torch.device("meta"):
        blocks = {
            f"layer{n}": nn.ModuleDict({k: nn.Linear(i * WIDTH, o * WIDTH) for k, (o, i) in SHAPES.items()})
            for n in range(LAYERS)
        }
        return nn.ModuleDict({"words": nn.Embedding(WORDS, WIDTH), **blocks})


def owned() -> list[list[Owned]]:
    """What each rank owns, as `distribute` decides."""
    gpt = model()
    matrices = [p for name, p in gpt.named_parameters() if p.dim() == 2 and name != "words.weight"]
    rest = [p for name, p in gpt.named_parameters() if p.dim() != 2 or name == "words.weight"]
    optimizers = torch.optim.Muon(matrices), torch.optim.AdamW(rest)
    sherd.distribute(gpt, *optimizers, strategy="zero2", comm=FakeCommunicator(0, RANKS))
    layout = training_of(gpt).engine.layout
    found = []
    for rank in range(RANKS):
        segments = [(layout.entries[s.entry], s) for s in layout.segments(rank)]
        whole = [entry for entry, s in segments if layout.buckets[s.bucket].holder is not None]
        parts = sum(s.numel for _, s in segments) - sum(entry.numel for entry in whole)
        names = [(entry.name.split(".")[:2], entry.numel) for entry in sorted(whole, key=lambda each: each.name)]
        found.append([Owned(part, layer, numel) for (layer, part), numel in names])
        found[-1].append(Owned(f"1/{RANKS} of the rest", "flat", parts))
    return found


def picture() -> str:
    """The whole SVG."""
    rows = owned()
    scale = ACROSS / max(sum(each.numel for each in row) for row in rows)
    wide, high = 2 * MARGIN + LEFT + ACROSS, 2 * MARGIN + HEAD + RANKS * (ROW + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">',
        "<title>What each of three ranks owns of a small GPT</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{wide}" height="{high}"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 17}">What each of {RANKS} ranks owns of a GPT of {LAYERS} '
        "layers, to scale</text>",
        f'<text class="soft" x="{MARGIN}" y="{MARGIN + 40}">Coloured: matrices of Muon, each whole, one colour per '
        "layer. Grey: what AdamW has, cut into equal parts.</text>",
    ]
    for rank, row in enumerate(rows):
        top, left = MARGIN + HEAD + rank * (ROW + GAP), float(MARGIN + LEFT)
        parts.append(f'<text x="{MARGIN}" y="{top + 28}">rank {rank}</text>')
        for each in row:
            width = each.numel * scale
            parts.append(f'<rect class="{each.kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}"/>')
            parts.append(f'<text class="inside" x="{left + width / 2:.1f}" y="{top + 28}">{each.text}</text>')
            left += width
        total = sum(each.numel for each in row)
        parts.append(f'<text class="soft" x="{MARGIN + LEFT}" y="{top + ROW + 17}">{total:,} elements</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("whole_matrices.svg").write_text(picture())
