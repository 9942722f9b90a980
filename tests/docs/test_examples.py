"""The image classifier prints on two ranks what the plain script prints, and all that differs is in the docs."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import sherd
from tests.helpers.training import STRATEGIES

ROOT = Path(__file__).parents[2]
PLAIN, DISTRIBUTED = (ROOT / "examples" / name for name in ("image_classifier_plain.py", "image_classifier.py"))
PAGE = ROOT / "docs" / "image-classifier.md"
LINE = re.compile(r"epoch +\d+  held out \d+\.\d{3}  right \d\.\d{3}  norm \d+\.\d\d  lr \d\.\d{5}")
CURVE = ("--dtype=float64", "--epochs=3", "--batch=100")  # 37 images are left for the last batch: 19 and 18
STOPPING = ("--dtype=float64", "--epochs=9", "--batch=250", "--patience=1", "--lr=1")  # learns nothing at this rate


def main_of(script, options):
    """What a script prints that is run in this process."""
    printed, arguments = io.StringIO(), sys.argv
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    sys.argv = [str(script), *options]
    torch.set_num_threads(1)  # more would only wait for each other over images as small as these
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = arguments
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
    return printed.getvalue().splitlines()


@functools.cache
def plain_curve(options):
    lines = main_of(PLAIN, options)
    assert all(LINE.fullmatch(line) for line in lines), lines
    return lines


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_print_the_curve_of_one_process(ranks, strategy):
    expected = plain_curve(CURVE)
    assert len(set(expected)) == 3
    assert ranks(2).run(main_of, DISTRIBUTED, (*CURVE, "--strategy", strategy)) == [expected, []]


def test_all_ranks_stop_early(ranks):
    expected = plain_curve(STOPPING)
    assert 1 < len(expected) < 9
    assert ranks(2).run(main_of, DISTRIBUTED, STOPPING) == [expected, []]


@pytest.mark.fuzz  # the script and the command are each tested in every run
@pytest.mark.ranks
def test_the_command_of_the_page_prints_it_too():
    ended = sherd("run", "-n", "2", DISTRIBUTED, "--strategy", "zero3", *CURVE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == plain_curve(CURVE)


@pytest.mark.pure
def test_the_page_shows_all_that_differs():
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown == difference(), f"what differs between the examples is not what docs/{PAGE.name} says"


def difference():
    """What differs between the two scripts below their docstrings, an empty line between places."""
    plain, distributed = (path.read_text().split('"""\n', 1)[1].splitlines() for path in (PLAIN, DISTRIBUTED))
    _, _, _, *lines = difflib.unified_diff(plain, distributed, n=0, lineterm="")
    return "".join("\n" if line.startswith("@@") else f"{line}\n" for line in lines if line != "+")
