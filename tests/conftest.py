"""Rank pools shared by all tests: ranks start once per world size and are reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sherd.testing import RankPool


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
