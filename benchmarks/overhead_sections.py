"""The sections of `benchmarks.overhead`: who trains what in which world, and what is measured of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.overhead_contenders import PLAIN, SHERD, TORCH_DDP
from benchmarks.overhead_networks import NETWORKS

GPTS = tuple(name for name in NETWORKS if name.startswith("gpt"))


@dataclass(frozen=True)
class Section:
    """Some contenders in a world of `ranks`, one thread each."""

    title: str
    ranks: int
    contenders: tuple[str, ...]
    networks: tuple[str, ...] = tuple(NETWORKS)
    optimizers: tuple[str, ...] = ("AdamW",)
    micro_batches: int = 1
    cores: int | None = None  # the ranks are confined to so many
    together: bool = False  # in the same process
    more_rounds: int = 1  # times as many as are asked for, as smaller differences are looked for
    slower: int = 1  # a step takes about so many times as long as with a core for each rank and one micro-batch

    @property
    def teams(self) -> list[tuple[str, ...]]:
        """The contenders that share processes."""
        return [self.contenders] if self.together else [(name,) for name in self.contenders]


SECTIONS = {
    "2-ranks": Section("2 ranks", 2, (PLAIN, TORCH_DDP, "sherd-ddp", "sherd-zero1", "sherd-zero2", "sherd-zero3")),
    "4-ranks": Section(
        "4 ranks on 2 cores", 4, (TORCH_DDP, "sherd-ddp", "sherd-zero2", "sherd-zero3"), cores=2, slower=2
    ),
    "1-rank": Section(
        "a world of one",
        1,
        (PLAIN, SHERD),
        optimizers=("AdamW", "SGD with momentum", "fused AdamW"),
        together=True,
        more_rounds=2,
    ),
    "accumulation": Section(
        "2 ranks, 4 micro-batches a step without no_sync, torch's clip_grad_norm_",
        2,
        (TORCH_DDP, "sherd-ddp", "sherd-zero2", "sherd-zero3"),
        networks=GPTS,
        micro_batches=4,
        slower=4,
    ),
}


@dataclass(frozen=True)
class Effort:
    """How much is measured. A round has new processes; in it every contender has as many turns with each network."""

    rounds: int
    turns: int
    steps: int | None  # of a turn; as the network has it, if None
    timeout: float

    def steps_of(self, network: str, section: Section) -> int:
        return self.steps or max(2, NETWORKS[network].steps // section.slower)


@dataclass
class Measured:
    """One contender with one network and optimizer: a median for each round, in seconds."""

    medians: list[float] = field(default_factory=list)
    cpu_medians: list[float] = field(default_factory=list)
    loss: float | None = None  # after the first steps, the mean of all ranks
    failure: str | None = None

    @property
    def best(self) -> float | None:
        return min(self.medians, default=None) if self.failure is None else None

    @property
    def best_cpu(self) -> float | None:
        return min(self.cpu_medians, default=None) if self.failure is None else None


@dataclass
class Result:
    """One network with one optimizer."""

    network: str
    optimizer: str
    parameters: int = 0
    tensors: int = 0
    steps: int = 0  # of a turn
    contenders: dict[str, Measured] = field(default_factory=dict)


@dataclass
class Measurement:
    """What came of one section."""

    section: str
    rounds: int
    turns: int
    results: list[Result]
    disturbances: list[float] = field(default_factory=list)  # in each turn, the part of the machine others had
    details: dict[str, str] = field(default_factory=dict)  # of failures
