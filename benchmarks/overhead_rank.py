"""One rank of one contender of `benchmarks.overhead`: it builds networks, and trains each in turns."""

from __future__ import annotations

import gc
import importlib
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.overhead_contenders import CONTENDERS, Step, optimizer_of
from benchmarks.overhead_networks import NETWORKS, Batch, Network
from benchmarks.serving import serve

SETTLING = 3  # steps after a model was built: state is made, buckets are rebuilt in the order that was seen


@dataclass(frozen=True)
class Join:
    """Import what is needed and find the other ranks."""

    contender: str
    rank: int
    ranks: int
    timeout: float


@dataclass(frozen=True)
class Build:
    """Drop the model that was there, and build this one."""

    network: str
    optimizer: str
    micro_batches: int


@dataclass(frozen=True)
class Built:
    parameters: int
    tensors: int
    loss: float  # after the first steps


@dataclass(frozen=True)
class Train:
    """Some steps, after one that does not count."""

    steps: int


@dataclass(frozen=True)
class Trained:
    """Of each step."""

    seconds: list[float]
    cpu_seconds: list[float]


class Rank:
    def __init__(self, join: Join) -> None:
        self.join = join
        self.contender = CONTENDERS[join.contender]
        self.network: Network
        self.step: Step | None = None
        self.micro_batches = 1
        self.steps = 0
        importlib.import_module(self.contender.package)
        if self.contender.connected and join.ranks > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=join.timeout))

    def build(self, command: Build) -> Built:
        self.step = None
        gc.collect()  # what was distributed is gone only with its cycles
        torch.manual_seed(0)  # the same weights on every rank of every contender
        self.network = NETWORKS[command.network]
        self.micro_batches, self.steps = command.micro_batches, 0
        model = self.network.new()
        sizes = [p.numel() for p in model.parameters()]
        self.step = self.contender.build(model, optimizer_of(model, command.optimizer))
        loss = torch.tensor(0.0)
        for batches in self._batches(SETTLING):
            loss = self.step(batches)
        return Built(sum(sizes), len(sizes), loss.item())

    def train(self, command: Train) -> Trained:
        assert self.step is not None, "a model is built before it is trained"
        first, *counted = self._batches(1 + command.steps)
        self.step(first)
        seconds, cpu_seconds = [], []
        for batches in counted:
            start, cpu = time.perf_counter(), time.process_time()
            self.step(batches)
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
