"""What the user asked `sherd run` for."""

from __future__ import annotations

from dataclasses import dataclass


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
