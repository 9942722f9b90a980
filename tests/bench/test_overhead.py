"""The arithmetic of `benchmarks.overhead`, and that every contender trains the same model."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
from benchmarks import overhead
from benchmarks.overhead_contenders import PLAIN, SHERD, TORCH_DDP, optimizer_of
from benchmarks.overhead_measuring import Measuring, slowest_median
from benchmarks.overhead_networks import NETWORKS
from benchmarks.overhead_report import figures, summary, tables_of
from benchmarks.overhead_sections import SECTIONS, Effort, Measured, Measurement, Result
from rich.console import Console

pytestmark = pytest.mark.pure

DEEP, SHALLOW = "gpt-1.2m-deep", "gpt-1.2m"


def measurement(section: str, network: str, optimizer: str = "AdamW", tensors: int = 100, **medians: list[float]):
    contenders = {name.replace("_", "-"): Measured(medians=times, cpu_medians=times) for name, times in medians.items()}
    result = Result(network, optimizer, parameters=10**6, tensors=tensors, steps=1, contenders=contenders)
    return Measurement(section, rounds=3, turns=1, results=[result], disturbances=[0.0])


def by_contender(found: Measurement):
    return {figure.contender: figure for figure in figures(found)}


def test_a_step_is_as_long_as_the_slowest_rank_s_median():
    assert slowest_median([[[1.0, 9.0], [2.0, 2.0]], [[1.0], [2.0]]]) == 2.0  # two turns of two ranks
    assert slowest_median([[[1.0, 3.0, 1.0], [1.0, 1.0, 3.0]]]) == 1.0  # each step's slowest would give 3


def test_best_rounds_are_compared():
    found = measurement("4-ranks", SHALLOW, torch_ddp=[5.0, 2.0, 3.0], sherd_zero2=[2.0, 4.0, 2.5])
    assert figures(found)[0].measured == 1.0


def test_the_lesser_of_two_targets_holds():
    near = measurement("2-ranks", SHALLOW, plain=[1.0], torch_ddp=[1.05], sherd_ddp=[1.02])
    assert by_contender(near)["sherd-ddp"].target == pytest.approx(0.97 * 1.05)
    assert by_contender(near)["sherd-ddp"].met
    far = measurement("2-ranks", SHALLOW, plain=[1.0], torch_ddp=[2.0], sherd_ddp=[1.9])
    assert by_contender(far)["sherd-ddp"].target == 1.1
    assert by_contender(far)["sherd-ddp"].met is False


def test_many_tensors_ask_more_of_zero2():
    times = {"plain": [1.0], "torch_ddp": [1.25], "sherd_zero2": [1.0], "sherd_zero3": [1.0]}
    many, few = (by_contender(measurement("2-ranks", name, **times)) for name in (DEEP, SHALLOW))
    assert many["sherd-zero2"].target == 1.3 and many["sherd-zero2"].met is False
    assert few["sherd-zero2"].target == many["sherd-zero3"].target == 1.1 and few["sherd-zero2"].met


def test_a_world_of_one_may_add_some_time_per_tensor():
    found = measurement("1-rank", SHALLOW, "fused AdamW", tensors=200, plain=[0.010], sherd=[0.0104])
    (figure,) = figures(found)
    assert figure.target == 500.0 and figure.measured == pytest.approx(400) and figure.met
    found = measurement("1-rank", SHALLOW, "SGD with momentum", tensors=100, plain=[0.010], sherd=[0.0104])
    assert figures(found)[0].met is False
    found = measurement("1-rank", SHALLOW, "AdamW", plain=[0.97], sherd=[1.0])
    assert figures(found)[0].measured == pytest.approx(0.97) and figures(found)[0].unit == "times the plain loop"


def test_what_failed_is_not_measured():
    found = measurement("2-ranks", SHALLOW, plain=[1.0], torch_ddp=[1.0], sherd_ddp=[])
    found.results[0].contenders["sherd-ddp"].failure = "rank 1 died"
    assert figures(found)[0].met is None
    assert summary([found]) == "targets met: 0, missed: 0, not measured: 1"
    printed = io.StringIO()
    Console(width=130, file=printed).print(*tables_of(found))
    assert "rank 1 died" in printed.getvalue() and "per rank" in printed.getvalue()


def test_sections_are_kept_that_were_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "RESULTS", tmp_path)
    old = [measurement(name, SHALLOW, torch_ddp=[1.0], sherd_ddp=[1.0]) for name in ("4-ranks", "accumulation")]
    assert overhead._with_saved(old) == old
    (tmp_path / "overhead.json").write_text(json.dumps([overhead._saved(one) for one in old]))
    new = measurement("4-ranks", SHALLOW, torch_ddp=[2.0], sherd_ddp=[1.0])
    assert overhead._with_saved([new]) == [new, old[1]]
    assert overhead.loaded(json.loads(json.dumps(asdict(new)))) == new


def test_networks_are_what_their_titles_say():
    sizes = {name: [p.numel() for p in network.new().parameters()] for name, network in NETWORKS.items()}
    assert {name: len(tensors) for name, tensors in sizes.items()} == {
        "gpt-0.4m": 40,
        "gpt-1.2m-deep": 292,
        "gpt-1.2m": 76,
        "gpt-3.7m": 76,
        "resnet18": 62,
        "mlp-3000": 3000,
    }
    millions = {name: round(sum(tensors) / 1e6, 1) for name, tensors in sizes.items()}
    assert millions | {"gpt-1.2m": 1.2} == {
        "gpt-0.4m": 0.4,
        "gpt-1.2m-deep": 1.2,
        "gpt-1.2m": 1.2,
        "gpt-3.7m": 3.7,
        "resnet18": 11.2,
        "mlp-3000": 0.1,
    }
    decaying, others = optimizer_of(NETWORKS["gpt-0.4m"].new(), "AdamW").param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(others["params"]) == 40


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param("2-ranks", marks=pytest.mark.fuzz), "1-rank", "accumulation"])
def test_every_contender_trains_the_same(name, monkeypatch):
    monkeypatch.setitem(SECTIONS, name, replace(SECTIONS[name], together=True))  # in two processes instead of eight
    quiet = Console(file=io.StringIO())
    found = Measuring(name, ["gpt-0.4m"], Effort(rounds=1, turns=1, steps=1, timeout=100.0), quiet).run()
    assert [result.optimizer for result in found.results] == list(SECTIONS[name].optimizers)
    for result in found.results:
        failures = {one: measured.failure for one, measured in result.contenders.items() if measured.failure}
        assert not failures, (failures, found.details)
        rounds = SECTIONS[name].more_rounds
        assert all(len(one.medians) == len(one.cpu_medians) == rounds for one in result.contenders.values())
        reference = result.contenders[PLAIN if name == "1-rank" else TORCH_DDP].loss
        losses = {one: measured.loss for one, measured in result.contenders.items()}
        if name == "2-ranks":  # that the comparison can fail: this one does not communicate
            assert losses.pop(PLAIN) != pytest.approx(reference, rel=1e-6)
        assert losses == pytest.approx(dict.fromkeys(losses, reference), rel=1e-6)
    assert all(figure.met is not None for figure in figures(found))


@pytest.mark.ranks
def test_a_contender_that_does_not_answer_is_left_out():
    measuring = Measuring("1-rank", ["gpt-0.4m"], Effort(1, 1, 1, timeout=-1.0), Console(file=io.StringIO()))
    found = measuring.run()
    for result in found.results:
        for name in (PLAIN, SHERD):
            assert "no answer of rank 0 within -1 s" in str(result.contenders[name].failure)
    assert not measuring._groups


def test_a_world_of_one_is_printed_with_its_noise():
    found = measurement("1-rank", SHALLOW, "fused AdamW", plain=[0.0100, 0.0103], sherd=[0.0104, 0.0110])
    printed = io.StringIO()
    Console(width=130, file=printed).print(*tables_of(found))
    (row,) = [line.replace(" ", "") for line in printed.getvalue().splitlines() if "fused AdamW" in line]
    assert row.endswith("│10.00ms│10.40ms│0.96x│+550us│300us│<=300us│missed│")
