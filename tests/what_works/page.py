"""docs/what-works.md, from the cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.helpers.training import STRATEGIES
from tests.what_works import every_case
from tests.what_works.cases import Case

PAGE = Path(__file__).parents[2] / "docs" / "what-works.md"
COMMAND = "make docs"
SECTIONS = ("Loops", "Loaders", "Several models", "Freezing", "Models", "Buffers and batch norm", "Gradients")
SECTIONS += ("Writing into parameters", "After distribute", "Saving and loading")
"""The order of the page; further sections follow, then what ranks may disagree on."""
LAST = ("Ranks that disagree",)

HEAD = f"""\
# What works

*Generated from the tests by `{COMMAND}`; do not edit it.*

Each row is a training script that is tested as it stands: once in one process with plain PyTorch, and on two ranks
under each strategy with a tick. Weights and losses have the same bits on both ranks and under all of these strategies,
and agree with the plain run on the whole batch, in float64 to nine digits, where a row says nothing else. What cannot
be made right is refused: every rank gets an error of the same kind, without waiting for a timeout, that says what is
wrong. Without a tick it was not tested under that strategy, or there is nothing to refuse.
"""


def page() -> str:
    """The text of the page."""
    cases = list(every_case().values())
    parts = [HEAD]
    for section in _sections(cases):
        parts.append(f"## {section}\n")
        parts.extend(_section([each for each in cases if each.section == section]))
    return "\n".join(parts)


def _sections(cases: Iterable[Case]) -> list[str]:
    found = dict.fromkeys(each.section for each in cases)
    others = [section for section in found if section not in SECTIONS + LAST]
    return [section for section in (*SECTIONS, *others, *LAST) if section in found]


def _section(cases: list[Case]) -> Iterator[str]:
    works = [each for each in cases if each.refusal is None]
    if works:
        yield _table("what you do", "what holds", works)
    refusals = [each for each in cases if each.refusal is not None]
    if refusals:
        yield _table("refused", "because, and what to do instead", refusals)


def _table(what: str, note: str, cases: Iterable[Case]) -> str:
    rows = [f"| {what} | {note} | {' | '.join(STRATEGIES)} |", f"|---|---|{':-:|' * len(STRATEGIES)}"]
    for each in cases:
        ticks = (" ✓ " if strategy in each.strategies else " " for strategy in STRATEGIES)
        rows.append(f"| {each.title} | {_note(each)} |{'|'.join(ticks)}|")
    return "\n".join(rows) + "\n"


def _note(each: Case) -> str:
    """What holds, and what is not said at the head of the page."""
    notes = [each.note] if each.note else []
    if each.rtol is None:
        notes.append("(the strategies with each other; not compared with plain torch)")
    elif each.rtol != Case.rtol:
        notes.append(f"(to {each.rtol:.0e} of plain torch)")
    if each.refusal is not None and each.on != Case.on:
        notes.append(f"(the error is on rank {', '.join(map(str, each.on))})")
    return " ".join(notes)
