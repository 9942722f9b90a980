"""What contributors are told to run is what is run everywhere: by hand, before a commit and on a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def commands_of(target: str) -> list[str]:
    """What a target runs from the environment."""
    body = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in body[1].splitlines()]


def test_the_hooks_of_pre_commit_are_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repo,) = config["repos"]
    assert repo["repo"] == "local", "hooks of others would be downloaded, in other versions"
    hooks = [hook["entry"] for hook in repo["hooks"]]
    assert hooks == [command.removesuffix(" .") for command in commands_of("lint")]
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}


def test_workflows_call_make_targets():
    called = []
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            called += [step["run"] for step in job["steps"] if "run" in step]
    assert {"make lint", "make test"} <= set(called)
    assert all(command.removeprefix("make ") in TARGETS for command in called), called


def test_the_guide_names_targets_and_files_that_exist():
    assert set(re.findall(r"`make ([a-z-]+)`", GUIDE)) <= TARGETS
    paths = re.findall(r"`((?:src|tests)/[\w/.]+)`", GUIDE)
    assert len(paths) > 15
    new = {"src/sherd/strategies/own_copies.py"}  # the reader's
    assert [path for path in paths if path not in new and not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("src/sherd/api/typing.py", "StrategyName"),
        ("tests/helpers/training.py", "STRATEGIES"),
        ("src/sherd/config/comm.py", "TRANSPORTS"),
        ("src/sherd/comm/connect.py", "_choose"),
        ("src/sherd/comm/connect.py", "_best"),
        ("src/sherd/comm/connect.py", "Plan"),
        ("src/sherd/comm/summation.py", "combine"),
        ("tests/comm/test_operations.py", "TRANSPORTS"),
        ("tests/comm/test_leaks.py", "TRANSPORTS"),
        ("src/sherd/patches/__init__.py", "PATCHES"),
        ("src/sherd/patches/replacing.py", "Replacements"),
    ],
)
def test_the_recipes_name_what_is_in_the_files(file, name):
    assert f"`{file}`" in GUIDE and f"`{name}`" in GUIDE
    assert re.search(rf"^(?:def |class )?{name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"
