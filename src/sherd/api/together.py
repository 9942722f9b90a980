"""What one rank refuses, all refuse: none is left waiting, and all may go on with the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from sherd.comm import Communicator, labelled
from sherd.errors import CommError, ConfigError, SherdError

T = TypeVar("T")


def together(comm: Communicator, do: Callable[[], T]) -> T:
    """What `do` gives here, if it raised nothing on any rank. Collective.

    An interrupt is nobody else's: it goes by at once, and whoever closes the communicator tells the others.
    """
    try:
        made = do()
    except Exception as error:
        with suppress(CommError):  # that failed, or the others are elsewhere and hear of it now
            _tell(comm, (isinstance(error, ConfigError), f"{type(error).__name__}: {error}"))
        raise
    for rank, theirs in enumerate(_tell(comm, None)):
        if theirs is not None:
            by_choice, why = theirs
            kind = ConfigError if by_choice else SherdError
            raise kind(f"rank {comm.rank}: sherd.distribute was refused on rank {rank}, so on all ranks: {why}")
    return made


def _tell(comm: Communicator, mine: tuple[bool, str] | None) -> list[tuple[bool, str] | None]:
    with labelled("sherd.distribute"), comm.counters.agreeing():
        return comm.all_gather_object(mine)
