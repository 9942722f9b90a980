"""Rank pools shared by all tests: ranks start once per world size and are reused."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import HealthCheck, settings

from sherd.testing import Hosts, RankPool
from tests.helpers.hosts import hosts_or_skip

# Some virtual machines offer AMX and do not have it: torch's half-precision kernels crash there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Side by side there are more ranks than cores: one that spins keeps a core from the rank it waits for.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("SHERD_SPIN", "0")

# Some three hundred interpreters are started: each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Python that tests start imports what they do, wherever it starts.
os.environ["PYTHONPATH"] = os.pathsep.join(
    map(os.path.abspath, filter(None, [Path(__file__).parents[1], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
)

# Models of tests are small: threads would only wait for each other, the longer the more others use the cores.
torch.set_num_threads(1)

# torch asks for the name of every address that connects to a store, thousands of times in all. Where an answer of the
# name server gets lost, as one in a hundred may, nobody needs it: a second of waiting is enough, five are not.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# How long an example takes depends on what else the machine does.
settings.register_profile("sherd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sherd")

TIMEOUT = 200  # seconds; of a run that hangs


gc.disable()  # while all modules are imported, which leave little to collect: 3.0 instead of 3.6 s for each worker


def pytest_collection_finish() -> None:
    """What is there now stays."""
    gc.collect()
    gc.freeze()
    gc.enable()


LONG = (
    "test_what_works.py",
    "test_two_machines.py",
    "test_parity.py",
    "test_shard_over.py",
    "test_recipes.py",
    "test_several.py",
    "test_snippets.py",
    "test_launch.py",
)
"""Files that come first, so that side by side none of them is left over at the end."""


COSTS = ("pure", "fake", "ranks", "hosts")
"""What a test needs, cheapest first; pyproject.toml says what each marker means. Every test has exactly one."""

BY_FIXTURE = {"ranks": "ranks", "hosts": "hosts", "machines": "hosts", "places": "hosts"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    costs = {item: _cost(item) for item in items}
    for module in {item.getparent(pytest.Module) for item in items}:
        module.own_markers = [mark for mark in module.own_markers if mark.name not in COSTS]
    for item, cost in costs.items():
        if item.get_closest_marker(cost) is None:
            item.add_marker(cost)


def _cost(item: pytest.Item) -> str:
    """By the test's own marker, by its fixtures, or by the `pytestmark` of its file, whichever there is first."""
    own, of_file = (
        [mark.name for mark in node.own_markers if mark.name in COSTS] for node in (item, item.getparent(pytest.Module))
    )
    needs = [BY_FIXTURE[name] for name in item.fixturenames if name in BY_FIXTURE]
    found = own or sorted(needs, key=COSTS.index)[-1:] or of_file
    if len(found) != 1 or any(COSTS.index(found[0]) < COSTS.index(need) for need in needs):
        told = f"markers {own or of_file}, and fixtures that need {needs}"
        raise pytest.UsageError(f"{item.nodeid}: one of {', '.join(COSTS)} must say what the test costs, found {told}")
    return found[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Tests that are said to start no process cannot."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("pure") or item.get_closest_marker("fake"):
            for owner, name in ((BaseProcess, "start"), (subprocess.Popen, "__init__"), (os, "fork")):
                patch.setattr(owner, name, _refuse)
        return (yield)


def _refuse(*arguments: object, **options: object) -> NoReturn:
    raise AssertionError("a test that is marked `pure` or `fake` starts a process: mark it `ranks`")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as tests also wait. Each worker has pools of its own, so memory bounds them."""
    return min(len(os.sched_getaffinity(0)), 7) + 1


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)` is the session's pool of four ranks."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools:
            pools[world] = RankPool(world, timeout=TIMEOUT)
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
            pools[count, ranks_per_host] = hosts_or_skip(count, ranks_per_host=ranks_per_host, timeout=TIMEOUT)
        return pools[count, ranks_per_host]

    yield pool
    for each in pools.values():
        each.close()
