"""Ranks of a cluster that die, diverge, come late or leave: named by everyone, on their own host and on others."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

from sherd import CommOptions, SherdError, comm
from sherd.testing import Died, run_ranks
from tests.comm import test_faults, test_under_way
from tests.helpers.hosts import on_hosts

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all", "barrier")


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_rank_is_named_by_everyone(operation, victim):
    arguments = (on_hosts, 4, 2, test_faults.killed_in_the_middle, "cluster", operation, victim)
    results = run_ranks(*arguments, timeout=50, expected_exits={victim: -signal.SIGKILL})
    for rank, result in enumerate(results):
        if rank == victim:
            assert result == Died(-signal.SIGKILL)
            continue
        error, closed, seconds = result
        assert re.search(rf"rank {victim} on \S+ as [ab] \(pid \d+\)", error), error
        assert "can no longer be used" in closed
        assert seconds < test_faults.NOTICE


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("all_reduce", "all_gather"),
        ("all_reduce", "shape"),
        ("all_reduce", "reduction"),
        ("all_reduce", "big"),
        ("root 0", "root 1"),
        ("barrier", "all_gather"),
    ],
)
@pytest.mark.parametrize("local", [1, 2])
def test_different_calls_are_an_error_on_all_sides_with_both_sites(ranks, local, first, second):
    for text in ranks(2 * local).run(on_hosts, local, test_faults.diverging, "cluster", first, second):
        assert "rank 1 on" in text
        assert "rank 0 on" in text or "rank 2 on" in text or "rank 3 on" in text
        assert text.count("test_faults.py:") >= 2
        assert "All ranks must make the same calls" in text


def test_a_message_of_another_shape_is_an_error_on_both_sides(ranks):
    for text in ranks(2).run(on_hosts, 1, test_faults.wrong_message, "cluster"):
        assert "send(float32[3])" in text
        assert "recv(float32[4])" in text


@pytest.mark.parametrize("local", [1, 2])
def test_a_rank_that_does_not_come_is_named_with_what_everyone_last_did(ranks, local):
    results = ranks(2 * local).run(on_hosts, local, test_faults.late, "cluster", 2.0, 4.0)
    for rank in set(range(2 * local)) - {1}:
        text = results[rank][0]
        assert "rank 1 on" in text.partition("did not reach this call")[0], text
        assert "is in all_gather(float32[3]) at" in text
    assert "did not reach this call" in results[1][0] or "left" in results[1][0]  # it hears of it when it comes


def busy_while_another_dies(victim):
    c = comm.connect(CommOptions(transport="cluster", timeout=test_faults.TIMEOUT, warn_after=0.3))
    first, second = c.subgroup([0, 1]), c.subgroup([2, 3])
    c.barrier().wait()
    if c.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    c.all_reduce(torch.ones(300_000))  # under way, and nobody waits for it
    time.sleep(1.0)
    try:
        c.barrier()
    except SherdError as error:
        told = str(error)
    else:
        told = "no error"
    return told, first.all_reduce(torch.ones(3)).wait().tolist() if first and not second else None


@pytest.mark.ranks
def test_a_busy_rank_hears_of_a_death_in_its_next_call_and_other_groups_go_on():
    results = run_ranks(on_hosts, 4, 2, busy_while_another_dies, 3, timeout=50, expected_exits={3: -signal.SIGKILL})
    for told, _ in results[:3]:
        assert re.search(r"rank 3 on \S+ as b \(pid \d+\)", told), told
    assert [total for _, total in results[:2]] == [[2.0] * 3] * 2


@pytest.mark.alone
@pytest.mark.parametrize("local", [1, 2])
def test_a_busy_rank_gets_a_warning_with_its_name_and_no_error(ranks, local):
    results = ranks(2 * local).run(on_hosts, local, test_faults.late, "cluster", 60.0, 2.5)
    assert [text for text, _ in results] == ["no error"] * (2 * local)
    for rank in set(range(2 * local)) - {1}:
        # On a busy machine others may be late for a moment too, and are named then; rank 1 is named last.
        assert results[rank][1], rank
        assert "for rank 1 on" in results[rank][1][-1], "\n".join(results[rank][1])
    assert not results[1][1]


def test_a_rank_that_left_is_named(ranks):
    closed, lost = ranks(2).run(on_hosts, 1, test_faults.leaves_early, "cluster")
    assert "it was closed" in closed
    assert re.search(r"rank 0 on \S+ as a \(pid \d+\) left", lost)


def test_a_codec_that_fails_on_one_rank_is_an_error_on_all(ranks):
    results = ranks(4).run(on_hosts, 2, test_under_way.failing_codec, "cluster")
    assert [name for name, _ in results] == ["PeerLost", "CodecFailed", "PeerLost", "PeerLost"]
    assert all("a bug in the codec" in words for _, words in results)


def test_others_hear_why_a_rank_left(ranks):
    results = ranks(4).run(on_hosts, 2, test_under_way.raises_in_the_block, "cluster")
    assert all("the loss is not a number" in text for text in results)
