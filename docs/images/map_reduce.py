"""The picture of docs/map-reduce.md: `python docs/images/map_reduce.py` writes map_reduce.svg beside this file.

The brackets are drawn from the tree that map_reduce merges by. Plain SVG with its own background and both sets of
colours, so that it can be read on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sherd.mapreduce.tree import Forest

CHUNKS = 6
DEALT = (0, 1, 0, 0, 1, 0)
"""The rank of each chunk, of two ranks of which rank 1 is slow."""
WIDTH, GAP, MARGIN, LEVEL, BOX = 92, 16, 24, 58, 40
"""Of a chunk, between chunks, around the picture, between levels and of a box, in pixels."""
HEAD = 54

STYLE = """
    .page { fill: #ffffff } .rank0 { fill: #ddf4ff; stroke: #0969da } .rank1 { fill: #fff6e0; stroke: #9a6700 }
    .node { fill: #f3f5f8; stroke: #7d8590 } .line { stroke: #57606a; fill: none }
    text { fill: #1f2328; font: 14px system-ui, sans-serif; text-anchor: middle }
    .title { font-size: 17px; font-weight: 600; text-anchor: start } .soft { fill: #57606a; text-anchor: start }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .rank0 { fill: #0c2d4d; stroke: #58a6ff } .rank1 { fill: #2b2410; stroke: #d29922 }
      .node { fill: #161b22; stroke: #8b949e } .line { stroke: #9da7b3 } text { fill: #e6edf3 } .soft { fill: #9da7b3 }
    }
"""


class Node(NamedTuple):
    """A merged result: where it is drawn, and what is in it."""

    x: float
    level: int
    text: str
    parts: tuple[Node, ...] = ()


def tree() -> Node:
    """The nodes, as `Forest` merges them."""

    def merge(a: Node, b: Node) -> Node:
        first, last = a.text.split("-")[0], b.text.split("-")[-1]
        return Node((a.x + b.x) / 2, 1 + max(a.level, b.level), f"{first}-{last}", (a, b))

    forest = Forest(merge)
    for chunk in range(CHUNKS):
        forest.add((0, chunk), Node(MARGIN + chunk * (WIDTH + GAP) + WIDTH / 2, 0, str(chunk)))
    found = forest.total()
    assert found is not None
    return found


def top(level: int) -> float:
    return MARGIN + HEAD + level * LEVEL


def drawn(node: Node) -> list[str]:
    """The SVG of a node and of all below it."""
    y = top(node.level)
    parts = [
        f'<path class="line" d="M{part.x} {top(part.level) + BOX}V{y - 9}H{node.x}V{y}"/>' for part in node.parts
    ] + [line for part in node.parts for line in drawn(part)]
    kind = "node" if node.parts else f"rank{DEALT[int(node.text)]}"
    label = f"merge {node.text}" if node.parts else f"chunk {node.text}"
    parts.append(f'<rect class="{kind}" x="{node.x - WIDTH / 2}" y="{y}" width="{WIDTH}" height="{BOX}" rx="6"/>')
    parts.append(f'<text x="{node.x}" y="{y + 25}">{label}</text>')
    return parts


def picture() -> str:
    """The whole SVG."""
    root = tree()
    wide = 2 * MARGIN + CHUNKS * (WIDTH + GAP) - GAP
    high = top(root.level) + BOX + MARGIN
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    head = [
        "<title>Six chunks, dealt to two ranks and merged by a fixed tree</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{wide}" height="{high}"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 14}">Dealt on demand, merged by number</text>',
        f'<text class="soft" x="{MARGIN}" y="{MARGIN + 36}">blue: rank 0; yellow: rank 1, which is slow. Any other '
        f"dealing gives the same tree</text>",
    ]
    return "\n".join([start, *head, *drawn(root), "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("map_reduce.svg").write_text(picture())
