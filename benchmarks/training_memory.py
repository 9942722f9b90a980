"""What `benchmarks.training --memory` does: the memory of one contender after the other, with no other group alive.

First comes one plain process: the same model and batch in a loop without sherd. What it takes beyond 16 bytes per
parameter (weights, gradients and two moments in fp32) is what any process needs to train this model: torch itself,
activations, temporary tensors. Ranks that share their state perfectly need 16 bytes per parameter together, and each
what the plain process takes beyond its own. Everything counts, pages of torch's libraries too, which every process is
charged in full, as if it were alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.processes import GroupFailed
from benchmarks.training_contenders import CONTENDERS
from benchmarks.training_rank import Train
from benchmarks.training_report import few_words, new_table, verdict

if TYPE_CHECKING:
    from benchmarks.training import Run

PLAIN = "unconnected"
STATE = 16  # bytes per parameter
RATIO = 1.05  # at most so many times what is needed
BYTES = {2: 18.0, 4: 19.0}  # ranks: at most so many bytes per parameter beyond what was there before the model
OURS = ("sherd-zero2", "sherd-zero3")
TARGETS_FOR = "98m"


@dataclass(frozen=True)
class Weighed:
    """One contender's memory on the whole host."""

    parameters: int = 0
    built: float = 0.0  # bytes per parameter beyond what was there before the model was built
    peak: float = 0.0  # the same, during steps
    private: int = 0  # at the peak, in bytes: all memory but pages of files; what ranks share counts once
    files: int = 0
    failure: str | None = None

    @property
    def everything(self) -> int:
        return self.private + self.files


def needed(ranks: int, parameters: int, plain: int) -> int:
    """Bytes that so many ranks need, of which one plain process takes so many."""
    return STATE * parameters + ranks * (plain - STATE * parameters)


def weigh_plain(run: Run, shape: tuple[int, int], steps: int) -> Weighed:
    """One plain process; `run` is of one rank."""
    return weigh(run, [PLAIN], shape, steps)[PLAIN]


def weigh(run: Run, names: list[str], shape: tuple[int, int], steps: int) -> dict[str, Weighed]:
    weighed = {}
    for name in names:
        with ExitStack() as stack:
            group = run.start(name, stack)
            if group is not None:
                try:
                    peak = group.train_weighed(Train(*shape, steps=steps))
                    weighed[name] = Weighed(
                        parameters=group.parameters,
                        built=(group.bytes_built - group.bytes_joined) / group.parameters,
                        peak=(peak - group.bytes_joined) / group.parameters,
                        private=peak,
                        files=group.file_bytes(),
                    )
                except GroupFailed as failure:
                    run.drop(name, failure)
        if name in run.failures:
            weighed[name] = Weighed(failure=run.failures[name])
    return weighed


def memory_report(
    ranks: int, size: str, shape: tuple[int, int], weighed: Mapping[str, Weighed], plain: Weighed
) -> list[Table]:
    table = new_table(
        f"host memory: GPT {size}, {ranks} ranks, {shape[0]} x {shape[1]} tokens per rank",
        *("contender", "bytes per parameter when built", "at the peak", "everything", "needed", "ratio"),
        "without pages of files",
    )
    if not plain.failure:
        table.add_row("one plain process", f"{plain.built:.1f}", f"{plain.peak:.1f}", _megabytes(plain.everything))
    for name, one in weighed.items():
        if one.failure:
            table.add_row(CONTENDERS[name].title, few_words(one.failure))
            continue
        row = [f"{one.built:.1f}", f"{one.peak:.1f}", _megabytes(one.everything)]
        if not plain.failure:
            most = needed(ranks, one.parameters, plain.everything)
            private = one.private / needed(ranks, one.parameters, plain.private)
            row += [_megabytes(most), f"{one.everything / most:.3f}", f"{private:.3f}"]
        table.add_row(CONTENDERS[name].title, *row)
    return [table, _targets(ranks, weighed, plain)] if size == TARGETS_FOR else [table]


def _targets(ranks: int, weighed: Mapping[str, Weighed], plain: Weighed) -> Table:
    table = new_table(f"targets at {ranks} ranks", "contender", "of", "target", "measured", "")
    for name in OURS:
        one = weighed.get(name, Weighed(failure="not measured"))
        title = CONTENDERS[name].title
        ratio = None
        if not (one.failure or plain.failure):
            ratio = one.everything / needed(ranks, one.parameters, plain.everything)
        table.add_row(title, "everything to needed", f"<= {RATIO:g}", *verdict(ratio, RATIO, "{:.3f}", most=True))
        if ranks in BYTES:
            peak = None if one.failure else one.peak
            row = verdict(peak, BYTES[ranks], "{:.1f}", most=True)
            table.add_row(title, "bytes per parameter", f"<= {BYTES[ranks]:g}", *row)
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
