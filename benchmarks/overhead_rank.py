"""One rank of `benchmarks.overhead`: it builds networks for its contenders, and trains them in turns."""

from __future__ import annotations

import gc
import importlib
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.overhead_contenders import CONTENDERS, Step, alone, optimizer_of
from benchmarks.overhead_networks import NETWORKS, Batch, Network
from benchmarks.serving import serve

SETTLING = 3  # steps after a model was built: state is made, buckets are rebuilt in the order that was seen


@dataclass(frozen=True)
class Join:
    """Import what is needed and find the other ranks."""

    contenders: tuple[str, ...]
    rank: int
    ranks: int
    timeout: float


@dataclass(frozen=True)
class Build:
    """Drop the models that were there, and build this one for each contender, in this order."""

    network: str
    optimizer: str
    micro_batches: int
    contenders: tuple[str, ...]


@dataclass(frozen=True)
class Built:
    parameters: int
    tensors: int
    loss: float  # after the first steps


@dataclass(frozen=True)
class Train:
    """Some steps of a contender, after one that does not count."""

    steps: int
    contender: str


@dataclass(frozen=True)
class Trained:
    """Of each step."""

    seconds: list[float]
    cpu_seconds: list[float]


class Rank:
    def __init__(self, join: Join) -> None:
        self.join = join
        self.network: Network
        self.takes: dict[str, Step] = {}
        self.micro_batches = 1
        self.steps = 0
        for name in join.contenders:
            importlib.import_module(CONTENDERS[name].package)
        if join.ranks > 1 and any(CONTENDERS[name].connected for name in join.contenders):
            dist.init_process_group("gloo", timeout=timedelta(seconds=join.timeout))

    def build(self, command: Build) -> dict[str, Built]:
        self.takes = {}
        gc.collect()  # what was distributed is gone only with its cycles
        self.network = NETWORKS[command.network]
        self.micro_batches, self.steps = command.micro_batches, 0
        sizes: list[int] = []
        for name in command.contenders:
            torch.manual_seed(0)  # the same weights on every rank of every contender
            model = self.network.new()
            sizes = [p.numel() for p in model.parameters()]
            self.takes[name] = CONTENDERS[name].build(model, optimizer_of(model, command.optimizer))
        losses = dict.fromkeys(self.takes, torch.tensor(0.0))
        for batches in self._batches(SETTLING):
            for name, take in self.takes.items():
                with alone(name):
                    losses[name] = take(batches)
        return {name: Built(sum(sizes), len(sizes), loss.item()) for name, loss in losses.items()}

    def train(self, command: Train) -> Trained:
        take = self.takes[command.contender]
        first, *counted = self._batches(1 + command.steps)
        seconds, cpu_seconds = [], []
        with alone(command.contender):
            take(first)
            for batches in counted:
                start, cpu = time.perf_counter(), time.process_time()
                take(batches)
                cpu_seconds.append(time.process_time() - cpu)
                seconds.append(time.perf_counter() - start)
        return Trained(seconds, cpu_seconds)

    def _batches(self, steps: int) -> list[list[Batch]]:
        """Of the next steps; made before they are timed."""
        made = []
        for step in range(self.steps, self.steps + steps):
            numbers = range(step * self.micro_batches, (step + 1) * self.micro_batches)
            made.append([self.network.batch(self.join.rank, number) for number in numbers])
        self.steps += steps
        return made


def obey(pipe: Connection) -> None:
    rank = Rank(pipe.recv())
    pipe.send(None)
    while True:
        command: Build | Train | None = pipe.recv()
        if command is None:
            return
        pipe.send(rank.build(command) if isinstance(command, Build) else rank.train(command))


def main() -> None:
    serve(obey)
