"""What exchanging less costs in model quality: `python -m benchmarks.convergence`.

A small GPT learns Python's standard library on four ranks of this machine: by `ddp`, which sums gradients in every
step; by `diloco`, whose ranks meet every 50 steps after a short warm-up with summed gradients; and by `gossip` with one
neighbour per step. All see the same tokens in the same order; judged is the loss on files that nobody trains on, at the
consensus of the ranks.

Each strategy has a learning rate of its own, and `diloco` its outer rate and momentum. Without `--choose` they are
those of trial runs on another seed. `--choose` chooses them anew, on another seed and with a quarter of the steps:
every number of a strategy in turn moves along its grid, from where it is, as long as the held-out loss falls; what was
tried is saved. The comparison takes about 25 minutes on two cores.

How close the others come to ddp depends on the regime: on how much ddp gains by four times as many samples in every
step. With 128 sequences per rank, as here, that is little. With 32 per rank and two layers `diloco` ended 3.1% behind
ddp, with 4 and a larger model 19%.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

import sherd
from benchmarks.line_plot import Curve, line_plot
from benchmarks.training import publish
from benchmarks.training_report import new_table
from sherd.api.training import training_of
from sherd.recipes import gpt

RANKS, EVERY, BATCH, LENGTH = 4, 50, 128, 64
WIDTH, LAYERS = 32, 1
IMAGES = Path(__file__).parent.parent / "docs" / "images"


@dataclass(frozen=True)
class Setting:
    """What is chosen for a strategy. Those without an outer optimizer have no outer numbers."""

    lr: float
    outer_lr: float | None = None
    outer_momentum: float | None = None


GRIDS = {
    "lr": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3),
    "outer_lr": (0.5, 0.7, 0.9, 1.0, 1.2),
    "outer_momentum": (0.0, 0.2, 0.4, 0.6, 0.8),
}
CHOSEN = {  # by trial runs of 2,000 steps with seed 1 and two layers, gossip's with 32 sequences; --choose begins here
    "ddp": Setting(32e-3),
    "diloco": Setting(16e-3, 1.0, 0.2),
    "gossip": Setting(16e-3),
}


@dataclass
class Learned:
    """How one run went."""

    held_out: list[tuple[float, float]] = field(default_factory=list)
    payload: int = 0  # bytes that all ranks sent for training

    @property
    def loss(self) -> float:
        return self.held_out[-1][1]


def strategy_of(name: str, setting: Setting, steps: int) -> Any:
    if name == "diloco":
        assert setting.outer_lr is not None and setting.outer_momentum is not None
        outer_lr, momentum = setting.outer_lr, setting.outer_momentum
        return sherd.DiLoCo(every=EVERY, warmup=steps // 100, outer_lr=outer_lr, outer_momentum=momentum)
    return sherd.Gossip(topology="one-peer-exponential") if name == "gossip" else name


def rate(step: int, steps: int) -> float:
    """Of the learning rate: it rises at first and ends near 0, where ranks that exchange less come to agree."""
    return min(1.0, (step + 1) / gpt.WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def learn(strategy: Any, lr: float, seed: int, steps: int, look_every: int) -> Learned:
    """One run on this rank."""
    torch.set_num_threads(1)
    sherd.seed(seed)
    text, other = gpt.read(None)
    model = gpt.Gpt(WIDTH, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
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


def run(name: str, setting: Setting, seed: int, steps: int, look_every: int) -> Learned:
    strategy = strategy_of(name, setting, steps)
    by_rank = sherd.launch(learn, RANKS, strategy, setting.lr, seed, steps, look_every)
    return Learned(by_rank[0].held_out, sum(each.payload for each in by_rank))


def choose(start: Setting, judge: Callable[[Setting], float]) -> dict[Setting, float]:
    """What was tried, and its losses: each number in turn goes to its neighbours on the grid while that is better."""
    best, tried = start, {start: judge(start)}
    for number, grid in GRIDS.items():
        if getattr(start, number) is None:
            continue
        for direction in (1, -1):
            while 0 <= (place := grid.index(getattr(best, number)) + direction) < len(grid):
                beside = replace(best, **{number: grid[place]})
                if beside not in tried:
                    tried[beside] = judge(beside)
                if not tried[beside] < tried[best]:
                    break
                best = beside
    return tried


def choose_all(steps: int, seed: int, console: Console) -> dict[str, dict[Setting, float]]:
    """What was tried for each strategy."""

    def judge(name: str, setting: Setting) -> float:
        loss = run(name, setting, seed, steps, steps).loss
        console.print(f"{name} with {_said(setting)}: held-out loss {loss:.4f} after {steps} steps with seed {seed}")
        return loss if math.isfinite(loss) else math.inf

    def tried(name: str) -> dict[Setting, float]:
        return choose(CHOSEN[name], lambda setting: judge(name, setting))

    return {name: tried(name) for name in CHOSEN}


def report(found: dict[str, Learned], settings: dict[str, Setting], steps: int) -> Table:
    table = new_table(
        f"{_regime()}, {steps} steps",
        "strategy", "chosen on another seed", "held-out loss", "to ddp's", "MB sent by all ranks", "times fewer",
    )  # fmt: skip
    for name, one in found.items():
        ratio, fewer = one.loss / found["ddp"].loss, found["ddp"].payload / max(one.payload, 1)
        compared = f"{100 * (ratio - 1):+.2f}%", f"{one.payload / 1e6:.1f}", f"{fewer:.1f}"
        table.add_row(name, _said(settings[name]), f"{one.loss:.4f}", *compared)
    return table


def _regime() -> str:
    return f"GPT of width {WIDTH}, {LAYERS} layers, {RANKS} ranks x {BATCH} x {LENGTH} tokens"


def _said(setting: Setting) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(setting).items() if value is not None)


def save_choices(tried: dict[str, dict[Setting, float]], steps: int, seed: int, console: Console, save: bool) -> None:
    table = new_table(f"{_regime()}, {steps} steps with seed {seed}", "strategy", "tried", "held-out loss")
    for name, losses in tried.items():
        for setting, loss in sorted(losses.items(), key=lambda each: each[1]):
            table.add_row(name, _said(setting), f"{loss:.4f}")
    rows = {name: [asdict(each) | {"loss": loss} for each, loss in losses.items()] for name, losses in tried.items()}
    publish("convergence_choices", [table], {"steps": steps, "seed": seed, "tried": rows}, console, save)


def save_comparison(
    found: dict[str, Learned], settings: dict[str, Setting], steps: int, seed: int, console: Console, save: bool
) -> None:
    saved = {
        "steps": steps,
        "seed": seed,
        "settings": {name: asdict(setting) for name, setting in settings.items()},
        "results": {name: asdict(one) for name, one in found.items()},
    }
    publish("convergence", [report(found, settings, steps)], saved, console, save)
    if save:
        curves = [Curve(name, list(itertools.dropwhile(_early, one.held_out))) for name, one in found.items()]
        title = "Held-out loss at the consensus, nats per byte"
        (IMAGES / "convergence.svg").write_text(line_plot(title, "steps", "loss", curves))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--look-every", type=int, default=200, help="steps between two looks at the held-out loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choose", action="store_true", help="choose learning rates on the next seed first")
    parser.add_argument("--choose-steps", type=int, help="steps of each run for that; a quarter of --steps")
    parser.add_argument("--no-save", action="store_true", help="write no results and no picture")
    arguments = parser.parse_args()
    os.environ.setdefault("SHERD_SPIN", "0")  # more ranks than cores
    console, settings, save = Console(width=130, highlight=False), CHOSEN, not arguments.no_save
    if arguments.choose:
        steps, seed = arguments.choose_steps or arguments.steps // 4, arguments.seed + 1
        tried = choose_all(steps, seed, console)
        save_choices(tried, steps, seed, console, save)
        settings = {name: min(losses, key=lambda each: losses[each]) for name, losses in tried.items()}
    found: dict[str, Learned] = {}
    for name, setting in settings.items():
        found[name] = run(name, setting, arguments.seed, arguments.steps, arguments.look_every)
        console.print(f"{name} with {_said(setting)}: held-out loss {found[name].loss:.4f}")
    save_comparison(found, settings, arguments.steps, arguments.seed, console, save)


def _early(point: tuple[float, float]) -> bool:
    """The first looks would hide the differences between the last ones."""
    return point[0] < 200


if __name__ == "__main__":
    main()
