"""The pictures of exchanges are those that their script draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.fake
FOLDER = Path(__file__).parents[2] / "docs/images"


def test_pictures_are_drawn_by_their_script():
    script = runpy.run_path(str(FOLDER / "exchanges.py"))
    for name, arguments in script["PICTURES"].items():
        assert (FOLDER / name).read_text() == script["picture"](*arguments), "run python docs/images/exchanges.py"
