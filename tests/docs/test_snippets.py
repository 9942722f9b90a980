"""Every command and snippet of README and docs is run, or says why it is not."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from benchmarks import readme

from tests.docs.snippets import PAGES, ROOT, Block, blocks_of, chains_of
from tests.helpers import processes

pytestmark = pytest.mark.pure

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
CHAINS = [chain for page in PAGES for chain in chains_of(blocks_of(page))]
PARTS = [block for block in BLOCKS if block.file is not None]
SHELL = [block for block in BLOCKS if block.language in ("sh", "bash", "console")]
FEW_THREADS = {"OMP_NUM_THREADS": "1", "SHERD_SPIN": "0"}
OURS = re.compile(r"(?:\.venv/bin/)?sherd|python3? -m sherd")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*command, cwd=ROOT, **FEW_THREADS)


# ---------------------------------------------------------------- Python


@pytest.fixture(scope="module")
def runner() -> Iterator[Callable[[list[Block]], str]]:
    """Runs a chain of blocks. The same code runs once, though two languages show it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.snippets"],
        cwd=ROOT,
        env={**os.environ, **FEW_THREADS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    known: dict[tuple[str, ...], str] = {}

    def answer(chain: list[Block]) -> str:
        key = tuple(block.setup + block.code for block in chain)
        if key not in known:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([asdict(block) for block in chain]) + "\n")
            process.stdin.flush()
            known[key] = json.loads(process.stdout.readline())
        return known[key]

    yield answer
    process.communicate()


@pytest.mark.ranks
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain[0].place)
def test_python(runner, chain):
    if problem := runner(chain):
        blocks = "\n".join(f"--- {block.place}\n{block.code}" for block in chain)
        pytest.fail(f"{chain[0].place}: the block {problem}\n{blocks}", pytrace=False)


@pytest.mark.parametrize("block", PARTS, ids=lambda block: block.place)
def test_parts_of_files(block):
    """Line by line, whatever the indentation in the file."""
    file = [line.strip() for line in (ROOT / block.file).read_text().splitlines()]
    lines = [line.strip() for line in block.code.splitlines()]
    starts = [number for number, line in enumerate(file) if line == lines[0]]
    assert any(file[n : n + len(lines)] == lines for n in starts), f"{block.place} shows what is not in {block.file}"


# ---------------------------------------------------------------- the shell


def commands(block: Block) -> list[list[str]]:
    """Without comments; a line that ends in a backslash goes on in the next."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


@functools.cache
def help_of(*subcommand: str) -> str:
    ended = run(*processes.SHERD, *subcommand, "--help")
    assert ended.returncode == 0, f"sherd {' '.join(subcommand)} is no command: {ended.stderr.strip()}"
    return ended.stdout


def own(words: list[str]) -> list[str] | None:
    """The arguments of a command of ours, without variables set in front of it; None of another's."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if words[:1] in (["srun"], ["exec"], ["ssh"]):
        words = words[next((i for i, word in enumerate(words) if word.endswith("sherd")), len(words)) :]
    for length in (1, 3):
        if OURS.fullmatch(" ".join(words[:length])):
            return words[length:]
    return None


def unknown_options(arguments: list[str]) -> list[str]:
    """Options of sherd, which stand before the script, that no help lists."""
    if not arguments or arguments[0].startswith("-"):
        return [word for word in arguments if word.startswith("-") and word not in help_of()]
    subcommand, *rest = arguments
    known, unknown = help_of(subcommand), []
    for word in rest:
        if word == "-m" or word.endswith(".py"):
            break  # what follows is the script's
        option = word.partition("=")[0]
        if option.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known):
            unknown.append(option)
    return unknown


def problem_of(words: list[str]) -> str | None:
    """Why a command does not work, after it was run if that is quick; None if it works."""
    arguments = own(words)
    if arguments is not None:
        script = next((word for word in arguments if word.endswith(".py")), None)
        if arguments[:1] == ["run"] and (script is None or not (ROOT / script).exists()):
            return f"has no script to run here ({script}); mark the block <!-- not run: reason -->"
        ended = run(*processes.SHERD, *arguments)
        return None if ended.returncode == 0 else f"ended with {ended.returncode}: {ended.stderr}"
    if words[0] == "make":
        ended = run("make", "--dry-run", *words[1:])
        return None if ended.returncode == 0 else ended.stderr
    if words[0] in ("python", "python3") and words[1] == "-m":
        return None if importlib.util.find_spec(words[2]) else f"there is no module {words[2]}"
    if words[0] in ("python", "python3") and (ROOT / words[1]).exists():
        ended = run(sys.executable, *words[1:])
        return None if ended.returncode == 0 else f"ended with {ended.returncode}: {ended.stderr}"
    return "is not one that this test runs; mark the block <!-- not run: reason -->"


@pytest.mark.ranks
@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_shell(block):
    problems = []
    for words in commands(block):
        arguments = own(words)
        if arguments is not None and (unknown := unknown_options(arguments)):
            problems.append(f"{shlex.join(words)}\n    has options that sherd does not have: {', '.join(unknown)}")
        elif block.not_run is None and (problem := problem_of(words)):
            problems.append(f"{shlex.join(words)}\n    {problem}")
    if problems:
        pytest.fail("\n".join([f"{block.place}:", *problems]), pytrace=False)


# ---------------------------------------------------------------- marks


def test_what_is_not_run_says_why():
    silent = [block.place for block in BLOCKS if block.not_run is not None and len(block.not_run.split()) < 2]
    assert not silent, f"<!-- not run --> without a reason: {silent}"


def test_blocks_name_their_language():
    nameless = [block.place for block in BLOCKS if not block.language]
    assert not nameless, f"write ```text, ```sh or ```python: {nameless}"


def page(tmp_path, monkeypatch, text):
    monkeypatch.setattr("tests.docs.snippets.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(text)
    return blocks_of(path)


@pytest.mark.ranks
def test_a_block_that_fails_is_found_with_its_line(tmp_path, monkeypatch, runner):
    text = "# A page\n\n<!-- setup\nx = 1\n-->\n```python\ny = x + 1\n```\nand\n\n"
    text += "<!-- continues -->\n```python\ny.no\n```\n"
    (chain,) = chains_of(page(tmp_path, monkeypatch, text))
    assert [block.line for block in chain] == [7, 13]
    assert not runner(chain[:1])
    problem = runner(chain)
    assert "ended with 1" in problem
    assert 'page.md", line 13' in problem
    assert "AttributeError" in problem


@pytest.mark.ranks
def test_commands_that_do_not_work_are_found(tmp_path, monkeypatch):
    text = "<!-- not run: a reason -->\n```sh\nsherd run --rings 2 x.py  # a comment\n```\n\n"
    text += "```sh\nmake nonsense\nls\n```\n"
    marked, unmarked = page(tmp_path, monkeypatch, text)
    assert (marked.not_run, unmarked.not_run) == ("a reason", None)
    assert unknown_options(own(commands(marked)[0])) == ["--rings"]
    assert all(problem_of(words) for words in commands(unmarked))


@pytest.mark.ranks
def test_the_tables_of_results_are_up_to_date():
    ended = run(sys.executable, "-m", "benchmarks.readme", "--check")
    assert ended.returncode == 0, ended.stderr


def test_tables_need_their_markers():
    with pytest.raises(SystemExit, match="results:begin"):
        readme.written("no markers", "en")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_of_images(tmp_path, monkeypatch, language):
    """Each language has every word; speed-ups are to what was measured in the same run."""
    times = {"one-core": 8.0, "all-cores": 5.0, "sherd-zero2": 4.0}
    same = {"disturbances": [0.0], "bytes_per_parameter": 40.0}
    results = {name: {"seconds": [seconds], **same} for name, seconds in times.items()}
    run = {"ranks": 2, "cores": 2, "size": 64, "batch": 32, "parameters": 25_000_000, "results": results}
    (tmp_path / "resnet.json").write_text(json.dumps([run]))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = readme.written(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", language)
    assert "old" not in text
    assert "| 4.0 | 1.00 | 0.62 | 1,000 MB |" in text
    assert re.search(r"sherd zero2, .* \| \*\*8\.0\*\* \| \*\*2\.00\*\* \| \*\*1\.25\*\* \| \*\*1,000 MB\*\* \|", text)
    assert readme.WORDS["en"].keys() == readme.WORDS["zh"].keys()
