"""The picture of whole matrices is what its script draws."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.snippets import ROOT

pytestmark = pytest.mark.fake


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs/images/whole_matrices.py"))["picture"]()
    assert (ROOT / "docs/images/whole_matrices.svg").read_text() == drawn, "run python docs/images/whole_matrices.py"
