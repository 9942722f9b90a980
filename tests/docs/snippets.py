"""The blocks of code in README and docs: found, grouped, and run in children of one process that has torch imported.

A block says how it is to be run in an HTML comment right before it:

    <!-- not run: reason -->      it cannot be run here, and why
    <!-- from: path -->           it is a part of that file, which has a test of its own
    <!-- continues -->            it goes on where the last block of the page ended, with the same names
    <!-- setup                    Python that readers do not see, run before the next block
    class Net: ...
    -->

`python -m tests.docs.snippets` takes chains of Python blocks as JSON on its standard input and answers in the same way.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md") if (ROOT / name).exists()),
    *sorted((ROOT / "docs").glob("*.md")),
]
SECONDS = 60  # of one chain; for those that hang
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*).*\n(?P<code>(?:.*\n)*?) *```$", re.MULTILINE)
_COMMENT = re.compile(r"<!--(.*?)-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its first line of code, from 1
    language: str
    code: str
    setup: str = ""
    continues: bool = False
    not_run: str | None = None  # the reason; "" is none
    file: str | None = None  # that it is a part of

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    blocks = []
    for found in _FENCE.finditer(text):
        code = "".join(line.removeprefix(found["indent"]) for line in found["code"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start("code")) + 1
        setup, continues, not_run, file = "", False, None, None
        before = text[: found.start()]
        while comment := _COMMENT.search(before):
            said = comment[1].rpartition("<!--")[2].strip()
            before = before[: before.rindex("<!--")]
            if said.startswith("setup"):
                setup = said.removeprefix("setup").lstrip(" \r").lstrip("\n") + "\n" + setup
            elif said == "continues":
                continues = True
            elif said.startswith("not run"):
                not_run = said.removeprefix("not run").lstrip(":").strip()
            elif said.startswith("from:"):
                file = said.removeprefix("from:").strip()
            else:
                break
        page = str(path.relative_to(ROOT))
        blocks.append(Block(page, line, found["language"], code, setup, continues, not_run, file))
    return blocks


def chains_of(blocks: list[Block]) -> list[list[Block]]:
    """Python blocks that are to be run, each with those that continue it."""
    chains: list[list[Block]] = []
    for block in blocks:
        if block.language == "python" and block.not_run is None and block.file is None:
            if block.continues and chains:
                chains[-1].append(block)
            else:
                chains.append([block])
    return chains


# ---------------------------------------------------------------- the process that runs them


def _run(chain: list[Block], output: Path) -> None:
    """In a child: the blocks as one script, whose traceback has the lines of the page."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Ranks that the script starts import it from a file, as they would that of a reader.
    file = Path.cwd() / "snippet.py"
    file.write_text("\n".join(block.setup + block.code for block in chain))
    script = types.ModuleType("__main__")
    script.__file__ = str(file)
    sys.modules["__main__"], sys.argv = script, [str(file)]
    sys.path.insert(0, str(file.parent))
    status = 0
    try:
        for block in chain:
            for code, first in ((block.setup, 1), (block.code, block.line)):
                name = str(ROOT / block.page) if code is block.code else f"the set-up of {block.place}"
                exec(compile("\n" * (first - 1) + code, name, "exec"), script.__dict__)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _answer(chain: list[Block]) -> str:
    """What is to be said of it; nothing if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        work = Path(folder) / "work"
        work.mkdir()
        child = os.fork()
        if child == 0:
            os.chdir(work)
            _run(chain, output)
        deadline = time.monotonic() + SECONDS
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                return f"did not end within {SECONDS} s; it printed:\n{output.read_text()}"
            time.sleep(0.005)
        status = os.waitstatus_to_exitcode(ended[1])
        return f"ended with {status}; it printed:\n{output.read_text()[-3000:]}" if status else ""


def main() -> None:
    import torch  # noqa: F401 - once for all of them

    import sherd

    _ = sherd.distribute  # imported when it is asked for
    for line in sys.stdin:
        chain = [Block(**block) for block in json.loads(line)]
        print(json.dumps(_answer(chain)), flush=True)


if __name__ == "__main__":
    main()
