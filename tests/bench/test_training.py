"""The arithmetic of `benchmarks.training`: targets of speed and of memory."""

from __future__ import annotations

import io

import pytest
from benchmarks.training_contenders import OPTIMIZERS, of_training
from benchmarks.training_memory import Weighed, memory_report, needed
from benchmarks.training_report import TARGETS, Measured, training_report, verdict
from rich.console import Console

pytestmark = pytest.mark.pure

MILLION = 10**6


def printed(tables) -> str:
    text = io.StringIO()
    Console(width=200, file=text).print(*tables)
    return text.getvalue()


def test_ranks_need_their_share_and_what_a_process_takes():
    plain = 16 * MILLION + 300
    assert needed(1, MILLION, plain) == plain
    assert needed(8, MILLION, plain) == 16 * MILLION + 8 * 300


def test_memory_is_judged_with_everything_counted():
    plain = Weighed(parameters=MILLION, private=17 * MILLION, files=3 * MILLION)
    fits = Weighed(parameters=MILLION, peak=17.5, private=18 * MILLION, files=6 * MILLION)
    exceeds = Weighed(parameters=MILLION, peak=19.0, private=20 * MILLION, files=6 * MILLION)
    tables = memory_report(2, "98m", (1, 32), {"sherd-zero2": fits, "sherd-zero3": exceeds}, plain)
    rows = [line for line in printed(tables).splitlines() if "everything to needed" in line]
    assert ["1.000" in rows[0], "met" in rows[0]] == [True, True]
    assert ["1.083" in rows[1], "missed" in rows[1]] == [True, True]
    failed = Weighed(failure="rank 0 died: exit code -9")
    assert "not measured" in printed(memory_report(8, "98m", (1, 32), {"sherd-zero2": failed}, plain))
    assert "not measured" in printed(memory_report(2, "98m", (1, 32), {"sherd-zero2": fits}, failed))


def test_every_optimizer_has_targets_of_contenders_that_take_part():
    assert set(TARGETS) == set(OPTIMIZERS)
    named = {name for targets in TARGETS.values() for _, ours, reference, _ in targets for name in (ours, reference)}
    assert named <= set(of_training())
    assert "all-cores" in of_training()


def test_a_workload_that_was_not_measured_has_no_targets():
    times = {"unconnected": 1.0, "torch-ddp": 1.2, "fsdp2": 2.0, "sherd-zero2": 1.0, "all-cores": 0.9}
    measured = {
        "A": {
            name: Measured(seconds=[2 * time, time, time, time], disturbances=[0.0, 0.0])
            for name, time in times.items()
        }
    }
    text = printed(training_report(2, "33.7m", measured, {"A": (2, 128)}, TARGETS["default"]))
    rows = [line.replace(" ", "") for line in text.splitlines()]
    assert any("A│sherdzero2│torchDDP│1.25x│1.20x│missed" in row for row in rows)
    assert any("sherdzero2│1000ms│100%│1.20x│0.90x" in row for row in rows)
    assert not any(row.startswith("│B│") for row in rows)


def test_verdicts():
    assert verdict(1.0, 1.0, "{:.1f}") == verdict(1.0, 1.0, "{:.1f}", most=True) == ("1.0", "met")
    assert verdict(1.1, 1.0, "{:.1f}", most=True) == verdict(1.1, 1.2, "{:.1f}") == ("1.1", "missed")
    assert verdict(None, 1.0, "{:.1f}") == ("", "not measured")
