"""One seed for a job: alike on all ranks while they build the same model, then by rank."""

from __future__ import annotations

import hashlib
import os
import random
import sys

import torch

from sherd.comm import Communicator
from sherd.errors import ConfigError

_alike: tuple[int, str] | None = None  # the seed that all ranks have, and the run: a process may serve several


def seed(n: int) -> None:
    """Seed Python, torch and, where it was imported, numpy. Not collective; call it on every rank.

    All ranks draw the same numbers until the next `distribute`, which seeds them by rank, so that they drop out and
    augment differently. So a process may run several trials, each with a seed, a model and a `distribute` of its own.
    Rank 0 goes on as one process would; a world of one is left alone. Loaders deal rank 0's order, so all ranks have
    the same one in any case.
    """
    global _alike
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 1 << 63:
        raise ConfigError(f"sherd.seed got {n!r}; write a whole number from 0 to 2**63 - 1, such as sherd.seed(0)")
    _alike = (n, _run())
    _seed(n)


def by_rank(comm: Communicator) -> None:
    """`distribute` is done: from now on ranks draw different numbers, if they were seeded."""
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
    """Rank 0's is `n` itself. Those of others do not lie side by side: n + 1 is a seed that somebody tries next."""
    digest = hashlib.blake2b(f"{n} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 if rank else n


def _run() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
