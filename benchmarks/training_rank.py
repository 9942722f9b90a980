"""One rank of one contender: it builds a model when told to, and then trains as many steps as it is told.

`training_group` starts it and `serving` connects it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import ALPHABET, SIZES, Gpt, Size, batch
from benchmarks.serving import serve
from benchmarks.training_contenders import CONTENDERS, OPTIMIZERS, Step

if TYPE_CHECKING:
    from sherd.testing import Host


@dataclass(frozen=True)
class Join:
    """Import what is needed and find the other ranks."""

    contender: str
    rank: int
    ranks: int  # as many as the other contenders have: a single process takes the data of all
    host: Host | None  # where it is to be, if not here
    size: str  # of the model that it will build
    optimizer: str  # a key of OPTIMIZERS


@dataclass(frozen=True)
class Build:
    """Build the model and hand it to the contender."""

    size: str


@dataclass(frozen=True)
class Train:
    """Some steps; of a network for images, `sequences` are images and `tokens` their pixels in each direction."""

    sequences: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class Trained:
    seconds: list[float]
    losses: list[float]


class Rank:
    def __init__(self, join: Join) -> None:
        self.contender = CONTENDERS[join.contender]
        self.options = OPTIMIZERS[join.optimizer]
        self.sees = range(join.ranks) if self.contender.whole else (join.rank,)
        self.steps = 0
        self.step: Step
        self.batch: Callable[..., tuple[Tensor, Tensor]] = batch
        if join.host is not None:
            from benchmarks.training_place import move_to  # it has sherd: contenders of one machine have not

            move_to(join.host)
        importlib.import_module(self.contender.package)
        self.images: Any = None if join.size in SIZES else importlib.import_module("benchmarks.images")
        if self.contender.connected:
            dist.init_process_group(self.contender.backend)
        _warm_up()

    def build(self, command: Build) -> int:
        torch.manual_seed(0)  # the same weights on every rank of every contender
        model: Any = Gpt(SIZES[command.size]) if self.images is None else self.images.model()
        if self.images is not None:
            self.batch = self.images.batch
        parameters: int = sum(p.numel() for p in model.parameters())
        self.step = self.contender.build(model, self.options)
        return parameters

    def train(self, command: Train) -> Trained:
        batches = [
            self.batch(self.sees, self.steps + i, command.sequences, command.tokens) for i in range(command.steps)
        ]
        self.steps += command.steps
        times, losses = [time.perf_counter()], []
        for x, y in batches:
            losses.append(self.step(x, y))
            times.append(time.perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        return Trained(seconds, [loss.item() for loss in losses])


def _warm_up() -> None:
    """A step of a tiny model: torch loads much at the first one, which is not the contenders' memory."""
    model = Gpt(Size(layers=1, width=8, heads=1, vocabulary=ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(*batch((0,), 0, 1, 8)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


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
