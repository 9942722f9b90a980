"""How much code there is, now and at another revision.

    python -m benchmarks.lines --at REVISION

counts the lines of the folders below without blanks, comments and docstrings, and lists functions that do not fit on a
screen and folders that nobody can keep in mind. The revision is read from git; nothing is checked out.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/sherd"
COUNTED = ("comm", "layout", "patches", "engine", "strategies", "api", "ranks", "data", "mapreduce")
MAX_FUNCTION_LINES = 60
"""From `def` to its last line, without the docstring."""
MAX_FILES = 15
"""Python files of one folder, not counting those of the folders in it."""

Sources = Mapping[str, str]
"""The text of each Python file by its path, which begins with `src/sherd/`."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def working_tree() -> dict[str, str]:
    """The sources as they are on disk."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def at(revision: str) -> dict[str, str]:
    """The sources as they are in a commit, branch or tag."""
    command = ["git", "archive", "--format=tar", revision, PACKAGE]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if ended.returncode:
        raise SystemExit(
            f"git cannot read {revision!r}: {ended.stderr.decode().strip()}; pass a commit of this repository"
        )
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as archive:
        found = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".py")}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def code_lines(source: str) -> int:
    """Lines that hold code: no blanks, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if _is_text(node):
            lines -= _lines(node)
    return len(lines)


def by_folder(sources: Sources) -> Counter[str]:
    """Lines of code of each folder that is counted."""
    total: Counter[str] = Counter()
    for path, source in sources.items():
        folder = path.removeprefix(f"{PACKAGE}/").partition("/")[0]
        if folder in COUNTED:
            total[folder] += code_lines(source)
    return total


def long_functions(sources: Sources, limit: int = MAX_FUNCTION_LINES) -> dict[str, int]:
    """Functions with more lines than `limit`, as `path:line name`."""
    found = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = len(_lines(node)) - (len(_lines(node.body[0])) if _is_text(node.body[0]) else 0)
                if lines > limit:
                    found[f"{path}:{node.lineno} {node.name}"] = lines
    return found


def full_folders(sources: Sources, limit: int = MAX_FILES) -> dict[str, int]:
    """Folders with more Python files than `limit`."""
    files = Counter(path.rpartition("/")[0] for path in sources)
    return {folder: count for folder, count in sorted(files.items()) if count > limit}


def _is_text(node: ast.AST) -> bool:
    """A docstring, of a module, class, function or attribute: a string that nothing is done with."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _lines(node: ast.AST) -> set[int]:
    assert isinstance(node, ast.stmt) and node.end_lineno is not None, "only statements are measured"
    return set(range(node.lineno, node.end_lineno + 1))


def table(now: Sources, before: Sources | None, revision: str) -> str:
    """Lines of code by folder, with the difference if there is something to compare with."""
    counted, then = by_folder(now), by_folder(before or {})
    rows = [(folder, then[folder], counted[folder]) for folder in COUNTED]
    rows.append(("all", then.total(), counted.total()))
    if before is None:
        return "\n".join(f"{folder:<12}{new:>8,}" for folder, _, new in rows)
    head = f"{'':<12}{revision[:12]:>14}{'now':>8}{'difference':>12}"
    return "\n".join([head, *(f"{folder:<12}{old:>14,}{new:>8,}{new - old:>+12,}" for folder, old, new in rows)])


def main() -> None:
    """Print the table and the offenders."""
    parser = argparse.ArgumentParser(description="lines of code without blanks, comments and docstrings")
    parser.add_argument("--at", metavar="REVISION", help="a commit, branch or tag to compare with")
    revision: str | None = parser.parse_args().at
    now = working_tree()
    print(table(now, at(revision) if revision else None, revision or ""))
    for what, found in (
        (f"functions over {MAX_FUNCTION_LINES} lines", long_functions(now)),
        (f"folders with more than {MAX_FILES} Python files", full_folders(now)),
    ):
        print(f"\n{what}: {len(found) or 'none'}")
        for name, count in found.items():
            print(f"  {name}: {count}")


if __name__ == "__main__":
    main()
