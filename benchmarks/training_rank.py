"""One rank of one contender: it builds a model when told to, and then trains as many steps as it is told.

It is started by `training_group` with the number of its pipe as the only argument. Between two commands it sleeps,
blocked on that pipe.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import ALPHABET, SIZES, Gpt, Size, batch
from benchmarks.training_contenders import CONTENDERS, Step

if TYPE_CHECKING:
    from sherd.testing import Host

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Join:
    """Import what is needed and find the other ranks."""

    contender: str
    rank: int
    ranks: int  # as many as the other contenders have: a single process takes the data of all
    host: Host | None  # where it is to be, if not here
    size: str  # of the model that it will build


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


@dataclass(frozen=True)
class Failed:
    reason: str
    details: str


Command = Join | Build | Train


class Rank:
    def __init__(self, join: Join) -> None:
        self.contender = CONTENDERS[join.contender]
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
        self.step = self.contender.build(model)
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
    # Whatever happens to the controller, even kill -9, no rank stays behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(int(sys.argv[1]))
    try:
        obey(pipe)
    except EOFError:
        pass  # the controller is gone
    except BaseException as error:
        traceback.print_exc()
        reason = str(error).strip().splitlines() or [""]
        pipe.send(Failed(f"{type(error).__name__}: {reason[0]}", traceback.format_exc()))
    # Not through the interpreter's end: the threads of a broken process group can keep it from coming to one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
