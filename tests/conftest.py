"""Rank pools shared by all tests: ranks start once per world size and are reused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from sherd.errors import Unsupported
from sherd.testing import Hosts, RankPool

# Some virtual machines offer AMX and do not have it: torch's half-precision kernels crash there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# torch asks for the name of every address that connects to a store, thousands of times in all. Where an answer of the
# name server gets lost, as one in a hundred may, nobody needs it: a second of waiting is enough, five are not.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


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


@pytest.fixture(scope="session")
def hosts() -> Iterator[Callable[[int, int], Hosts]]:
    """`hosts(2, 3)` is the session's pool of two hosts with three ranks each; where none can be made, a skip."""
    pools: dict[tuple[int, int], Hosts] = {}

    def pool(count: int, ranks_per_host: int) -> Hosts:
        if (count, ranks_per_host) not in pools:
            try:
                pools[count, ranks_per_host] = Hosts(count, ranks_per_host=ranks_per_host, timeout=100)
            except Unsupported as error:
                pytest.skip(str(error))
        return pools[count, ranks_per_host]

    yield pool
    for each in pools.values():
        each.close()
