"""Recipes as a user meets them: through the command line, and as files that were copied."""

from __future__ import annotations

import gzip
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import sherd
from sherd.cli import main
from sherd.observe.runs import load
from sherd.recipes import gpt, vision
from tests.helpers.browser import BROWSER, opened
from tests.helpers.processes import run

pytestmark = pytest.mark.pure

COMMAND = [sys.executable, "-m", "sherd"]
TEXT = b"The quick brown fox jumps over the lazy dog. " * 60
TINY = [
    "--steps",
    "3",
    "--batch",
    "4",
    "--length",
    "16",
    "--width",
    "32",
    "--layers",
    "1",
    "--write",
    "8",
    "--every",
    "2",
]
NETWORK = ["--steps", "3", "--batch", "2", "--width", "4", "--size", "8", "--every", "2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a corpus, in which commands run."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHERD_SPIN", "0")
    monkeypatch.chdir(tmp_path)
    Path("fox.txt").write_bytes(TEXT)
    return tmp_path


def refused(capsys, *words):
    """The one line that bad input is answered with."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    written = capsys.readouterr()
    assert (ended.value.code, written.out) == (2, "")
    assert written.err.startswith("sherd: ") and written.err.count("\n") == 1
    return written.err


def pictures(where, classes=2, each=11):
    """A folder per class, of plain images of one colour."""
    image = pytest.importorskip("PIL.Image")
    for label in range(classes):
        folder = where / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(each):
            image.new("RGB", (12, 9), (label * 200, number, 0)).save(folder / f"{number}.png")


@pytest.mark.ranks
def test_gpt_trains_on_two_ranks_and_its_last_line_is_the_report(here):
    pytest.importorskip("plotly")
    done = run(*COMMAND, "train", "gpt", "--ranks", "2", "--run", "mine", "--corpus", "fox.txt", *TINY)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == str(Path("mine") / "report.html")
    assert Path(lines[-1]).stat().st_size > 100_000
    record = load("mine")
    assert (record.world, record.start["strategy"], record.start["total_steps"]) == (2, "zero3", 3)
    assert [row.samples for row in record.steps] == [8, 8, 8]  # a real loader was counted
    assert all(row.tokens == 8 * 16 for row in record.steps)
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["2", "3"]  # said once, not by every rank
    assert done.stdout.count("It writes:\n\ndef ") == 1
    assert "warning" not in done.stderr.lower()
    if BROWSER:
        found = opened(here / lines[-1])
        assert (found["problems"], found["requests"]) == ([], [])
        loss = next(plot for plot in found["plots"] if plot["title"] == "Loss")
        assert loss["visible"] and loss["traces"][0]["points"] == 3


@pytest.mark.ranks
def test_vision_trains_on_two_ranks_on_a_folder_of_images(here):
    pictures(here / "photos")
    done = run(*COMMAND, "train", "vision", "--ranks", "2", "--images", "photos", "--quiet", *NETWORK)
    assert done.returncode == 0, done.stderr
    assert "18 images of 8 x 8 to train on, 4 held out" in done.stdout
    assert done.stdout.count("held-out accuracy") == 2
    (folder,) = Path("runs").glob("vision-*")
    assert {"loss", "accuracy"} <= load(folder).steps[0].figures.keys()


@pytest.mark.ranks
def test_a_copy_of_a_recipe_runs_by_itself(here):
    shutil.copy(gpt.__file__, "mine.py")
    done = run(*COMMAND, "run", "--strategy", "zero1", "--events", "events", "mine.py", "--corpus", "fox.txt", *TINY)
    assert done.returncode == 0, done.stderr
    assert load("events").start["strategy"] == "zero1"
    assert "It writes:" in done.stdout


@pytest.mark.fuzz
@pytest.mark.ranks
def test_a_copy_of_a_recipe_runs_without_a_launcher(here):
    shutil.copy(gpt.__file__, "mine.py")
    done = run(sys.executable, "mine.py", "--corpus", "fox.txt", *TINY, "--strategy", "ddp")
    assert done.returncode == 0, done.stderr
    assert "It writes:" in done.stdout


@pytest.mark.fuzz  # as tests/cli/test_output.py shows of a small script
@pytest.mark.ranks
def test_a_copy_on_several_ranks_refuses_bad_input_once(here):
    shutil.copy(gpt.__file__, "mine.py")
    done = run(*COMMAND, "run", "-n", "2", "mine.py", "--strategy", "zeor3")
    assert done.returncode == 2
    assert done.stderr.count("gpt: unknown strategy 'zeor3'; did you mean 'zero3'?") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_train_alone_lists_the_recipes(here):
    done = run(*COMMAND, "train")
    assert done.returncode == 0
    first = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert first == ["gpt", "vision"]


@pytest.mark.parametrize("recipe", ["gpt", "vision"])
def test_help_shows_the_options_of_a_recipe_and_of_its_run(recipe, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", recipe, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith(f"usage: sherd train {recipe} ")
    for option in ("--strategy", "--ranks", "--steps", "--batch", "--lr", "--seed", "--run", "--quiet"):
        assert option in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gtp", "no recipe 'gtp'; did you mean 'gpt'?"),
        ("--ranks 2", "the recipe comes before its options"),
        ("gpt --stratgy ddp", "did you mean '--strategy'?"),
        ("gpt --stratgy=ddp", "did you mean '--strategy'?"),
        ("gpt --strategy zer3", "did you mean 'zero3'?"),
        ("gpt zero3", "'zero3' is not an option of gpt"),
        ("gpt --ranks 0", "found '0', expected a whole number from 1"),
        ("gpt --ranks two", "found 'two', expected a whole number from 1"),
        ("gpt --steps 0", "--steps 0: expected more than 0"),
        ("gpt --steps many", "--steps: found 'many', expected a whole number"),
        ("gpt --lr high", "--lr: found 'high', expected a number"),
        ("gpt --steps", "expected one argument"),
        ("gpt --lr nan", "--lr nan: expected more than 0"),
        ("gpt --width 100", "--width 100: expected a multiple of 32"),
        ("gpt --corpus nowhere", "--corpus nowhere: there is no such file or directory"),
        ("gpt --corpus empty", "--corpus empty: found no text in 0 files; those with NUL bytes are skipped"),
        ("gpt --corpus fox.txt --batch 1000 --ranks 2", "a step takes 2000: write a smaller --batch"),
        ("gpt --corpus fox.txt --batch 1 --run fox.txt", "--run 'fox.txt' is a file; name a directory"),
        ("gpt --corpus fox.txt --batch 1 --run full", "--run 'full' is not empty"),
        ("vision --model resnet5", "invalid choice: 'resnet5'"),
        ("vision --images nowhere", "--images nowhere: there is no such directory"),
        ("vision --images empty", "found 0 folders and 0 images"),
        ("vision --batch 1000000", "a step takes"),
        ("vision --size 0", "--size 0: expected more than 0"),
        ("vision --workers -1", "--workers -1: expected 0 or more"),
    ],
)
def test_bad_input_is_one_line(here, capsys, words, said):
    (here / "empty").mkdir()
    (here / "full").mkdir()
    (here / "full" / "something").touch()
    assert said in refused(capsys, *words.split())
    assert not Path("runs").exists()


def test_no_images_at_all_says_where_to_get_some(here, capsys, monkeypatch):
    monkeypatch.setattr(vision, "FASHION", here / "nothing")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "apt-get install dataset-fashion-mnist" in refused(capsys, "vision")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "pip install pillow" in refused(capsys, "vision", "--images", ".")


def test_a_file_that_is_no_image_is_named(here):
    pictures(here / "photos")
    (here / "photos" / "class1" / "1.png").write_text("not an image")
    with pytest.raises(sherd.ConfigError, match=r"1\.png cannot be read as an image"):
        vision.folder(here / "photos", 8)


def test_images_of_a_folder_keep_colours_and_classes(here):
    pictures(here / "photos", classes=2, each=11)
    learned, held_out = vision.folder(here / "photos", 8)
    assert (len(learned), len(held_out), learned.classes) == (18, 4, 2)
    image, label = learned[9]
    assert (image.shape, label) == ((3, 8, 8), 1)
    assert image[0].mean().item() == pytest.approx((200 / 255 - 0.5) / 0.5, abs=1e-6)


def test_fashion_mnist_is_read_where_the_package_puts_it(here, monkeypatch):
    """Two images in the format of the files, whose header has 16 and 8 bytes."""
    pixels = bytes(range(256)) * 6 + bytes(32)
    (here / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + pixels))
    (here / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes([9, 4])))
    monkeypatch.setattr(vision, "FASHION", here)
    images = vision.fashion("t10k", None)
    assert (len(images), images.channels, images.size) == (2, 1, 28)
    image, label = images[1]
    assert label == 4
    assert image.flatten()[0].item() == pytest.approx((pixels[784] / 255 - 0.5) / 0.5)
    assert vision.fashion("t10k", 14)[0][0].shape == (1, 14, 14)


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_the_networks_have_as_many_parameters_as_published(name, parameters):
    with torch.device("meta"):
        network = vision.ResNet(name, channels=3, classes=1000, large=True)
        assert sum(p.numel() for p in network.parameters()) == parameters
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_bigram_entropy_of_texts_that_are_known():
    assert gpt.bigram_entropy(torch.tensor(list(b"abababab"), dtype=torch.uint8)) == pytest.approx(0)
    # After an "a" comes "a" or "b", equally often; after a "b" always "a": of 6 pairs, 4 begin with "a".
    text = torch.tensor(list(b"aabaaba"), dtype=torch.uint8)
    assert gpt.bigram_entropy(text) == pytest.approx(4 / 6 * math.log(2))


def pieces(windows):
    return [windows[index] for index in range(len(windows))]


def test_windows_cover_a_text_and_a_few_of_them_its_whole_length():
    text = bytes(range(101))
    whole = pieces(gpt.Windows(text, 10))
    assert [x[0].item() for x, _ in whole] == list(range(0, 100, 10))
    assert all(torch.equal(x + 1, y) for x, y in whole)
    assert [x[0].item() for x, _ in pieces(gpt.Windows(text, 10, most=4))] == [0, 25, 50, 75]
    assert len(gpt.Windows(b"", 10)) == 0


def held_out(strategy):
    torch.manual_seed(0)
    model = gpt.Gpt(32, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    judges = DataLoader(gpt.Windows(TEXT, 100), 4)  # 26 sequences: two ranks repeat none or some
    model, optimizer, judges = sherd.distribute(model, optimizer, judges, strategy=strategy)
    return len(judges.dataset), gpt.held_out_loss(model, judges)


@pytest.mark.parametrize("world", [2, 3])
def test_every_held_out_sequence_counts_once(ranks, world):
    torch.manual_seed(0)
    model = gpt.Gpt(32, 1).double()
    with torch.no_grad():
        alone = [gpt.loss_of(model, x[None], y[None]).item() for x, y in pieces(gpt.Windows(TEXT, 100))]
    for count, loss in ranks(world).run(held_out, "zero3"):
        assert count == len(alone) == 26
        assert loss == pytest.approx(sum(alone) / len(alone), rel=1e-9)
