"""Directories of events as a run would leave them, written through `EventStream` with a clock of their own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sherd.observe import EventStream

MIB = 1 << 20
BEGIN = 1_790_000_000.0
TEXT = """def read_line(self, size=-1):
    if self.closed:
        raise ValueError("the file is closed")
    line = self.buffer.readline(size)
    return line.decode(self.encoding, self.errors)
"""


@dataclass
class FakeRun:
    """What the run looks like. `slow` is the rank that others wait for."""

    world: int = 4
    steps: int = 400
    per_host: int = 2
    strategy: str = "zero3"
    options: dict[str, Any] = field(default_factory=lambda: {"clip_norm": 1.0})
    seconds: float = 0.2
    communication: float = 0.18
    slow: int = 2
    seed: int = 1
    elements: int = 10_770_000
    tokens: int | None = 8192
    floor: float = 1.55
    layers: bool = False
    ends: bool = True


@contextmanager
def clock() -> Iterator[list[float]]:
    """The clock of events; its first item is the time, to be set."""
    now = [BEGIN]
    fake = mock.Mock(wraps=time)
    fake.time = lambda: now[0]
    fake.monotonic_ns = lambda: int(now[0] * 1e9)
    with mock.patch("sherd.observe.events.time", fake):
        yield now


def write_run(directory: Path, run: FakeRun | None = None) -> Path:
    """Write it all; returns the directory."""
    run = run or FakeRun()
    numbers = random.Random(run.seed)
    with clock() as now:
        streams = [EventStream(directory, rank) for rank in range(run.world)]
        for stream in streams:
            stream.emit("run.start", **start(run, stream.rank))
        now[0] += 1.5
        for step in range(run.steps):
            _step(run, streams, step, numbers, now)
        for stream in streams:
            if run.ends:
                stream.emit("run.end", ok=True)
            stream.close()
    return directory


def start(run: FakeRun, rank: int) -> dict[str, Any]:
    """The fields of a rank's `run.start`."""
    hosts = [list(range(first, min(first + run.per_host, run.world))) for first in range(0, run.world, run.per_host)]
    return {
        "world": run.world,
        "strategy": run.strategy,
        "options": run.options,
        "transport": "cluster" if len(hosts) > 1 else "host",
        "hosts": hosts,
        "host": f"node-{rank // run.per_host + 1}",
        "pid": 4000 + 97 * run.seed + rank,
        "model": {"elements": run.elements, "parameters": 74, "frozen": 0},
        "batch": 64,
        "accumulate": 1,
        "total_steps": run.steps,
        "machine": {
            "cpu": "AMD EPYC 7R13",
            "cores": 4,
            "memory": 16 << 30,
            "python": "3.11.2",
            "torch": "2.13.0",
            "platform": "Linux-6.1-x86_64",
            "sherd": "0.1.0",
        },
        "command": ["train.py", "--strategy", run.strategy, "--steps", str(run.steps)],
        "threads": 2,
    }


def _step(run: FakeRun, streams: list[EventStream], step: int, numbers: random.Random, now: list[float]) -> None:
    done = step / max(run.steps, 1)
    loss = run.floor + 4.0 * math.exp(-9 * done) + 0.1 * numbers.gauss(0, 1) * (1 + 2 * math.exp(-30 * done))
    warm = min(1.0, (step + 1) / (0.06 * run.steps + 1))
    lr = 6e-4 * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
    norm = (0.45 + 2.5 * math.exp(-12 * done)) * math.exp(0.18 * numbers.gauss(0, 1))
    seconds = [_seconds(run, rank, step, numbers) for rank in range(run.world)]
    # All ranks leave the exchange together: who comes first waits longest.
    longest = max(sum(each.values()) for each in seconds)
    for each in seconds:
        each["communication"] += longest - sum(each.values())
    now[0] += longest
    for rank, stream in enumerate(streams):
        shard = 4 * run.elements // run.world
        zero3 = run.strategy == "zero3"
        told = {"loss": loss + 0.05 * numbers.gauss(0, 1)}
        if run.tokens is not None:
            told["tokens"] = run.tokens // run.world
        stream.emit("log", step, figures=told, n=64 // run.world)
        fields: dict[str, Any] = {
            "loss": None,
            "root": 2 * loss,
            "samples": 64 // run.world,
            "seconds": seconds[rank],
            "bytes": {"payload": int((3 if zero3 else 2) * shard * (run.world - 1)), "control": 4096 + 64 * rank},
            "memory": {
                "parameters": shard if zero3 else 4 * run.elements,
                "gradients": shard if zero3 else 4 * run.elements,
                "optimizer state": 2 * shard if zero3 else 8 * run.elements,
                "buckets": 8 * MIB,
            },
            "resident": {"private": (310 + min(step, 40)) * MIB, "shared": 90 * MIB},
            "skipped": step == 7,
            "lr": [lr, lr],
            "norm_squared": norm**2 / run.world,
        }
        if run.layers:
            fields["layers"] = {
                f"block.{number}": {
                    "norm_squared": norm**2 / (number + 1) / run.world,
                    "update_squared": 1e-6 / (number + 1),
                    "value_squared": 2.0,
                }
                for number in range(6)
            }
        stream.emit("step", step, **fields)
        if step % max(run.steps // 16, 1) == 0 or step == run.steps - 1:
            held = run.floor + 0.08 + 3.9 * math.exp(-9 * done)
            stream.emit("log", step, figures={"held_out_loss": held, "accuracy": 0.62 - 0.13 * held + 0.2}, n=16)
    if step in (run.steps // 2, run.steps - 1):
        streams[0].emit("sample", step, text=TEXT, title="Generated text")
    if step == run.steps // 3:
        for stream in streams:
            stream.emit("warning", step, text="the gradient of 'head.bias' is zero on all ranks since step 12")


def _seconds(run: FakeRun, rank: int, step: int, numbers: random.Random) -> dict[str, float]:
    work = run.seconds * (1.1 if rank == run.slow else 1.0) * math.exp(0.04 * numbers.gauss(0, 1))
    work *= 3.0 if step == 0 else 1.0
    shares = {
        "data": 0.03,
        "forward": 0.28,
        "backward": 0.5,
        "communication": run.communication,
        "update": 0.08,
        "rest": 0.02,
    }
    return {phase: work * share * math.exp(0.03 * numbers.gauss(0, 1)) for phase, share in shares.items()}
