"""The script of docs/first-script.md: the same numbers at 1, 2 and 3 ranks under every strategy."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.docs.test_examples import ROOT, main_of
from tests.helpers.training import STRATEGIES

SCRIPT = ROOT / "examples" / "first_script.py"
LINE = re.compile(r"epoch \d  loss \d+\.\d{9} of 1501  test \d+\.\d{9}  accuracy \d\.\d{9} of 296")
OPTIONS = ("--dtype=float64", "--epochs=2", "--batch=60")  # one sample is left for the last step, which others repeat


@functools.cache
def alone():
    lines = main_of(SCRIPT, (*OPTIONS, "--strategy=ddp"))
    assert len(lines) == 2 and all(LINE.fullmatch(line) for line in lines), lines
    return lines


@pytest.mark.parametrize(("world", "strategies"), [(1, ("zero3",)), (2, STRATEGIES), (3, ("ddp", "zero3"))])
def test_every_strategy_and_world_prints_the_same_numbers(ranks, world, strategies):
    for strategy in strategies:
        lines, *silent = ranks(world).run(main_of, SCRIPT, (*OPTIONS, "--strategy", strategy))
        assert not any(silent)
        assert len(lines) == len(alone())
        for line, expected in zip(lines, alone(), strict=True):
            here, there = (re.findall(r"[\d.]+", each) for each in (line, expected))
            assert [x for x in here if "." not in x] == [x for x in there if "." not in x]  # counts
            figures = zip(*([float(x) for x in each if "." in x] for each in (here, there)), strict=True)
            assert all(abs(a - b) <= 1.5e-9 for a, b in figures), (strategy, line, expected)  # of the last digit


def test_it_saves_loads_and_writes_for_tensorboard(ranks, tmp_path):
    pytest.importorskip("tensorboard", reason="the script writes for it where it is asked to")
    file = tmp_path / "state.pt"
    options = (*OPTIONS, f"--checkpoint={file}", f"--tensorboard={tmp_path / 'board'}", "--autocast")
    saved, _ = ranks(2).run(main_of, SCRIPT, (*options, "--strategy=zero3"))
    assert len(saved) == 2 and len(list((tmp_path / "board").glob("events.out.tfevents.*"))) == 1
    assert torch.load(file, weights_only=True)["epoch"] == 2
    data, found = file.read_bytes(), []
    for world, strategy in ((1, "zero1"), (3, "ddp"), (2, "zero3")):
        file.write_bytes(data)
        more = ("--dtype=float64", "--epochs=3", "--batch=60", f"--checkpoint={file}", f"--strategy={strategy}")
        lines, *_ = ranks(world).run(main_of, SCRIPT, more)
        assert lines[0] == "goes on after epoch 2 of state.pt" and len(lines) == 2
        found.append([float(x) for x in re.findall(r"\d+\.\d{9}", lines[1])])
    assert all(abs(a - b) <= 1.5e-9 for other in found[1:] for a, b in zip(found[0], other, strict=True)), found
