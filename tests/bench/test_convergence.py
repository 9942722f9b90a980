"""`benchmarks.convergence` trains, counts bytes without those of evaluation, and draws what it found."""

from __future__ import annotations

import pytest
from benchmarks import convergence
from benchmarks.line_plot import Curve, line_plot


@pytest.mark.ranks
def test_a_few_steps_of_every_strategy(ranks, monkeypatch):
    monkeypatch.setattr(convergence, "RANKS", 2)
    monkeypatch.setattr(convergence.sherd, "launch", lambda function, world, *args: ranks(world).run(function, *args))
    monkeypatch.setattr(convergence, "EVERY", 4)
    found = {name: convergence.run(name, setting, 0, 8, 4) for name, setting in convergence.CHOSEN.items()}
    assert all([step for step, _ in each.held_out] == [4, 8] for each in found.values())
    ddp, diloco, gossip = (found[name].payload for name in ("ddp", "diloco", "gossip"))
    assert ddp == pytest.approx(4 * diloco, rel=0.01), "two exchanges of parameters, eight of gradients"
    assert 0 < gossip <= ddp


@pytest.mark.pure
def test_each_number_goes_along_its_grid_while_that_is_better(monkeypatch):
    monkeypatch.setattr(convergence, "GRIDS", {"lr": (1.0, 2.0, 4.0, 8.0), "outer_lr": (0.5, 0.7, 1.0)})
    asked = []

    def judge(setting):
        asked.append(setting)
        return abs(setting.lr - 4.0) + abs((setting.outer_lr or 0.0) - 0.5)

    tried = convergence.choose(convergence.Setting(1.0, 1.0), judge)
    assert min(tried, key=tried.get) == convergence.Setting(4.0, 0.5)
    assert asked == list(tried) and len(asked) == 6, "none twice: four rates, two more outer rates"
    assert list(convergence.choose(convergence.Setting(4.0), judge)) == [
        convergence.Setting(lr) for lr in (4.0, 8.0, 2.0)
    ], "what a strategy does not have is not chosen"


@pytest.mark.pure
def test_what_was_chosen_is_on_the_grids():
    for setting in convergence.CHOSEN.values():
        for number, grid in convergence.GRIDS.items():
            assert getattr(setting, number) in (None, *grid), f"{number}: --choose could not begin"


@pytest.mark.pure
def test_a_plot_has_every_curve_and_its_name():
    picture = line_plot("Losses", "steps", "loss", [Curve("a < b", [(0, 3.0), (10, 1.0)]), Curve("c", [(0, 2.0)])])
    assert picture.count("<polyline") == 2 and "a &lt; b" in picture and picture.startswith("<svg")
    with pytest.raises(ValueError, match="no points"):
        line_plot("Losses", "steps", "loss", [])
