"""What the user asked `sherd run` for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Showing:
    """What becomes of the ranks' output and of their events."""

    log_dir: Path | None = None
    events: Path | None = None
    csv: Path | None = None
    tensorboard: Path | None = None
    live: bool = False
    quiet: bool = False
    label: str = ""  # what this machine is called in front of its ranks' output, where another one collects it
    attended: bool = False  # standard input is a line to whoever started this, not the ranks' own

    @property
    def needs_events(self) -> bool:
        return self.live or self.csv is not None or self.tensorboard is not None


@dataclass(frozen=True)
class Request:
    """A run, as one of its machines is to take part in it."""

    command: list[str]  # of a rank
    ranks: int  # on this machine
    machines: int
    machine: int  # which of them this is
    address: str  # of machine 0, where there are several
    port: int
    token_file: str | None
    wait: float  # seconds for the machines to meet
    showing: Showing = Showing()
