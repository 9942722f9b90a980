"""Rank pools shared by all tests: ranks start once per world size and are reused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from sherd.testing import RankPool

# Some virtual machines offer AMX and do not have it: torch's half-precision kernels crash there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)` is the session's pool of four ranks."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools:
            pools[world] = RankPool(world, timeout=100)
        return pools[world]

    yield pool
    for each in pools.values():
        each.close()
