"""The picture of docs/gossip.md: `python docs/images/gossip.py` writes gossip.svg beside this file.

Graphs and curves come from `sherd.layout.topology`, for eight ranks. Both sets of colours, as in walk.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from sherd.layout.topology import Mixing, Topology, topology_of

RANKS, RADIUS, DOT = 8, 62, 12
"""How many ranks, and the sizes of their circle and of their dots, in pixels."""
CELL, TOP, PLOT = 184, 96, 210
"""The width of a graph, where the graphs begin, and the height of the plot."""
ROUNDS, DECADES = 16, 4
WIDE = 5 * CELL + 24

STYLE = """
    .page { fill: #ffffff } .dot { fill: #f3f5f8; stroke: #7d8590 } .own { fill: #fff6e0; stroke: #9a6700 }
    text { fill: #1f2328; font: 14px system-ui, sans-serif } .title { font-weight: 600 } .number { font-size: 12px }
    .soft { fill: #57606a; font-size: 13px } .edge { stroke: #c4cad1; fill: none } .mine { stroke: #9a6700; fill: none }
    .tip { fill: #9a6700 } .axis { stroke: #d0d7de } .curve { fill: none; stroke-width: 2 }
    .ring { stroke: #0969da } .exponential { stroke: #8250df } .one-peer { stroke: #1a7f37 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .dot { fill: #161b22; stroke: #8b949e } .own { fill: #2b2410; stroke: #d29922 }
      text { fill: #e6edf3 } .soft { fill: #9da7b3 } .edge { stroke: #3d444d } .mine { stroke: #d29922 }
      .tip { fill: #d29922 } .axis { stroke: #30363d } .ring { stroke: #58a6ff } .exponential { stroke: #bc8cff }
      .one-peer { stroke: #3fb950 }
    }
"""


def place(rank: int, left: float) -> tuple[float, float]:
    """The middle of a rank's dot."""
    angle = 2 * math.pi * rank / RANKS - math.pi / 2
    return left + CELL / 2 + RADIUS * math.cos(angle), TOP + RADIUS + DOT + RADIUS * math.sin(angle)


def edge(source: int, target: int, left: float) -> str:
    """What a rank gives to another; what rank 0 gives is in colour, with a tip."""
    (x, y), (to_x, to_y) = place(source, left), place(target, left)
    length = math.hypot(to_x - x, to_y - y)
    along_x, along_y = (to_x - x) / length, (to_y - y) / length
    x, y, to_x, to_y = x + DOT * along_x, y + DOT * along_y, to_x - DOT * along_x, to_y - DOT * along_y
    line = f'<path class="{"edge" if source else "mine"}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
    if source:
        return line
    back_x, back_y = to_x - 9 * along_x, to_y - 9 * along_y
    corners = [(back_x - 5 * along_y, back_y + 5 * along_x), (back_x + 5 * along_y, back_y - 5 * along_x)]
    (a, b), (c, d) = corners
    return f'{line}<path class="tip" d="M{to_x:.1f} {to_y:.1f}L{a:.1f} {b:.1f}L{c:.1f} {d:.1f}z"/>'


def graph(mixing: Mixing, title: str, subtitle: str, column: int) -> list[str]:
    """One round: every rank, and whom it gives to."""
    left = 12 + column * CELL
    parts = [
        f'<text class="title" x="{left + CELL / 2}" y="40" text-anchor="middle">{title}</text>',
        f'<text class="soft" x="{left + CELL / 2}" y="62" text-anchor="middle">{subtitle}</text>',
    ]
    pairs = [(source, target) for source in range(RANKS) for target in mixing.targets(source)]
    parts += [edge(*pair, left) for pair in sorted(pairs, reverse=True)]  # those of rank 0 on top
    for rank in range(RANKS):
        x, y = place(rank, left)
        parts.append(f'<circle class="{"dot" if rank else "own"}" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"/>')
        parts.append(f'<text class="number" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{rank}</text>')
    return parts


def distances(topology: Topology) -> list[float]:
    """How far ranks are from their mean after each round, at the start 1: one rank differs from all others."""
    x = torch.zeros(RANKS, dtype=torch.float64)
    x[0] = 1.0
    found = []
    for number in range(ROUNDS + 1):
        found.append(float((x - x.mean()).norm()))
        x = topology.at(number).matrix() @ x
    return [each / found[0] for each in found]


def plot(top: float) -> list[str]:
    """Distances by round, on a logarithmic scale."""
    left, right = 96, WIDE - 200

    def point(number: int, value: float) -> str:
        depth = min(-math.log10(max(value, 10.0**-DECADES)), DECADES)
        return f"{left + (right - left) * number / ROUNDS:.1f} {top + PLOT * depth / DECADES:.1f}"

    parts = [f'<text class="title" x="{left}" y="{top - 16:.0f}">distance from the mean, by rounds of mixing</text>']
    for decade in range(DECADES + 1):
        y = top + PLOT * decade / DECADES
        parts.append(f'<path class="axis" d="M{left} {y:.1f}H{right}"/>')
        label = f"1/{10**decade:,}" if decade else "1"
        parts.append(f'<text class="soft" x="{left - 10}" y="{y + 5:.1f}" text-anchor="end">{label}</text>')
    for number in range(0, ROUNDS + 1, 4):
        x = left + (right - left) * number / ROUNDS
        parts.append(f'<text class="soft" x="{x:.1f}" y="{top + PLOT + 22:.1f}" text-anchor="middle">{number}</text>')
    for style, words, name in (
        ("ring", "ring", "ring"),
        ("exponential", "exponential", "exponential"),
        ("one-peer", "one-peer: none after 3", "one-peer-exponential"),
    ):
        found = distances(topology_of(name, RANKS))
        shown = [value for value in found if value >= 10.0**-DECADES]
        if found[len(shown) : len(shown) + 1] and found[len(shown)] < 1e-12:  # it is gone, not just too small to show
            shown.append(0.0)
        points = "L".join(point(n, value) for n, value in enumerate(shown))
        parts.append(f'<path class="curve {style}" d="M{points}"/>')
        row = top + 14 + 24 * ("ring", "exponential", "one-peer").index(style)
        parts.append(f'<path class="curve {style}" d="M{right + 14} {row - 5:.1f}h22"/>')
        parts.append(f'<text class="soft" x="{right + 42}" y="{row:.1f}">{words}</text>')
    return parts


def picture() -> str:
    """The whole SVG."""
    one_peer = topology_of("one-peer-exponential", RANKS)
    graphs = [
        (topology_of("ring", RANKS).at(0), "ring", "a third to each side"),
        (topology_of("exponential", RANKS).at(0), "exponential", "a quarter to 1, 2, 4 after"),
        *((one_peer.at(n), "one-peer", f"round {n + 1}: half to {1 << n} after") for n in range(3)),
    ]
    top = TOP + 2 * (RADIUS + DOT) + 64
    high = top + PLOT + 44
    parts = [part for column, each in enumerate(graphs) for part in graph(*each, column)]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" width="{WIDE}" height="{high}">'
    title = "<title>Whom every rank gives to, and how fast eight ranks approach their mean</title>"
    page = f'<rect class="page" width="{WIDE}" height="{high}"/>'
    return "\n".join([start, title, f"<style>{STYLE}</style>", page, *parts, *plot(top), "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("gossip.svg").write_text(picture())
