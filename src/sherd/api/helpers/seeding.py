"""One seed for a job: the same on all ranks while they build the model, then one per rank."""

from __future__ import annotations

import hashlib
import os
import random
import sys

import torch

from sherd.comm import Communicator
from sherd.errors import ConfigError

_alike: tuple[int, str] | None = None  # the seed that all ranks have, and its run: a process may serve several runs


def seed(n: int) -> None:
    """Seed Python, torch and, where it was imported, numpy. Not collective; call it on every rank.

    All ranks draw the same numbers until the next `distribute`, which seeds each rank differently, so that dropout and
    augmentation differ. A process may run several trials, each with its own seed, model and `distribute`. Rank 0 keeps
    the numbers of a single process, and so does a world of one. Loaders deal rank 0's order, so that is always the same
    on all ranks.
    """
    global _alike
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 1 << 63:
        raise ConfigError(f"sherd.seed got {n!r}; write a whole number from 0 to 2**63 - 1, such as sherd.seed(0)")
    _alike = (n, _run())
    _seed(n)


def by_rank(comm: Communicator) -> None:
    """After `distribute`: from now on ranks draw different numbers, if they were seeded."""
    global _alike
    if _alike is not None and _alike[1] == _run() and comm.rank:
        _seed(_of_rank(_alike[0], comm.rank))
    _alike = None


def _seed(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % (1 << 32))


def _of_rank(n: int, rank: int) -> int:
    """Rank 0's is `n` itself. The others are not consecutive: n + 1 is likely to be the seed of the next trial."""
    digest = hashlib.blake2b(f"{n} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 if rank else n


def _run() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
