"""`benchmarks.convergence` trains, counts bytes without those of evaluation, and draws what it found."""

from __future__ import annotations

import argparse
import json

import pytest
from benchmarks import convergence


@pytest.mark.ranks
def test_a_small_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "TUNED", tmp_path / "rate.json")
    (tmp_path / "rate.json").write_text(json.dumps({"outer_lr": 0.5}))
    arguments = argparse.Namespace(
        only=["ddp", "diloco"], steps=9, every=4, ranks=2, seed=0, evaluations=3, into=tmp_path, pictures=tmp_path
    )
    convergence.compare(arguments)
    _, ddp, diloco = (tmp_path / "convergence.txt").read_text().splitlines()[1:]
    assert "outer lr 0.5" in capsys.readouterr().out
    assert float(ddp.split()[-1]) == 1.0
    assert float(diloco.split()[-1]) == pytest.approx(9 / 3, rel=0.02)  # a summed step and two exchanges
    assert "polyline" in (tmp_path / "convergence-diloco.svg").read_text()


@pytest.mark.pure
def test_the_rate_rises_and_falls():
    rates = [convergence.rate(step, 1000) for step in range(1000)]
    assert max(rates) == pytest.approx(1.0, abs=0.01) and rates.index(max(rates)) < 60
    assert rates[0] == pytest.approx(1 / 50) and rates[-1] == pytest.approx(0.1, abs=0.01)
