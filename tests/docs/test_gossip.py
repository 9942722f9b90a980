"""The page about gossip: its picture, and the numbers that it gives."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sherd.layout.topology import topology_of

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gossip.md").read_text()


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs/images/gossip.py"))["picture"]()
    assert (ROOT / "docs/images/gossip.svg").read_text() == drawn, "run python docs/images/gossip.py"


def test_the_contractions_in_the_table_are_those_of_the_matrices():
    rows = dict(re.findall(r'^\| `"([\w-]+)"`.*\| ([^|]+) \|$', PAGE, re.MULTILINE))
    assert rows["exponential"] == "1/2 of 8 ranks, 5/7 of 64"
    assert topology_of("exponential", 8).contraction == pytest.approx(1 / 2)
    assert topology_of("exponential", 64).contraction == pytest.approx(5 / 7)
    assert rows["ring"] == "0.80 of 8 ranks, 0.997 of 64"
    assert f"{topology_of('ring', 8).contraction:.2f}" == "0.80"
    assert f"{topology_of('ring', 64).contraction:.3f}" == "0.997"
