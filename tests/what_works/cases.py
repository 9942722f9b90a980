"""A *case*: a training script that is written once, and runs plainly in one process and distributed on two ranks.

    @case("Loops", "Several backwards before a step", "their gradients add up")
    def several_backwards(run):
        model = network()
        model, optimizer = run.distribute(model, sgd(model))
        ...
        return weights(model)

What a case returns must have the same bits on every rank and under every strategy, and agree with the plain run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sherd
from sherd.comm import Communicator
from tests.helpers.training import STRATEGIES

STEPS = 3
ENDS = ("ddp", "zero3")
"""The strategies that have least in common."""
TIMEOUT = 20.0  # seconds that a rank waits for another; no refusal may take as long


GATHERED = "gathered"
"""zero3 as it is where ranks share no memory."""


class Run:
    """Where a case finds itself: `strategy` is None in the plain run, which is rank 0 of a world of one."""

    def __init__(self, strategy: str | None = None, comm: Communicator | None = None) -> None:
        self.strategy = strategy
        self.plain = strategy is None
        self.rank = 0 if comm is None else comm.rank
        self.world = 1 if comm is None else comm.world
        self.comm = comm

    def distribute(self, *things: Any, **options: Any) -> Any:
        """`sherd.distribute` under the strategy of this run; the things untouched in the plain one."""
        if self.plain:
            return things if len(things) > 1 else things[0]
        strategy: Any = self.strategy
        if strategy == GATHERED:
            strategy = sherd.ZeRO(stage=3, share_host_memory=False)
            options = {"bucket_bytes": 1024, **options}
        return sherd.distribute(*things, strategy=strategy, comm=self.comm, **options)

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's consecutive rows of a whole batch."""
        return whole.tensor_split(self.world)[self.rank]

    def batches(self, steps: int = STEPS, rows: int = 6, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's rows of inputs and targets of the usual network, 15 and 5 wide, for some steps."""
        for step in range(start, start + steps):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (15, 5))
            yield self.rows(x), self.rows(y)

    def mean(self, value: Tensor) -> Tensor:
        """A value such as a loss, averaged over the ranks."""
        value = value.detach().clone()
        return value if self.comm is None else self.comm.all_reduce(value, op="mean").wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.comm is not None:
            self.comm.barrier().wait()


Script = Callable[[Run], Any]


def together(**parts: dict[str, Any]) -> dict[str, Any]:
    """Several results as one, their names behind a prefix."""
    return {f"{prefix}.{name}": value for prefix, part in parts.items() for name, value in part.items()}


@dataclass(frozen=True)
class Case:
    """A script and what is to be found."""

    section: str
    title: str
    """What the user does, as a row of the page."""
    note: str
    """What holds then; for a refusal, what to write instead."""
    script: Script
    strategies: tuple[str, ...] = STRATEGIES
    often: tuple[str, ...] = ()
    """Of a case that takes seconds, the strategies in every run of the tests; `make fuzz` has all. (): all, always."""
    rtol: float | None = 1e-9
    """How near to the plain run tensors must be, relative to their largest element. None: it is not compared."""
    refusal: str | None = None
    """The pattern of the error that refuses it."""
    on: tuple[int, ...] = (0, 1)
    """The ranks that get the error."""

    @property
    def name(self) -> str:
        module = self.script.__module__.rpartition(".")[2]
        return f"{module}.{self.script.__name__}"


REGISTRY: dict[str, Case] = {}


def case(section: str, title: str, note: str = "", **expected: Any) -> Callable[[Script], Script]:
    """Register a script that must train as it does plainly. `expected`: `strategies`, `often`, `rtol`."""

    def register(script: Script) -> Script:
        _add(Case(section, title, note, script, **expected))
        return script

    return register


def refused(section: str, title: str, note: str, *, match: str, **expected: Any) -> Callable[[Script], Script]:
    """Register a script that must end in the same error on every rank, at once. `expected`: `strategies`, `on`."""

    def register(script: Script) -> Script:
        _add(Case(section, title, note, script, refusal=match, **expected))
        return script

    return register


def _add(added: Case) -> None:
    if added.name in REGISTRY:
        raise ValueError(f"there are two cases {added.name}; give one of them another name")
    REGISTRY[added.name] = added
