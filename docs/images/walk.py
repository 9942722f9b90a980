"""The picture of docs/architecture.md: `python docs/images/walk.py` writes walk.svg beside this file.

Plain SVG with its own background and both sets of colours, so that it can be read on light and dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, MARGIN, GAP = 470, 24, 28
"""Of a column, around the picture, and between columns, in pixels."""
LINE, PAD, ARROW = 19, 11, 22
HEAD = 58


class Box(NamedTuple):
    """One stop: a file, and what happens there, line by line."""

    file: str
    lines: tuple[str, ...]
    kind: str = "engine"


class Walk(NamedTuple):
    title: str
    subtitle: str
    boxes: tuple[Box, ...]


GRADIENT = Walk(
    "A gradient",
    "loss.backward() under zero2",
    (
        Box("patches/backward.py", ("torch.autograd.backward, wrapped",), "outside"),
        Box("engine/summed.py", ("begin_round: unfreezes, clears p.grad", "arrive: the first gradient is here")),
        Box("engine/gradients/round.py", ("hook: takes it out of p.grad", "Round.complete: launches buckets in turn")),
        Box("engine/buckets/bucket.py", ("Bucket.arrive: holds the contribution", "Bucket.launch: fills slots")),
        Box("engine/buckets/ring.py", ("Reductions.slot: the next free slot",)),
        Box("strategies/zero.py", ("Sharded.reduce: into this rank's slice",)),
        Box("comm", ("reduce_scatter: peers read the slots",), "outside"),
        Box("engine/buckets/bucket.py", ("Bucket.finish: norms of the slice",)),
        Box("engine/summed.py", ("end_round: launches the rest, waits",)),
        Box("engine/consistency/agreement.py", ("agree: used, late, finite, in one small sum",)),
        Box("engine/gradients/access.py", ("GradAccess.show: p.grad can be read",)),
    ),
)
STEP = Walk(
    "A step",
    "optimizer.step() under zero2",
    (
        Box("patches/optimizer_object.py", ("the optimizer's step(), replaced",), "outside"),
        Box("api/training.py", ("Training.step: closure, hooks of the step",), "outside"),
        Box("engine/engine.py", ("prepare_step: does this call update?",)),
        Box("engine/gradients/gradient.py", ("Window.advance: counts the call", "Gradient.divide, Gradient.clip")),
        Box("engine/modules/buffers.py", ("BufferSync.sync: buffers become equal",)),
        Box("engine/engine.py", ("updating: around the update",)),
        Box("engine/consistency/unchanged.py", ("Unchanged.check: edits by the program",)),
        Box("engine/parameters/store.py", ("ParameterStore.acquire",)),
        Box("engine/optimizer/shard.py", ("OptimizerShard.step: what this rank owns;", "unused ones get no gradient")),
        Box("engine/parameters/host_store.py", ("ParameterStore.publish: all ranks see it",)),
        Box("comm", ("barrier: one copy per host needs no more",), "outside"),
    ),
)

STYLE = """
    .page { fill: #ffffff } .box { fill: #f3f5f8; stroke: #7d8590 } .outside { fill: #fff6e0; stroke: #9a6700 }
    text { fill: #1f2328; font: 14px system-ui, sans-serif } .title { font-size: 19px; font-weight: 600 }
    .file { font: 600 14px ui-monospace, monospace } .soft { fill: #57606a } .arrow { stroke: #57606a; fill: none }
    .tip { fill: #57606a }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .box { fill: #161b22; stroke: #8b949e } .outside { fill: #2b2410; stroke: #d29922 }
      text { fill: #e6edf3 } .soft { fill: #9da7b3 } .arrow { stroke: #9da7b3 } .tip { fill: #9da7b3 }
    }
"""


def height(box: Box) -> int:
    return 2 * PAD + LINE * (1 + len(box.lines))


def column(walk: Walk, left: int) -> list[str]:
    """The SVG of one walk, from top to bottom."""
    parts = [
        f'<text class="title" x="{left}" y="{MARGIN + 18}">{escape(walk.title)}</text>',
        f'<text class="soft" x="{left}" y="{MARGIN + 40}">{escape(walk.subtitle)}</text>',
    ]
    top, middle = MARGIN + HEAD, left + WIDTH // 2
    for number, box in enumerate(walk.boxes):
        if number:
            tip = top - 3
            parts.append(f'<path class="arrow" d="M{middle} {top - ARROW + 2}V{tip - 5}"/>')
            parts.append(f'<path class="tip" d="M{middle - 5} {tip - 7}h10l-5 7z"/>')
        kind = "outside" if box.kind == "outside" else "box"
        parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{WIDTH}" height="{height(box)}" rx="6"/>')
        for row, line in enumerate((box.file, *box.lines)):
            style = "file" if row == 0 else "soft"
            y = top + PAD + LINE * row + 14
            parts.append(f'<text class="{style}" x="{left + 14}" y="{y}">{escape(line)}</text>')
        top += height(box) + ARROW
    return parts


def picture() -> str:
    """The whole SVG."""
    walks = (GRADIENT, STEP)
    tallest = max(sum(height(box) + ARROW for box in walk.boxes) - ARROW for walk in walks)
    wide = 2 * MARGIN + len(walks) * WIDTH + (len(walks) - 1) * GAP
    high = 2 * MARGIN + HEAD + tallest
    parts = [part for n, walk in enumerate(walks) for part in column(walk, MARGIN + n * (WIDTH + GAP))]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    title = "<title>The files that a gradient and a step go through</title>"
    page = f'<rect class="page" width="{wide}" height="{high}"/>'
    return "\n".join([start, title, f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("walk.svg").write_text(picture())
