"""Random programs of collectives and messages in which one rank does something else.

A program is a list of steps that all ranks have in common; `differ` gives one rank's version of it.
"""

from __future__ import annotations

import os
import random
import signal
from typing import NamedTuple

import torch

WORLD = 3
KINDS = ("order", "shape", "dtype", "how", "missing", "leave", "raise", "kill")
DTYPES = (torch.float32, torch.float64, torch.int64)
OPS = ("sum", "max", "min")
SIZES = (3, 300, 60_000)


class Step(NamedTuple):
    """One call. Ranks `source` and `target` make those of a message."""

    name: str
    size: int
    dtype: torch.dtype
    op: str
    source: int
    target: int


class Program(NamedTuple):
    """What all ranks do, except that rank `who` does something else from step `where` on."""

    steps: list[Step]
    transport: str
    kind: str
    who: int
    where: int


class Odd(Exception):
    """What a rank raises in the middle of its program."""


def program(seed: int, kinds=KINDS) -> Program:
    rng = random.Random(seed)
    names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier", "message")
    steps = []
    for _ in range(rng.randint(2, 7)):
        source, target = rng.sample(range(WORLD), 2)
        name = rng.choice([name for name in names if not steps or name != steps[-1].name])
        steps.append(Step(name, rng.choice(SIZES), rng.choice(DTYPES), rng.choice(OPS), source, target))
    kind, where = rng.choice(kinds), rng.randrange(len(steps) - 1)
    if kind in ("shape", "dtype", "how") and steps[where].name == "barrier":
        kind = "missing"
    if kind == "how" and steps[where].name not in ("all_reduce", "reduce_scatter", "broadcast"):
        kind = "shape"
    if kind == "order" and "message" in (steps[where].name, steps[where + 1].name):
        kind = "missing"  # a message may pass a collective
    step = steps[where]
    involved = range(WORLD)
    if step.name == "message":  # a small one is sent whether or not anybody receives it
        involved = (step.source,) if kind == "missing" else (step.source, step.target)
    return Program(steps, rng.choice(("host", "c10d")), kind, rng.choice(involved), where)


def differ(plan: Program) -> list[Step]:
    """The steps of the rank that differs."""
    steps, step = list(plan.steps), plan.steps[plan.where]
    if plan.kind == "order":
        steps[plan.where : plan.where + 2] = reversed(steps[plan.where : plan.where + 2])
    if plan.kind == "missing":
        del steps[plan.where]
    if plan.kind == "shape":
        steps[plan.where] = step._replace(size=step.size + WORLD)
    if plan.kind == "dtype":
        steps[plan.where] = step._replace(dtype=torch.int32)
    if plan.kind == "how":
        steps[plan.where] = step._replace(op="product", source=(step.source + 1) % WORLD)
    return steps


def make(c, step):
    """Make the call; the handle, if this rank has anything to do with it."""
    x = torch.ones(step.size, dtype=step.dtype)
    if step.name == "message":
        if c.rank == step.source:
            return c.send(x, step.target)
        return c.recv(x, step.source) if c.rank == step.target else None
    if step.name == "barrier":
        return c.barrier()
    if step.name == "broadcast":
        return c.broadcast(x, step.source)
    if step.name in ("all_reduce", "reduce_scatter"):
        return getattr(c, step.name)(x, op=step.op)
    return getattr(c, step.name)(x)


def execute(c, plan: Program) -> None:
    """This rank's part of a program."""
    mine = c.rank == plan.who
    handles = []
    for number, step in enumerate(differ(plan) if mine else plan.steps):
        if mine and number == plan.where:
            if plan.kind == "leave":
                return
            if plan.kind == "raise":
                raise Odd("in the middle")
            if plan.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        handles.append(make(c, step))
        if number % 2:  # two calls are under way together
            for handle in filter(None, handles):
                handle.wait()
            handles.clear()
    for handle in filter(None, handles):
        handle.wait()
    c.barrier().wait()
