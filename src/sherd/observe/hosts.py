"""The machines of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Host:
    """One machine of a run and the ranks on it."""

    name: str
    ranks: tuple[int, ...]


def hosts_of(starts: Mapping[int, Mapping[str, Any]], told: Mapping[str, Any], world: int) -> list[Host]:
    """Hosts by name, from the starts of ranks; `told` lists the ranks of each. Without it, all are on one."""
    groups = told.get("hosts") or []
    if not groups or not all(isinstance(rank, int) for group in groups for rank in group):
        groups = [list(range(world))]
    named: list[Host] = []
    for number, group in enumerate(groups):
        name = next((str(starts[rank]["host"]) for rank in group if starts.get(rank, {}).get("host")), f"host {number}")
        if any(host.name == name for host in named):  # several hosts on one machine, as in tests
            name = f"{name} ({number})"
        named.append(Host(name, tuple(group)))
    return named
