"""The live display: what it shows, that it makes room, and that it can end nothing."""

from __future__ import annotations

import csv
import math
import re
import sys
import threading

import pytest

from sherd.cli import messages
from sherd.cli.output import curve as curves
from sherd.cli.output import watching
from sherd.cli.output.console import STDERR, STDOUT, Console, Writer
from sherd.cli.output.curve import curve, thinned
from sherd.cli.output.display import figures, frame, in_words
from sherd.observe.events import Event
from sherd.observe.runs import Follower, RunRecord, load
from tests.cli.scripts import in_terminal
from tests.helpers.processes import SHERD, sherd

pytestmark = pytest.mark.pure

START = 1000.0


def record_of(steps, *, ranks=2, total=None, tokens=None, loss=lambda step: 4 / (step + 1)):
    """A run with half a second per step."""
    record = RunRecord()
    for rank in range(ranks):
        start = {"world": ranks, "strategy": "zero3", "total_steps": total, "hosts": [list(range(ranks))]}
        start |= {"host": "alpha", "pid": rank, "model": {"elements": 1_234_567}}
        record.feed(Event(1, START, 0, rank, "run.start", None, start))
    for step in range(steps):
        for rank in range(ranks):
            seconds = {"data": 0.05, "forward": 0.1, "backward": 0.2, "communication": 0.1, "update": 0.05, "rest": 0.0}
            figures = {"loss": loss(step)} | ({} if tokens is None else {"tokens": tokens})
            record.feed(Event(1, START + 0.5 * (step + 1), 0, rank, "log", step, {"figures": figures, "n": 16}))
            fields = {"loss": None, "root": 7.0, "samples": 16, "seconds": seconds, "lr": [0.1]}
            fields |= {"resident": {"private": 300 << 20, "shared": 100 << 20}, "norm_squared": 2.0}
            fields |= {"bytes": {"payload": 1, "control": 1}, "memory": {"parameters": 1}, "skipped": False}
            record.feed(Event(1, START + 0.5 * (step + 1), 0, rank, "step", step, fields))
    return record


def test_the_figures_of_a_run():
    found = figures(record_of(10, total=30), START + 5)
    assert (found.head, found.step, found.total) == ("zero3 · 2 ranks · 1.23 M parameters", 10, 30)
    assert (found.loss, found.norm, found.lr) == (pytest.approx(0.4), pytest.approx(2.0), 0.1)
    assert found.rate == "64 samples/s"  # 32 by both ranks in half a second
    assert found.shares["communication"] == pytest.approx(0.2)
    assert found.rank_memory == {0: 400 << 20, 1: 400 << 20}
    assert found.host_memory == {"alpha": 700 << 20}
    assert (found.elapsed, found.left) == (5, pytest.approx(10))
    assert in_words(found) == (
        "step 10/30, loss 0.4, 64 samples/s, communication 20%, memory of ranks 0: 400 MiB, 1: 400 MiB, "
        "host alpha 700 MiB, 0:10 left"
    )


def test_tokens_come_before_samples_and_many_ranks_become_a_range():
    found = figures(record_of(3, ranks=9, tokens=10_000), START + 2)
    assert found.rate == "180 k tokens/s"
    assert found.left is None
    assert "memory of ranks 0-8 400 MiB to 400 MiB" in in_words(found)


def test_a_loss_that_was_not_told_is_called_what_it_is():
    record = RunRecord()
    record.feed(Event(1, START, 0, 0, "run.start", None, {"world": 1, "pid": 1}))
    record.feed(Event(1, START, 0, 0, "step", 0, {"loss": None, "root": 0.5}))
    assert "loss (as passed to backward) 0.5" in in_words(figures(record, START))
    assert any("loss (as passed to backward) 0.5" in Console.bare(line) for line in frame(record, 80, 24, START))


def test_a_run_that_has_told_nothing():
    found = figures(RunRecord(), START)
    assert (found.head, in_words(found)) == ("waiting for the first step", "step 0")
    assert any("waiting" in line for line in frame(RunRecord(), 80, 24, START))


@pytest.mark.parametrize("plotext", [True, False])
@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (60, 14), (45, 12), (30, 24), (80, 5)])
def test_a_frame_fits_its_terminal(monkeypatch, plotext, columns, rows):
    if plotext:
        pytest.importorskip("plotext")
    else:
        monkeypatch.setitem(sys.modules, "plotext", None)
    lines = frame(record_of(200, total=400), columns, rows, START + 100)
    assert len(lines) < rows
    bare = [Console.bare(line) for line in lines]
    assert max(map(len, bare)) < columns
    assert "step 200/400" in "".join(bare)
    if rows == 30:
        assert sum(any(sign in line for sign in "▁▂▃▄▅▆▇█⠁⠑⠒⠤⣀⡇") for line in bare) > 2


def test_a_curve_without_plotext(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotext", None)
    lines = curve([0, 1, 2, 3], [4.0, 3.0, math.nan, 1.0], 40, 2)
    assert lines == ["4 █▃", "1 ██▁"]
    assert curve([0], [1.0], 40, 2) == []
    assert len(curve(range(5), [2.0] * 5, 40, 3)) == 3


def test_a_plotext_of_another_interface_is_done_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotext", curves)
    assert curve([0, 1], [4.0, 1.0], 40, 1) == curves._by_blocks([(0, 4.0), (1, 1.0)], 40, 1)


def test_long_curves_are_thinned():
    points = [(step, float(step)) for step in range(1001)]
    found = thinned(points, 100)
    assert len(found) == 100
    assert found[-1] == (1000, pytest.approx(995, abs=1))


class Screen(Console):
    """A console whose streams are one terminal, written down here."""

    def __init__(self):
        super().__init__()
        self.written = ""

    def is_terminal(self, stream):
        return True

    def _size(self):
        return 80, 24

    def _write(self, stream, data):
        self.written += bytes(data).decode()

    def take(self):
        written, self.written = self.written, ""
        return written


CLEARED = "\r\x1b[K"


def erased(rows):
    return CLEARED + "\x1b[1A\x1b[2K" * rows


def drawn(*lines, over=0):
    """A frame, in the place of one that took so many rows; the screen is not cleared first."""
    text = "".join(f"{line}\x1b[K\n" for line in lines)
    return f"{CLEARED}\x1b[{over}A{text}\x1b[J" if over else text


def test_prints_scroll_above_the_frame():
    screen = Screen()
    screen.show(["one", "two"])
    assert screen.take() == drawn("one", "two")
    writer = Writer(STDOUT)
    screen.put(writer, [b"a line\n", b"another\n"])
    screen.flush()
    assert screen.take() == f"{erased(2)}a line\nanother\n" + drawn("one", "two")
    screen.show(["1", "2"])
    assert screen.take() == drawn("1", "2", over=2)
    screen.show(["1"])
    assert screen.take() == drawn("1", over=2)
    screen.leave(keep=False)
    assert screen.take() == drawn(over=1)


def test_a_question_makes_the_frame_wait_until_ranks_go_on():
    screen, writer = Screen(), Writer(STDOUT)
    screen.show(["one", "two"])
    screen.take()
    screen.put(writer, [b"(Pdb) "])
    screen.flush()
    assert screen.take() == f"{erased(2)}(Pdb) "
    screen.show(["one", "two"], latest=1.0)  # a step from before the question
    assert screen.take() == ""
    screen.put(writer, [b"42\n", b"(Pdb) "])
    screen.flush()
    assert screen.take() == "42\n(Pdb) "
    screen.show(["one", "two"], latest=1e12)
    assert screen.take() == "\n" + drawn("one", "two")


def test_progress_bars_are_part_of_the_frame():
    screen, writer = Screen(), Writer(STDERR, b"[rank 1] ")
    screen.show(["one"])
    screen.put(writer, [b"\r", b"10%"])
    screen.put(writer, [b"\r", b"20%\r"])
    screen.take()
    screen.show(["one"])
    assert screen.take() == drawn("[rank 1] 20%", "one", over=1)
    screen.put(writer, [b"done\n"])
    screen.flush()
    assert screen.take() == f"{erased(2)}[rank 1] done\n" + drawn("one")


def test_a_frame_stays_below_the_height_of_a_terminal_that_has_become_smaller():
    screen = Screen()
    screen.show(["x" * 79] * 30)
    assert screen.take() == drawn(*["x" * 79] * 23)
    screen._size = lambda: (40, 24)
    screen.show(["y"])
    assert screen.take() == drawn("y", over=23)  # 46 rows, of which the terminal shows 23


def test_progress_bars_of_several_ranks_keep_a_line_each(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen, writers = Screen(), [Writer(STDERR), Writer(STDERR, b"[rank 1] ")]
    screen.keep_bars()
    for state in (b"10%", b"20%"):
        for writer in writers:
            screen.put(writer, [b"\r", state])
    screen.flush()
    assert screen.take() == ""
    screen.refresh()
    assert screen.take() == drawn("20%", "[rank 1] 20%")
    screen.put(writers[0], [b"\r", b"30%"])
    screen.refresh()  # at once: it is too early
    screen.put(writers[0], [b"\r", b"40%\n"])
    screen.flush()
    assert screen.take() == f"{erased(2)}40%\n" + drawn("[rank 1] 20%")
    screen.leave(keep=True)
    assert screen.take() == drawn("[rank 1] 20%", over=1)


def test_plain_lines_come_at_most_every_ten_seconds_and_at_the_end(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    lines = watching.Lines()
    for second in range(60):
        now[0] = float(second)
        lines.show(record_of(second + 1, ranks=1))
    lines.close(record_of(61, ranks=1), True)
    said = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [f"sherd run: step {n}" for n in (11, 21, 31, 41, 51, 61)]
    short = watching.Lines()
    short.show(record_of(1, ranks=1))
    short.close(record_of(2, ranks=1), True)
    assert capfd.readouterr().err.startswith("sherd run: step 2, loss 2")


def test_a_display_that_fails_ends_nothing(tmp_path, capfd):
    class Broken:
        def __init__(self):
            self.shown = threading.Event()

        def show(self, record):
            self.shown.set()
            raise ValueError("no such colour")

        def close(self, record, well):
            raise ValueError("again")

    broken = Broken()
    watcher = watching.Watcher(Follower(tmp_path), broken, [])
    assert broken.shown.wait(30)
    watcher.close(well=True)
    warning = "sherd run: warning: the events are no longer drawn or written: ValueError: no such colour\n"
    assert capfd.readouterr().err == warning
    assert messages._line is None


TRAIN = """
import sys, time, torch, sherd
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = sherd.distribute(model, optimizer)
def train():
    for _ in range(40):
        model(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
train()
secret = 6
if len(sys.argv) > 1:
    breakpoint()
    print("hello", input("name? "))
train()
print("done")
"""


@pytest.mark.ranks
def test_a_debugger_under_the_live_display(here, monkeypatch):
    monkeypatch.setenv("SHERD_SPIN", "0")
    (here / "train.py").write_text(TRAIN)
    answers = [(b"(Pdb) ", b"p secret * 7\n"), (b"42", b"c\n"), (b"name? ", b"Ann\n")]
    shown, status = in_terminal([*SHERD, "run", "--live", "train.py", "ask"], answers)
    assert status == 0, shown
    assert "hello Ann" in shown
    last = shown[shown.rindex("done") :]
    assert "step 80" in last  # the last frame stays
    assert "steps/s" in last


FAILS = """
import sys, torch, sherd
model = torch.nn.Linear(1, 1)
model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
sys.exit(3)
"""


@pytest.mark.ranks
def test_a_rank_that_exits_with_a_status_has_not_ended_well(here, monkeypatch):
    monkeypatch.setenv("SHERD_SPIN", "0")
    (here / "train.py").write_text(FAILS)
    assert sherd("run", "--events", "events", "train.py").returncode != 0
    record = load(here / "events")
    assert (record.ended, record.ok, len(record.steps)) == (True, False, 1)
    before = (here / "events" / "events-rank00000.jsonl").read_bytes()
    (here / "train.py").write_text("raise SystemExit(3)")
    assert sherd("run", "--events", "events", "train.py").returncode != 0
    after = (here / "events" / "events-rank00000.jsonl").read_bytes()
    assert after == before, "a run that wrote no events does not end the one before it"


@pytest.mark.ranks
def test_a_run_that_is_watched_without_a_terminal(here, monkeypatch):
    monkeypatch.setenv("SHERD_SPIN", "0")
    (here / "train.py").write_text(TRAIN)
    chosen = ["--events", "events", "--csv", "new/run.csv", "--strategy", "zero1"]
    result = sherd("run", "-n", "2", "--live", *chosen, "train.py")
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["[rank 1] done", "done"]), result.stderr
    assert re.search(r"^sherd run: step \d+, loss", result.stderr, re.MULTILINE)  # the last, if no other
    with (here / "new" / "run.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in range(80)]
    assert sorted(path.name for path in (here / "events").iterdir()) == [
        "events-rank00000.jsonl",
        "events-rank00001.jsonl",
    ]
    assert load(here / "events").start["strategy"] == "zero1"  # of a distribute that names none
