"""`benchmarks.convergence` trains, counts bytes without those of evaluation, and draws what it found."""

from __future__ import annotations

import argparse

import pytest
from benchmarks import convergence
from benchmarks.line_plot import Curve, line_plot


@pytest.mark.ranks
def test_a_few_steps_of_every_strategy(monkeypatch):
    monkeypatch.setattr(convergence, "RANKS", 2)
    monkeypatch.setattr(convergence, "EVERY", 4)
    arguments = argparse.Namespace(steps=8, look_every=4)
    found = {name: convergence.run(strategy, 0, arguments) for name, strategy in convergence.strategies(8, 0.7).items()}
    assert all([step for step, _ in each.held_out] == [4, 8] for each in found.values())
    ddp, diloco, gossip = (found[name].payload for name in ("ddp", "diloco", "gossip"))
    assert ddp == pytest.approx(4 * diloco, rel=0.01), "two exchanges of parameters, eight of gradients"
    assert 0 < gossip <= ddp


@pytest.mark.pure
def test_a_plot_has_every_curve_and_its_name():
    picture = line_plot("Losses", "steps", "loss", [Curve("a < b", [(0, 3.0), (10, 1.0)]), Curve("c", [(0, 2.0)])])
    assert picture.count("<polyline") == 2 and "a &lt; b" in picture and picture.startswith("<svg")
    with pytest.raises(ValueError, match="no points"):
        line_plot("Losses", "steps", "loss", [])
