"""What ranks compare before a map: they must all mean the same one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sherd.api.helpers.coordination import exchange, failure_of, raise_any
from sherd.comm import Communicator
from sherd.errors import Diverged

Settings = dict[str, Any]


def compared(comm: Communicator, what: str, prepare: Callable[[], Settings]) -> str:
    """Call `prepare`, compare what it returns with the other ranks', and draw a name that is new. Collective.

    What it raises on one rank, all ranks raise.
    """
    settings: Settings = {}
    failure = None
    try:
        settings = prepare()
    except Exception as error:
        failure = failure_of(error)
    told = exchange(comm, what, (failure, settings, secrets.token_hex(8)))
    raise_any(comm, what, [each[0] for each in told])
    for rank, (_, theirs, _) in enumerate(told):
        _compare(what, told[0][1], theirs, rank)
    name: str = told[0][2]
    return name


def _compare(what: str, leaders: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> None:
    for name, value in leaders.items():
        if theirs.get(name) != value:
            raise Diverged(
                f"{what} was called with different arguments: {name} is {value} on rank 0 and {theirs.get(name)} on "
                f"rank {rank}; pass the same on every rank",
                (0, rank),
            )
