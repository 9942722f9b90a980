"""The pictures of exchanges, of precision and of loss scaling are those that their scripts draw."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.fake
FOLDER = Path(__file__).parents[2] / "docs/images"


@pytest.mark.parametrize("name", ["exchanges.py", "loss_scaling.py", "mixed_precision.py"])
def test_pictures_are_drawn_by_their_script(name):
    script = runpy.run_path(str(FOLDER / name))
    for picture, arguments in script["PICTURES"].items():
        assert (FOLDER / picture).read_text() == script["picture"](*arguments), f"run python docs/images/{name}"
