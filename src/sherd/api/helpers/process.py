"""This process among the ranks: its number, and the one communicator that helpers use.

Helpers use the communicator of the last `distribute` that created its own, so that a helper called by one rank alone is
detected like any other mismatched call. Before `distribute` the first helper connects one, which `distribute` then
takes over.
"""

from __future__ import annotations

import os
import weakref

import torch.distributed as dist
from torch.utils.data import get_worker_info

from sherd.comm import Communicator, connect
from sherd.config import CommOptions
from sherd.errors import ConfigError

_kept: Communicator | None = None  # held here, or garbage collection would close it at a different time on each rank
_kept_by = 0  # the process that connected it
_spare = False  # whether no model uses it yet
_last: tuple[weakref.ref[Communicator], int] | None = None  # communicator and `accumulate` of the last `distribute`


def rank() -> int:
    """The rank of this process in the job, from 0. Not collective, and it connects nothing.

    From torch.distributed, else from the variables of torchrun or `sherd run`; 0 without a launcher.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number("RANK", 0) if world() > 1 else 0


def world() -> int:
    """How many ranks the job has. Not collective, and it connects nothing. 1 without a launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def is_main() -> bool:
    """Whether this is rank 0, the one that prints and saves for all. Not collective."""
    return rank() == 0


def communicator() -> Communicator:
    """The communicator that helpers use. Collective where it has to be connected first."""
    global _kept, _kept_by, _spare
    _refuse_workers()
    if not _usable():
        _kept, _kept_by, _spare = connect(), os.getpid(), True
    assert _kept is not None, "it was just connected"
    return _kept


def connect_for(options: CommOptions | None) -> Communicator:
    """The communicator for `distribute`: the one that a helper has connected, if possible. Collective."""
    global _spare
    if options is None and _spare and _usable():
        _spare = False
        return communicator()
    return connect(options)


def distributed_over(comm: Communicator, accumulate: int, made_here: bool) -> None:
    """`distribute` has succeeded. Helpers use its communicator, unless it is the user's, who may close it."""
    global _kept, _kept_by, _spare, _last
    _last = weakref.ref(comm), accumulate
    if made_here:
        _kept, _kept_by, _spare = comm, os.getpid(), False


def distribution() -> tuple[Communicator, int] | None:
    """The communicator and `accumulate` of the last `distribute`, while that communicator is open."""
    comm = None if _last is None else _last[0]()
    return None if _last is None or comm is None or comm.closed else (comm, _last[1])


def _usable() -> bool:
    """Whether there is one, and it connects the current ranks."""
    return _kept is not None and not _kept.closed and (_kept.rank, _kept.world) == (rank(), world())


def _refuse_workers() -> None:
    if get_worker_info() is not None or (_usable() and os.getpid() != _kept_by):
        raise ConfigError(
            f"a process that rank {rank()} started, such as a loader's worker, is not a rank and cannot take part in a "
            f"collective call; make this call where the training loop runs"
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number; `sherd run` and torchrun set it")
    return int(text or default)
