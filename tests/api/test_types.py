"""Types of `distribute` and the helpers, as mypy sees them; and what `help` says."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import sherd
from sherd.api.typing import DistributeOptions, StrategyName
from sherd.strategies import registry

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("typed_script.py")
ERROR = re.compile(r"typed_script\.py:(\d+): error: ")
OPTIONS = (
    "strategy",
    "comm",
    *(f.name for c in (sherd.StepOptions, sherd.LoaderOptions) for f in dataclasses.fields(c)),
)


@pytest.mark.ranks
def test_mypy_knows_every_argument_and_option():
    pytest.importorskip("mypy", reason="mypy is among the dev requirements")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SCRIPT)]
    source = os.pathsep.join([str(Path(sherd.__file__).parents[1]), str(ROOT)])
    environ = {**os.environ, "MYPYPATH": source}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=230, check=False)
    found = {int(line) for line in ERROR.findall(done.stdout)}
    lines = enumerate(SCRIPT.read_text().splitlines(), 1)
    assert found == {number for number, line in lines if line.endswith("  # error")}, done.stdout + done.stderr


def test_types_and_help_have_every_option():
    assert set(DistributeOptions.__annotations__) == set(OPTIONS)
    own = {name for name, builder in registry._BUILDERS.items() if builder.__module__.startswith("sherd.")}
    assert set(typing.get_args(StrategyName)) == own
    signature = inspect.signature(sherd.distribute)
    assert {p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY} == set(OPTIONS)
    text = inspect.getdoc(sherd.distribute)
    for name in OPTIONS:
        assert re.search(rf"^{name}: \S", text, re.M), f"help(sherd.distribute) does not explain {name}"
    assert "see `" not in text and "StepOptions" not in text


def _with(name, value):
    """What an option cannot be used without."""
    return {"precision": "bf16"} if name == "grad_dtype" else {}


@pytest.mark.parametrize("kind", [sherd.StepOptions, sherd.LoaderOptions])
def test_help_and_types_name_the_values_that_are_taken(kind):
    hints = typing.get_type_hints(DistributeOptions)
    text = inspect.getdoc(sherd.distribute)
    for field in dataclasses.fields(kind):
        parts = [hints[field.name], *typing.get_args(hints[field.name])]
        values = [
            value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)
        ]
        for value in values:
            assert f'"{value}"' in text
            kind(**{field.name: value, **_with(field.name, value)})
        if values:
            with pytest.raises(sherd.ConfigError, match=f"unknown {field.name}='nothing'") as caught:
                kind(**{field.name: "nothing"})
            assert all(repr(value) in str(caught.value) for value in values)
            assert len(re.findall(r"'[\w-]+'", str(caught.value).split("valid: ")[1])) == len(values)


@pytest.mark.fake
def test_a_name_that_no_type_checker_saw_is_refused_with_the_nearest():
    with pytest.raises(sherd.ConfigError, match="no option 'clip_nrom'; did you mean 'clip_norm'"):
        sherd.distribute(sherd.ZeRO, clip_nrom=1.0)
