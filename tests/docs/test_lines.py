"""The counts of `benchmarks.lines` are right, and no function or folder is larger than the house rules say."""

from __future__ import annotations

import subprocess
from textwrap import dedent

import pytest
from benchmarks import lines

pytestmark = pytest.mark.pure


def test_only_code_is_counted():
    source = '''
        """A docstring
        of two lines."""

        # a comment
        x = 1  # with a comment
        """Of an attribute."""
        text = """not a docstring,

        but three lines"""


        def f(
            a,
        ):
            "A docstring."
            return "# no comment"
    '''
    assert lines.code_lines(dedent(source)) == 1 + 3 + 3 + 1


def test_docstrings_do_not_make_a_function_long():
    body = "    x = 1\n" * 59
    fits = f'def fits():\n    """Has\n    a docstring."""\n{body}'
    long = f"def long():\n{body}    x = 1\n"
    assert lines.long_functions({"a.py": fits}) == {}
    assert lines.long_functions({"a.py": f"{fits}\n\n{long}"}) == {"a.py:65 long": 61}


def test_files_are_counted_by_folder():
    sources = {f"src/sherd/a/{number}.py": "" for number in range(15)} | {"src/sherd/a/b/0.py": ""}
    assert lines.full_folders(sources) == {}
    assert lines.full_folders({**sources, "src/sherd/a/15.py": ""}) == {"src/sherd/a": 16}


@pytest.mark.ranks
def test_a_revision_is_read_from_git():
    inside = subprocess.run(["git", "rev-parse", "--git-dir"], cwd=lines.ROOT, capture_output=True, check=False)
    if inside.returncode:
        pytest.skip("this is not a git repository")
    committed = lines.at("HEAD")
    assert committed["src/sherd/__init__.py"].startswith('"""')
    assert set(lines.by_folder(committed)) == set(lines.COUNTED)
    with pytest.raises(SystemExit, match="git cannot read 'no-such-revision'"):
        lines.at("no-such-revision")


def test_no_function_is_longer_than_a_screen():
    found = lines.long_functions(lines.working_tree())
    assert not found, f"over {lines.MAX_FUNCTION_LINES} lines; split them:\n" + _listed(found)


def test_no_folder_has_too_many_files():
    found = lines.full_folders(lines.working_tree())
    assert not found, f"over {lines.MAX_FILES} Python files; make a folder inside:\n" + _listed(found)


def _listed(found: dict[str, int]) -> str:
    return "\n".join(f"  {name}: {count}" for name, count in found.items())
