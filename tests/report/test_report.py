"""`sherd report`, and the writers for other programs: from events to what people open, in a real browser too."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from sherd.cli import main
from sherd.errors import Unsupported
from sherd.observe import EventStream
from sherd.observe.runs import load
from sherd.report.csv_file import CsvWriter, write_csv
from sherd.report.figures import sections
from sherd.report.html import labels, report
from sherd.report.panels import byte_ticks, runs_of
from sherd.report.tensorboard import TensorBoardWriter
from sherd.report.wording import of_bytes, of_count, of_number, of_ranks, of_seconds
from tests.helpers.browser import BROWSER, WITHOUT, opened
from tests.helpers.fake_runs import FakeRun, write_run
from tests.helpers.processes import python

pytestmark = pytest.mark.pure

plotly = pytest.importorskip("plotly", reason="plotly is not installed (pip install 'sherd[report]')")
in_browser = pytest.mark.skipif(BROWSER is None, reason=WITHOUT)

ALWAYS = {"Loss", "accuracy", "Gradient norm", "Learning rate", "Tokens per second", "Seconds per step", "Step by step"}
ALWAYS |= {"By rank", "Who waits", "By host", "Processes over time", "Bytes per step"}
OF_LAYERS = {"Gradient norm by layer", "Update by layer, over the length of its values"}
PER_RUN = {"Step by step", "By rank", "Who waits", "By host"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A long run and a short one."""
    base = tmp_path_factory.mktemp("runs")
    return [
        write_run(base / "long", FakeRun(world=2, steps=2500, per_host=1, layers=True)),
        write_run(base / "short", FakeRun(world=3, steps=40, strategy="ddp", seed=2, communication=0.3)),
    ]


def panels_of(*paths):
    records = [load(path) for path in paths]
    runs = runs_of(records, [record.name for record in records])
    return [panel for section in sections(runs) for panel in section.panels]


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    return ended.value.code


# ------------------------------------------------------------------------------------------------------- in a browser


@pytest.mark.ranks
@in_browser
def test_every_plot_of_a_run_is_there_with_its_points(folders, tmp_path):
    found = opened(report(folders[:1], tmp_path / "one.html"))
    assert found["problems"] == []
    assert found["requests"] == []
    assert found["width"] <= 1280, "nothing sticks out at the side"
    check_plots(found, panels_of(folders[0]))
    assert {plot["title"] for plot in found["plots"]} == ALWAYS | OF_LAYERS
    check_buttons(found)


@pytest.mark.ranks
@in_browser
def test_every_plot_of_two_runs_side_by_side_in_the_dark(folders, tmp_path):
    page = report(folders, tmp_path / "two.html")
    found = opened(page, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert found["problems"] == []
    assert found["requests"] == []
    check_plots(found, panels_of(*folders))
    titles = [plot["title"] for plot in found["plots"]]
    assert set(titles) == ALWAYS | OF_LAYERS
    # "By rank" is there for time and for memory.
    assert {title: titles.count(title) for title in PER_RUN} == {
        title: 4 if title == "By rank" else 2 for title in PER_RUN
    }
    loss = next(plot for plot in found["plots"] if plot["title"] == "Loss")
    assert {trace["name"] for trace in loss["traces"]} == {
        "long",
        "short",
        "long: held_out_loss",
        "short: held_out_loss",
    }
    assert (found["theme"], found["themeAfter"]) == ("dark", "light")
    assert found["paper"] != found["paperAfter"]


@pytest.mark.ranks
@in_browser
def test_the_browser_tells_of_requests_and_errors(folders, tmp_path):
    page = report(folders[1:], tmp_path / "page.html")
    wrong = '<img src="http://127.0.0.1:9/x.png"><script>console.error("so it is"); missing();</script></main>'
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", wrong), encoding="utf-8")
    problems = " ".join(opened(page)["problems"])
    for words in ("refused: http://127.0.0.1:9", "error: so it is", "missing is not defined"):
        assert words in problems


def check_plots(found, panels):
    assert [plot["title"] for plot in found["plots"]] == [panel.title for panel in panels]
    for plot, panel in zip(found["plots"], panels, strict=True):
        assert plot["visible"], plot["title"]
        assert len(plot["traces"]) == len(panel.data)
        for seen, given in zip(plot["traces"], panel.data, strict=True):
            assert seen["x"] == given["x"], plot["title"]
            assert seen["y"] == given["y"], plot["title"]
            assert 0 < seen["points"] <= 2000
            assert seen["drawn"], f"{plot['title']} drew nothing"


def check_buttons(found):
    before, after = ({plot["title"]: plot for plot in found[key]} for key in ("plots", "after"))
    assert (before["Loss"]["scale"], after["Loss"]["scale"]) == ("linear", "log")
    assert before["Loss"]["words"] == "step"
    assert after["Loss"]["words"] == "minutes since the start"
    assert after["Loss"]["traces"][0]["x"] != before["Loss"]["traces"][0]["x"]
    assert (found["theme"], found["themeAfter"]) == ("light", "dark")


# ---------------------------------------------------------------------------------------------------------- the page


def test_plotly_knows_every_word_of_every_plot(folders):
    from plotly.graph_objects import Figure

    for panel in panels_of(*folders):
        Figure(data=panel.data, layout=panel.layout)  # raises for a property that it does not have


def test_the_page_needs_nothing_from_outside(folders, tmp_path):
    text = report(folders[:1], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|<link[^>]*stylesheet|<script[^>]*src", own)


def test_the_page_says_what_was_run(folders, tmp_path):
    text = report(folders, tmp_path / "page.html").read_text(encoding="utf-8")
    for words in ("zero3", "ddp", "clip_norm=1.0", "train.py --strategy zero3", "AMD EPYC", "4 cores", "torch 2.13.0"):
        assert words in text
    assert "def read_line" in text
    assert text.count("the gradient of &#x27;head.bias&#x27; is zero") == 2, "once per run, not once per rank"


def test_texts_cannot_leave_their_place(tmp_path):
    stream = EventStream(tmp_path / "run", 0)
    stream.emit("run.start", world=1, strategy="</script><script>alert(1)</script>", command=["<b>"])
    stream.emit("step", 0, loss=1.0)
    stream.emit("log", 0, figures={"</script><i>": 1.0}, n=1)
    stream.emit("sample", 0, text="</pre><script>alert(2)</script>", title="<u>")
    stream.close()
    text = report([tmp_path / "run"]).read_text(encoding="utf-8")
    for words in ("<script>alert", "</script><i>", "<u>", "<b>&", "</pre><script>"):
        assert words not in text


def test_a_curve_has_at_most_2000_points_and_its_extremes(folders):
    loss = next(panel for panel in panels_of(folders[0]) if panel.title == "Loss")
    _, values = load(folders[0]).steps.column("loss")
    shown = loss.data[0]["y"]
    assert len(values) == 2500
    assert len(shown) <= 2000
    assert min(shown) == pytest.approx(min(values))
    assert max(shown) == pytest.approx(max(values))


def test_plots_side_by_side_have_the_same_scale(folders):
    for title in PER_RUN - {"By rank"}:
        one, other = [panel for panel in panels_of(*folders) if panel.title == title]
        assert one.layout[one.numbers]["range"] == other.layout[other.numbers]["range"]
        assert one.layout[one.numbers]["range"][1] == max(one.top, other.top)


def test_what_is_not_finite_is_a_gap(tmp_path):
    stream = EventStream(tmp_path, 0)
    stream.emit("run.start", world=1)
    for step, loss in enumerate((1.0, float("nan"), float("inf"), 2.0)):
        stream.emit("step", step, loss=loss)
    stream.close()
    (loss,) = panels_of(tmp_path)
    assert loss.data[0]["y"] == [1.0, None, None, 2.0]
    assert report([tmp_path]).exists()


def test_numbers_without_end_and_texts_like_numbers_have_a_page(tmp_path):
    stream = EventStream(tmp_path, 0)
    huge = 10**400
    stream.emit("run.start", world=1, batch=huge, threads=huge, model={"elements": huge}, machine={"memory": huge})
    stream.emit("run.length", steps=huge)
    stream.emit("sample", text="nan", title="inf")
    stream.emit("log", 0, figures={"tokens": huge, "accuracy": huge, "norm": huge}, n=huge)
    step = {"samples": huge, "root": huge, "lr": [huge], "norm_squared": huge}
    many = ("bytes", "memory", "resident", "seconds")
    for number in range(2):
        stream.emit("step", number, loss=None, **step, **{name: {"private": huge, "data": huge} for name in many})
    stream.close()
    assert "<pre>nan</pre>" in report([tmp_path]).read_text(encoding="utf-8")


def test_a_loss_that_was_not_told_is_called_what_it_is(tmp_path):
    stream = EventStream(tmp_path, 0)
    stream.emit("run.start", world=1)
    stream.emit("step", 0, loss=None, root=0.25)
    stream.close()
    (loss,) = panels_of(tmp_path)
    assert [trace["name"] for trace in loss.data] == ["loss (as passed to backward)"]
    assert "Last loss (as passed to backward)" in report([tmp_path]).read_text(encoding="utf-8")


def test_a_run_without_a_step_has_a_page(tmp_path):
    stream = EventStream(tmp_path, 0)
    stream.emit("error", text="it never got that far")
    stream.close()
    text = report([tmp_path]).read_text(encoding="utf-8")
    assert "No step is complete yet" in text
    assert "it never got that far" in text


def test_many_ranks_and_many_runs(tmp_path):
    paths = [write_run(tmp_path / f"run{n}", FakeRun(world=n, steps=2, per_host=4, tokens=None)) for n in (1, 18, 3)]
    assert report(paths, tmp_path / "out.html").stat().st_size > 1e6
    assert "Samples per second" in {panel.title for panel in panels_of(*paths)}


# ---------------------------------------------------------------------------------------------------- the command line


def test_the_command_prints_where_the_page_is(folders, tmp_path, capsys, monkeypatch):
    assert command(folders[1]) == 0
    assert capsys.readouterr().out.strip() == str(folders[1] / "report.html")
    monkeypatch.chdir(tmp_path)
    assert command(*folders) == 0
    assert capsys.readouterr().out.strip() == "sherd-report.html"
    assert Path("sherd-report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["sherd-report.html"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument"),
        (("{empty}",), "no events in"),
        (("{empty}/nowhere",), "no events in"),
        (("{run}", "{run}/"), "is given twice"),
        (("{run}", "-o", "{empty}/file/x.html"), "cannot write"),
        (("{run}", "-o", "{empty}"), "it is a directory"),
        (("{wrong}",), "line 1: not a sherd event"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folders, tmp_path, capsys, words, said):
    places = {"run": folders[1], "empty": tmp_path / "empty", "wrong": tmp_path / "wrong"}
    for name in ("empty", "wrong"):
        places[name].mkdir()
    (places["empty"] / "file").touch()
    (places["wrong"] / "events-rank00000.jsonl").write_text("{}\n")
    assert command(*(word.format(**places) for word in words)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err


def test_without_plotly_it_says_what_to_install(folders, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert command(folders[1]) == 2
    assert "pip install 'sherd[report]'" in capsys.readouterr().err


@pytest.mark.ranks
def test_help_does_not_import_what_only_a_report_needs():
    code = "import sys, sherd.cli, sherd.cli.report; print('plotly' in sys.modules, 'sherd.report.html' in sys.modules)"
    ended = python(code)
    assert ended.stdout.split() == ["False", "False"]


def test_labels_tell_folders_apart(tmp_path):
    assert labels([tmp_path / "a" / "run"]) == ["run"]
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]


# ----------------------------------------------------------------------------------------------- for other programs


def test_csv_has_every_step_and_columns_that_come_late(tmp_path):
    record = load(write_run(tmp_path / "run", FakeRun(world=2, steps=20)))
    write_csv(record, tmp_path / "out" / "steps.csv")
    with (tmp_path / "out" / "steps.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["step"]) for line in lines] == list(range(20))
    assert [float(line["loss"]) for line in lines] == [row.loss for row in record.steps]
    assert float(lines[3]["seconds.communication"]) == record.steps[3].seconds["communication"]
    assert int(lines[3]["memory.parameters"]) == sum(kinds["parameters"] for kinds in record.steps[3].memory.values())
    assert (lines[7]["skipped"], lines[8]["skipped"]) == ("1", "0")


def test_a_growing_csv_gets_columns_and_figures_that_come_late(tmp_path):
    stream = EventStream(tmp_path, 0)
    stream.emit("run.start", world=1)
    for step in range(3):
        stream.emit("step", step, loss=float(step))
    stream.emit("log", 2, figures={"accuracy": 0.5, "lr": 3.0}, n=1)
    stream.close()
    rows = list(load(tmp_path).steps)
    late = dict(rows[2].figures)
    rows[2].figures.clear()
    with CsvWriter(tmp_path / "steps.csv") as writer:
        for row in rows:
            writer.write(row)
        rows[2].figures.update(late)
    with (tmp_path / "steps.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["accuracy"] for line in lines] == ["", "", "0.5"]
    assert lines[2]["log.lr"] == "3.0"


def test_csv_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        CsvWriter(tmp_path / "file" / "steps.csv")
    with pytest.raises(ValueError, match="cannot write"):
        CsvWriter(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    record = load(write_run(tmp_path / "run", FakeRun(world=2, steps=10)))
    with TensorBoardWriter(tmp_path / "board") as writer:
        for row in record.steps:
            writer.write(row)
        for sample in record.samples:
            writer.write_text(sample)
    board = accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    found = board.Scalars("loss")
    assert [each.step for each in found] == list(range(10))
    assert [each.value for each in found] == pytest.approx([row.loss for row in record.steps])
    assert {"norm", "lr", "seconds/backward", "memory/gradients", "bytes/payload", "held_out_loss"} <= set(
        board.Tags()["scalars"]
    )
    assert any("Generated" in tag for tag in board.Tags()["tensors"])


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Unsupported, match=r"pip install 'sherd\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


# ---------------------------------------------------------------------------------------------------------- wording


def test_numbers_as_people_read_them():
    assert [of_bytes(n) for n in (0, 1, 1536, 98 << 20, 3 << 30)] == [
        "0.00 B",
        "1.00 B",
        "1.50 KiB",
        "98.0 MiB",
        "3.00 GiB",
    ]
    assert [of_seconds(s) for s in (0.0123, 4.5, 75, 7300)] == ["12.3 ms", "4.50 s", "1 min 15 s", "2 h 1 min"]
    assert [of_count(n) for n in (7, 1234, 34_200, 33.7e6)] == ["7", "1,234", "34.2 k", "33.7 M"]
    assert [of_number(n) for n in (None, 1.47218, 3e-7)] == ["\N{EN DASH}", "1.472", "3.000e-07"]
    assert of_ranks([5, 0, 1, 2]) == "0-2, 5"
    assert byte_ticks(100 << 20)["ticktext"][:3] == ["0", "20 MiB", "40 MiB"]
    assert byte_ticks(1.9 * (1 << 20))["ticktext"] == ["0", "0.5 MiB", "1 MiB", "1.5 MiB", "2 MiB"]
    json.dumps(byte_ticks(0.0))
