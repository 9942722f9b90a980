"""Progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sherd
from sherd import ConfigError, observe
from sherd.api.helpers import bars
from sherd.testing import run_ranks
from tests.helpers.loaders import Pairs
from tests.helpers.training import network, sgd

pytestmark = pytest.mark.pure


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes as the test says."""
    now = [0.0]
    monkeypatch.setattr(bars, "clock", lambda: now[0])
    monkeypatch.setattr(bars, "_line_at", -math.inf)
    return now


def test_a_line_every_ten_seconds_where_there_is_no_terminal(clock, capsys):
    loader = DataLoader([(torch.tensor(n), n) for n in range(100)], batch_size=2)
    assert len(sherd.progress(loader)) == 50
    for x, y in sherd.progress(loader, desc="epoch 1"):
        assert len(x) == len(y) == 2
        clock[0] += 4.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "epoch 1: 3 of 50, 6%, 4.0 s each, 3 min 08 s left" and len(lines) == 16
    for _ in sherd.progress(iter(range(300))):
        for _ in sherd.progress(range(10), total=20):
            clock[0] += 0.01
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) in (2, 3)  # 30 s, whichever loop is asked
    with pytest.raises(TypeError, match="has no length"):
        len(sherd.progress(iter(range(3))))


@pytest.mark.parametrize("leave", ["end", "break", "error"])
def test_a_bar_on_a_terminal(monkeypatch, leave):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with contextlib.suppress(ZeroDivisionError):
        for outer in sherd.progress(range(2), desc="epochs"):
            for inner in sherd.progress(range(3), desc="steps"):
                if leave == "error" and inner:
                    raise ZeroDivisionError
                if leave == "break" and inner:
                    break
            if leave == "break" and outer:
                break
    assert bars._display is None and bars._loops == []
    shown = terminal.getvalue()
    assert "epochs" in shown and "steps" in shown
    if leave == "end":
        assert "2/2" in shown


def silent():
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        total = sum(sherd.progress([1, 2, 3]))
    return total, err.getvalue()


def test_other_ranks_are_silent(ranks):
    assert ranks(2).run(silent) == [(6, "")] * 2


def recorded(folder):
    os.environ["SHERD_EVENTS"] = str(folder)
    model = network()
    optimizer, loader = sgd(model), DataLoader(Pairs(12), 2)
    sherd.distribute(model, optimizer, loader, strategy="ddp", accumulate=2)
    for _ in sherd.progress(range(2)):
        for x, y in sherd.progress(loader):
            nn.functional.mse_loss(model(x.float()), y.float()).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks
def test_events_hear_how_many_steps_there_will_be(tmp_path):
    run_ranks(recorded, 1, tmp_path)
    lengths = [event.fields["steps"] for event in observe.read(tmp_path) if event.kind == "run.length"]
    steps = sum(event.kind == "step" for event in observe.read(tmp_path))
    assert lengths == [6, 6] and steps == 6


def test_a_description_is_text_and_no_markup(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert sum(sherd.progress([1, 2], desc="[train] [/x]")) == 3
    assert "[train] [/x]" in terminal.getvalue()


class Forks:
    """It would fork workers when it is asked for an iterator."""

    def __iter__(self):
        assert bars._display is None
        return iter(range(3))


def test_workers_start_before_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = sherd.progress(Forks(), total=numpy.int64(3))
    assert len(bar) == 3 and list(bar) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((3,), "something to loop over"), (([1], -1), "how many items"), (([1], 1.0), "how many items")],
)
def test_what_cannot_be_shown_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        sherd.progress(*arguments)
