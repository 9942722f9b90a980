"""Does exchanging less cost quality? A small GPT on the text of Python's library, held-out loss against bytes sent.

    python -m benchmarks.convergence                     # ddp, diloco and gossip on 4 ranks, 2,000 steps each
    python -m benchmarks.convergence --only ddp diloco --steps 200
    python -m benchmarks.convergence --tune              # choose the outer learning rate, on another seed

All contenders train the same model from the same seed on the same tokens. Evaluation is at the mean of all ranks'
parameters, and counts for nothing in the bytes. A plot of each contender beside ddp goes into docs/images.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sherd
from benchmarks.convergence_plot import Curve, plot
from benchmarks.gpt import Gpt, Size
from sherd import CommOptions, comm
from sherd.strategies import Strategy, names

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
SIZE = Size(layers=3, width=96, heads=3, vocabulary=256, positions=64)
SEQUENCES, HELD_OUT = 8, 128  # per rank and step; and for evaluation
RATE, SUMMED = 2e-3, 0.01  # the peak of the inner learning rate; the part of all steps that is summed first
OUTER_RATES = (0.4, 0.55, 0.7, 0.85, 1.0)
TUNED = RESULTS / "convergence_outer_lr.json"


@dataclass
class Outcome:
    """What one contender has come to."""

    contender: str
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """held-out, after these steps"""
    payload: int = 0
    """bytes that rank 0 has sent"""


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of the Python library: those to train on, and the last twentieth, which is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(tokens) * 19 // 20
    return tokens[:cut], tokens[cut:]


def sequences(tokens: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - SIZE.positions - 1, (count, 1), generator=generator)
    rows = tokens[starts + torch.arange(SIZE.positions + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def strategy_of(contender: str, steps: int, every: int, outer_lr: float) -> str | Strategy:
    if contender == "diloco":
        return sherd.DiLoCo(every=every, warmup=max(1, int(SUMMED * steps)), outer_lr=outer_lr)
    return contender


def train(contender: str, steps: int, every: int, outer_lr: float, seed: int, evaluations: int) -> dict[str, Any]:
    """On one rank."""
    torch.set_num_threads(1)
    with comm.connect(CommOptions()) as ranks:
        torch.manual_seed(seed)
        model, measured = Gpt(SIZE), Gpt(SIZE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
        strategy: Any = strategy_of(contender, steps, every, outer_lr)
        model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=ranks, clip_norm=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
        text, held_out = corpus()
        mine = torch.Generator().manual_seed(1_000_003 * seed + ranks.rank)
        questions = sequences(held_out, HELD_OUT, torch.Generator().manual_seed(0))
        outcome = Outcome(contender)
        ranks.counters.reset()
        for step in range(1, steps + 1):
            model.loss(*sequences(text, SEQUENCES, mine)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % max(1, steps // evaluations) == 0 or step == steps:
                outcome.steps.append(step)
                outcome.losses.append(loss_at_mean(ranks, model, measured, questions))
        outcome.payload = ranks.counters.total().payload
        return asdict(outcome)


def rate(step: int, steps: int) -> float:
    """Of the peak: up in a twentieth of all steps, then down along a cosine to a tenth."""
    rise = max(1, steps // 20)
    return min((step + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0)))


@torch.no_grad()
def loss_at_mean(ranks: comm.Communicator, model: Gpt, measured: Gpt, questions: tuple[Tensor, Tensor]) -> float:
    with ranks.counters.agreeing(), ranks.counters.between_steps():
        for ours, target in zip(model.parameters(), measured.parameters(), strict=True):
            target.copy_(ranks.all_reduce(ours.detach().clone(), op="mean").wait())
    return float(measured.loss(*questions))


def measure(contender: str, arguments: argparse.Namespace, outer_lr: float, seed: int) -> Outcome:
    steps, every, count = arguments.steps, arguments.every, arguments.evaluations
    found = sherd.launch(train, arguments.ranks, contender, steps, every, outer_lr, seed, count)
    outcome = Outcome(**found[0])
    print(f"{contender:<10} seed {seed}  outer lr {outer_lr:<5} held-out {outcome.losses[-1]:.4f}", flush=True)
    return outcome


def tune(arguments: argparse.Namespace) -> None:
    """Choose the outer learning rate on another seed than the comparison's."""
    found = {lr: measure("diloco", arguments, lr, arguments.seed + 1).losses[-1] for lr in OUTER_RATES}
    TUNED.write_text(json.dumps({"outer_lr": min(found, key=found.__getitem__), "by_rate": found}, indent=1) + "\n")


def compare(arguments: argparse.Namespace) -> None:
    outer_lr = json.loads(TUNED.read_text())["outer_lr"] if TUNED.exists() else sherd.DiLoCo().outer_lr
    missing = [each for each in arguments.only if each not in names()]
    for each in missing:
        print(f"{each} is not a strategy of this version, and is left out")
    found = [measure(each, arguments, outer_lr, arguments.seed) for each in arguments.only if each not in missing]
    base = found[0]
    lines = [f"{'':<10}{'held-out':>10}{'of ' + base.contender:>10}{'MB sent':>12}{'times fewer':>13}"]
    for each in found:
        loss, fewer = each.losses[-1], base.payload / max(each.payload, 1)
        part = loss / base.losses[-1]
        lines.append(f"{each.contender:<10}{loss:>10.4f}{part:>10.4f}{each.payload / 1e6:>12.1f}{fewer:>13.1f}")
    text = f"{arguments.ranks} ranks, {arguments.steps} steps, H={arguments.every}, outer lr {outer_lr}\n"
    text += "\n".join(lines) + "\n"
    print(text, end="")
    (arguments.into / "convergence.txt").write_text(text)
    for each in found[1:]:
        curves = [Curve(one.contender, one.steps, one.losses) for one in (base, each)]
        picture = plot(curves, f"{each.contender} beside {base.contender}", "steps", "held-out loss")
        (arguments.pictures / f"convergence-{each.contender}.svg").write_text(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["ddp", "diloco", "gossip"], help="the first is compared with")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--into", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    (tune if arguments.tune else compare)(arguments)


if __name__ == "__main__":
    main()
