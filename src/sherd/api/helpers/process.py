"""This process among the others: its number, and the one communicator that helpers use.

Helpers use that of the last `distribute` which made its own, so that a helper that one rank calls alone is found out
like any other call that differs. Before `distribute` the first helper connects one, and `distribute` goes on with it.
"""

from __future__ import annotations

import os
import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from sherd.comm import Communicator, connect
from sherd.config import CommOptions
from sherd.errors import ConfigError


class Distributed(NamedTuple):
    """The last `distribute` of this process."""

    comm: weakref.ref[Communicator]
    accumulate: int


_kept: Communicator | None = None  # held here: ranks must not lose it at different times, whenever they collect garbage
_kept_by = 0  # the process that connected it
_spare = False  # whether it is no model's yet
_last: Distributed | None = None


def rank() -> int:
    """The number of this process among all of the job, from 0. Not collective, and it connects nothing.

    As torch.distributed has it, else as torchrun or `sherd run` said; without a launcher, 0.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number("RANK", 0) if world() > 1 else 0


def world() -> int:
    """How many processes the job has. Not collective, and it connects nothing. Without a launcher, 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def is_main() -> bool:
    """Whether this is rank 0, which speaks for all. Not collective."""
    return rank() == 0


def communicator() -> Communicator:
    """The one that helpers use. Collective where it has to be connected."""
    global _kept, _kept_by, _spare
    _refuse_workers()
    if not _usable():
        _kept, _kept_by, _spare = connect(), os.getpid(), True
    assert _kept is not None, "it was just connected"
    return _kept


def connect_for(options: CommOptions | None) -> Communicator:
    """What `distribute` is to use: what a helper has connected, if that will do. Collective."""
    global _spare
    if options is None and _spare and _usable():
        _spare = False
        return communicator()
    return connect(options)


def distributed_over(comm: Communicator, accumulate: int, made_here: bool) -> None:
    """`distribute` has succeeded. Helpers use its communicator, unless it is the user's own, to close at any time."""
    global _kept, _kept_by, _spare, _last
    _last = Distributed(weakref.ref(comm), accumulate)
    if made_here:
        _kept, _kept_by, _spare = comm, os.getpid(), False


def distribution() -> tuple[Communicator, int] | None:
    """The communicator and `accumulate` of the last `distribute`, while it lasts."""
    comm = None if _last is None else _last.comm()
    return None if _last is None or comm is None or comm.closed else (comm, _last.accumulate)


def _usable() -> bool:
    """Whether there is one, among the ranks that there are now."""
    return _kept is not None and not _kept.closed and (_kept.rank, _kept.world) == (rank(), world())


def _refuse_workers() -> None:
    if get_worker_info() is not None or (_usable() and os.getpid() != _kept_by):
        raise ConfigError(
            f"a process that rank {rank()} started, such as a loader's worker, is no rank and can take no part in a "
            f"collective call; call it where the training loop runs"
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number; `sherd run` and torchrun set it")
    return int(text or default)
