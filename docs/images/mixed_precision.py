"""The picture of docs/precision.md: `python docs/images/mixed_precision.py` writes it beside this file.

What a rank keeps is asked of an engine, one for each strategy. Plain SVG with its own background and both sets of
colours.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from torch import nn

import sherd
from sherd.api.training import training_of
from sherd.testing import FakeCommunicator

RANK, RANKS = 1, 4
BYTE, HIGH, LEFT, MARGIN, ROW, GAP, TOP = 40, 24, 96, 24, 46, 22, 112
"""The width of a byte per parameter, the height of a bar, where bars begin, around the picture, from row to row,
between bars, and where rows begin, in pixels."""
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
KINDS = {  # bytes of an element, what it is called, and what it is
    "parameters": (2, "parameters", "bf16"),
    "gradients": (4, "sum of gradients", "fp32; travels as bf16"),
    "masters": (4, "masters", "fp32, stepped"),
    "optimizer state": (8, "optimizer state", "fp32, two moments of AdamW"),
}
STYLE = (
    runpy.run_path(str(Path(__file__).with_name("walk.py")))["STYLE"]
    + """
    .absent { fill: none; stroke: #7d8590; stroke-dasharray: 3 3 }
    .half { fill: #9ec5fe; stroke: #0969da } .full { fill: #a3d9b1; stroke: #1a7f37 }
    @media (prefers-color-scheme: dark) {
      .half { fill: #1f4b87; stroke: #58a6ff } .full { fill: #1f6b3a; stroke: #3fb950 }
    }
"""
)


def kept(strategy: str) -> dict[str, float]:
    """Bytes per parameter that a rank with a host of its own keeps, by kind."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    how = strategy if strategy == "ddp" else sherd.ZeRO(stage=int(strategy[-1]), share_host_memory=False)
    sherd.distribute(model, optimizer, strategy=how, comm=FakeCommunicator(RANK, RANKS), precision="bf16")
    training = training_of(model)
    found = training.memory()
    found["optimizer state"] += training.coming_state_bytes()
    return {kind: round(found[kind] / model.weight.numel(), 2) for kind in KINDS}


def text(x: float, y: float, words: str, style: str = "soft") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{words}</text>'


def bar(style: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{HIGH}" rx="3"/>'


def picture(title: str) -> str:
    parts = [
        text(MARGIN, MARGIN + 14, f"What rank {RANK} of {RANKS} keeps, each with a host of its own", "title"),
        text(MARGIN, MARGIN + 36, "width: bytes per parameter. Dashed: with its owner, another rank"),
    ]
    lefts, x = {}, LEFT
    for kind, (size, name, what) in KINDS.items():
        lefts[kind] = x
        parts += [text(x, TOP - 28, name, "file"), text(x, TOP - 10, what)]
        x += size * BYTE + GAP + (60 if size == 2 else 0)  # its name is longer than its bar
    for row, strategy in enumerate(STRATEGIES):
        y, found = TOP + row * ROW, kept(strategy)
        parts.append(text(MARGIN, y + 17, strategy, "file"))
        for kind, (size, _, _) in KINDS.items():
            whole = found[kind] == size
            parts.append(bar("absent", lefts[kind], y, size * BYTE))
            start = 0 if whole else RANK * found[kind]
            parts.append(bar("half" if size == 2 else "full", lefts[kind] + start * BYTE, y, found[kind] * BYTE))
        parts.append(text(x, y + 17, f"{sum(found.values()):g} bytes", "file"))
    wide, high = x + 80 + MARGIN, TOP + len(STRATEGIES) * ROW + MARGIN - 16
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    page = f'<rect class="page" width="{wide}" height="{high}"/>'
    return "\n".join([start, f"<title>{title}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"


PICTURES = {"mixed_precision.svg": ("Who keeps parameters, gradients, masters and optimizer state",)}

if __name__ == "__main__":
    for name, arguments in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture(*arguments))
