"""Every strategy makes the calls that it made before, and the recorder of calls sees each of them once."""

from __future__ import annotations

import pytest
import torch

from sherd.comm import labelled
from tests.helpers.training import connected
from tests.traces import PROGRAMS, digest, graph, loop, recorded, saved, traces


def some_calls():
    with connected() as c, recorded() as trace:
        with labelled("a test"):
            c.all_reduce(torch.ones(3, 2), op="mean").wait()
        c.all_gather_object({"name": "x" * c.rank})  # two exchanges inside, whose sizes are nobody's business
        c.barrier().wait()
    return trace


def test_calls_are_recorded_once_with_what_they_are_for(ranks):
    expected = [
        "host of 2: all_reduce(float32[3, 2], op='mean') for a test",
        "host of 2: all_gather_object() for the program",
        "host of 2: barrier() for the program",
    ]
    assert ranks(2).run(some_calls) == [expected] * 2


@pytest.mark.parametrize(("program", "world", "seed"), [(loop, 2, 0), (loop, 2, 3), (loop, 3, 24), (graph, 2, 0)])
def test_traces_are_as_saved(ranks, program, world, seed):
    assert (program, world, seed) in PROGRAMS
    expected = saved()
    for name, trace in traces(ranks, program, world, seed).items():
        assert digest(trace) == expected[name], f"{name} has changed; `python -m tests.traces --dump` shows the calls"


@pytest.mark.fuzz
@pytest.mark.parametrize(("program", "world", "seed"), PROGRAMS)
def test_all_traces_are_as_saved(ranks, program, world, seed):
    test_traces_are_as_saved(ranks, program, world, seed)
