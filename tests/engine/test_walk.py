"""The walk of a gradient: the files that run in a backward are those that docs/architecture.md lists, and few."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import sherd
from sherd import config, strategies
from sherd.testing import run_ranks
from tests.helpers.training import batch, connected, distributed, loss_of, train

pytestmark = pytest.mark.ranks

PACKAGE = Path(sherd.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
MOST = 10
BEYOND = ("comm", "observe")  # where the walk ends
BELOW = ("config.py", "errors.py", "machine.py", "layout")  # what the communicator itself calls belongs to it


def room(frame: FrameType | None) -> str | None:
    """The folder or file of the package, right inside it, that a frame is in."""
    path = None if frame is None else Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).parts[0] if path and path.is_relative_to(PACKAGE) else None


def files_run(action: Callable[[], object]) -> list[str]:
    """The files of the package that run in `action`, in the order of their first calls."""
    found: dict[str, None] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        ours = room(frame) if event == "call" else None
        if ours is None or ours in BEYOND or (ours in BELOW and room(frame.f_back) in BEYOND):
            return
        found[Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()] = None

    threading.setprofile(profile)  # autograd runs hooks of CPU tensors in the calling thread, others in its own
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


def listed() -> list[str]:
    """The first column of the table below the heading."""
    section = re.split(r"^## ", PAGE.read_text().partition("\n## The walk of a gradient\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def walked():
    with connected() as c:
        model, optimizer = distributed(c, "zero2", bucket_bytes=4096)  # by default a small model has no such hooks
        train(model, optimizer, [batch(c.rank, step) for step in range(2)])
        loss = loss_of(model, batch(c.rank, 2))
        return files_run(loss.backward)


@pytest.fixture(scope="module")
def walks() -> list[list[str]]:
    return run_ranks(walked, 2)  # new ones: a run recorded in a pool's ranks would have left its recorder in the walk


def test_the_docs_list_the_files_of_a_steady_backward(walks):
    for rank, walk in enumerate(walks):
        missing, extra = sorted(set(walk) - set(listed())), sorted(set(listed()) - set(walk))
        assert not missing, f"rank {rank} runs {missing}, which docs/architecture.md does not list"
        assert not extra, f"docs/architecture.md lists {extra}, which rank {rank} does not run"


def test_the_walk_is_short(walks):
    for rank, walk in enumerate(walks):
        assert len(walk) <= MOST, f"rank {rank} runs {len(walk)} files, at most {MOST} are wanted: {walk}"


@pytest.mark.fake
def test_the_trace_sees_what_runs():
    """Or a walk would look short because nothing was traced."""
    assert files_run(strategies.names) == ["strategies/registry.py"]
    assert files_run(lambda: config.flag_from_env("SHERD_NO_SUCH", False)) == ["config/environment.py"]
    assert files_run(list) == []
