"""What the documentation points at exists: files, headings, the words of errors. Both languages show the same code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VARIABLE = re.compile(  # what a message has between its constant words; the launcher begins some with "waiting for"
    r"(?<!\w)'[^']*'|\b[a-z0-9.-]+:\d+|\b\d+(?:\.\d+)*\b|host-[ab]|interface eth\d"
    r"|\.\.\.|SHERD_TOKEN|\[[^\]]*\]|\([^-)]*\)|^waiting for "
)


def anchor(heading: str) -> str:
    """As GitHub makes it: lower case, without punctuation, hyphens for blanks."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        if heading:
            assert heading in anchors(target), f"{page.name} links to {link}, and there is no such heading"


@pytest.mark.parametrize("name", ["README", "docs/questions"])
def test_both_languages_show_the_same_programs(name):
    english, chinese = ((ROOT / f"{name}{suffix}.md").read_text() for suffix in ("", ".zh-CN"))
    assert PYTHON.findall(english) == PYTHON.findall(chinese) != []
    assert english.count("\n#") == chinese.count("\n#"), "one of them lacks a section"


def test_errors_have_the_words_that_the_docs_explain():
    page = (ROOT / "docs/several-machines.md").read_text().partition("What each error means")[2]
    # A message is put together from strings of several lines: what is between two quotes falls away.
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r"\"\s*\n\s*f?\"|[`]", "", source)
    messages = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    assert len(messages) > 20
    for message in messages:
        words = re.findall(r"`([^`]+)`", message)[0].removeprefix("PeerLost: ").removeprefix("Diverged: ")
        constant = max((part.strip(" :();,") for part in VARIABLE.sub("\0", words).split("\0")), key=len)
        assert constant in source, f"no error says {constant!r}, which docs/several-machines.md explains: {words!r}"
