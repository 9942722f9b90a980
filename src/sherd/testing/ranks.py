"""`run_ranks`: run one function on several new ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from sherd.ranks.watch import Died
from sherd.testing.pool import RankPool

T = TypeVar("T")


@overload
def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 2.0,
    env: Mapping[str, str] | None = None,
    expected_exits: None = None,
) -> list[T]: ...


@overload
def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 2.0,
    env: Mapping[str, str] | None = None,
    expected_exits: Mapping[int, int],
) -> list[T | Died]: ...


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 2.0,
    env: Mapping[str, str] | None = None,
    expected_exits: Mapping[int, int] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` new ranks and return the results in rank order.

    A `RankPool` that is used once; see `RankPool.run` for the arguments. Every rank must also exit with code 0
    afterwards. Keyword arguments of `fn` go into a `functools.partial`.
    """
    with RankPool(world_size, timeout=timeout, grace=grace) as pool:
        return pool.run(fn, *args, env=env, expected_exits=expected_exits)
