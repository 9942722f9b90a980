"""What docs/architecture.md names is in the code: files, classes, methods, states. Its picture is current."""

from __future__ import annotations

import ast
import enum
import importlib
import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/sherd"
PAGE = (ROOT / "docs/architecture.md").read_text()
PICTURE = runpy.run_path(str(ROOT / "docs/images/walk.py"))
OTHERS = {"SyncBatchNorm", "Parameter", "None", "False", "True"}
ENUMS = {
    "Mode": "buckets.tracked",
    "Local": "buckets.bucket",
    "Sum": "buckets.bucket",
    "round.State": "gradients.round",
    "Filling": "gradients.gradient",
    "Holding": "parameters.store",
    "Condition": "optimizer.shard",
    "engine.State": "engine",
}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def members(node: ast.ClassDef) -> set[str]:
    """Methods and attributes of a class, those set on `self` included."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found.add(each.targets[0].id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add(each.attr)
    return found


@pytest.fixture(scope="module")
def classes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(members(node))
    return found


def missing_names(names: list[str], classes: dict[str, set[str]]) -> list[str]:
    missing = []
    for name in names:
        if name.endswith(".py"):
            if not (PACKAGE / name).exists():
                missing.append(name)
        elif found := re.fullmatch(r"([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:\.(\w+))?", name):
            kind, member = found.groups()
            known = kind in OTHERS or (kind in classes and (member is None or member in classes[kind]))
            if not known:
                missing.append(name)
    return missing


def test_files_classes_and_methods_exist(classes):
    names = quoted(PAGE)
    assert sum(name.endswith(".py") for name in names) > 30
    assert missing_names(names, classes) == []


def test_a_name_that_is_gone_is_noticed(classes):
    gone = ["engine/gone.py", "GoneClass", "Bucket.gone"]
    assert missing_names([*gone, "Bucket.launch", "engine/engine.py"], classes) == gone


def test_functions_named_by_themselves_exist():
    source = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    for name in ("begin_round", "arrive", "end_round", "compare_unfrozen", "reduce_scatter", "all_reduce"):
        assert f"`{name}`" in PAGE and f"def {name}(" in source, name


def test_the_states_are_those_of_the_enums():
    section = PAGE.partition("\n## The states\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", section, re.MULTILINE)
    expected = []
    for name, module in ENUMS.items():
        kind = getattr(importlib.import_module(f"sherd.engine.{module}"), name.rpartition(".")[2])
        assert issubclass(kind, enum.Enum)
        expected += [(name, member.name) for member in kind]
    assert rows == expected


def test_the_pictures_are_what_their_scripts_draw():
    for name in ("walk", "map_reduce"):
        script = ROOT / f"docs/images/{name}.py"
        assert script.with_suffix(".svg").read_text() == runpy.run_path(str(script))["picture"](), (
            f"run python {script}"
        )


def test_the_picture_shows_files_and_methods_that_exist(classes):
    for walk in (PICTURE["GRADIENT"], PICTURE["STEP"]):
        for box in walk.boxes:
            assert (PACKAGE / box.file).exists(), box.file
            names = re.findall(r"\b[A-Z]\w+\.\w+", " ".join(box.lines))
            assert missing_names(names, classes) == [], box.file


def test_the_picture_leaves_out_no_stop_of_importance():
    """Every file of the step's table, and all of the gradient's that are not helpers of another stop."""

    def listed(walk):
        table = PAGE.partition(f"\n## The walk of a {walk}\n")[2].partition("\n## ")[0]
        return set(re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE))

    def drawn(walk):
        return {box.file for box in PICTURE[walk].boxes} - {"comm"}

    assert drawn("STEP") == listed("step")
    helpers = {"engine/gradients/gradient.py", "data/batch_weight.py"}
    assert drawn("GRADIENT") == listed("gradient") - helpers
