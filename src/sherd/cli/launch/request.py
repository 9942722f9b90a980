"""What the user asked `sherd run` for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Showing:
    """What is done with the ranks' output and events."""

    log_dir: Path | None = None
    events: Path | None = None
    csv: Path | None = None
    tensorboard: Path | None = None
    live: bool = False
    quiet: bool = False
    label: str = ""  # the name of this machine in its ranks' output, where another machine collects it
    attended: bool = False  # standard input comes from the `sherd run` that started this one, not from the user

    @property
    def needs_events(self) -> bool:
        return self.live or self.csv is not None or self.tensorboard is not None


@dataclass(frozen=True)
class Request:
    """A run, as one of its machines takes part in it."""

    command: list[str]  # of a rank
    ranks: int  # on this machine
    machines: int
    machine: int  # the number of this one
    address: str  # of machine 0, where there are several
    port: int
    token_file: str | None
    wait: float  # seconds for the machines to meet
    showing: Showing = Showing()
