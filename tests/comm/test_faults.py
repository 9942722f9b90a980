"""Ranks that die, diverge, come late or leave: errors that name them, on every side, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sherd import CommOptions, comm
from sherd.errors import CommClosed, Diverged, PeerLost, RankFailed, SherdError
from sherd.testing import Died, run_ranks
from tests.helpers.log_lines import log_lines

pytestmark = pytest.mark.ranks

TRANSPORTS = ("host", "c10d")
BIG = 3_000_000  # more than all staging chunks hold, so that nobody can be through before the others are
NOTICE = 10.0  # seconds; far below TIMEOUT, far above what it takes (measured by the benchmark, not here)
TIMEOUT = 60.0


def start(c, operation):
    x = torch.ones(BIG - BIG % c.world)
    if operation == "send":
        return c.send(x, (c.rank + 1) % c.world)
    if operation == "recv":
        return c.recv(x, (c.rank + 1) % c.world)
    if operation == "barrier":
        return c.barrier()
    return getattr(c, operation)(x)


def killed_in_the_middle(transport, operation, victim):
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    c.barrier().wait()
    if c.rank == victim:
        if transport == "host" and operation != "barrier":
            start(c, operation)  # part of its contribution is there
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        start(c, operation).wait()
        c.barrier().wait()  # a message between two others goes through
    except PeerLost as error:
        try:
            c.barrier()
        except CommClosed as closed:
            return str(error), str(closed), time.monotonic() - begin
    return "no error"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "operation", ["reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all", "send", "recv", "barrier"]
)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_everyone(transport, operation, victim):
    results = run_ranks(
        killed_in_the_middle, 3, transport, operation, victim, timeout=50, expected_exits={victim: -signal.SIGKILL}
    )
    for rank, result in enumerate(results):
        if rank == victim:
            assert result == Died(-signal.SIGKILL)
            continue
        error, closed, seconds = result
        assert re.search(rf"rank {victim} on \S+ \(pid \d+\)", error), error
        assert "SIGKILL" in error or "reports" in error or "ended" in error, error
        assert "can no longer be used" in closed
        assert seconds < NOTICE


def calls(c, which):
    x = torch.ones(12)
    return {
        "all_reduce": lambda: c.all_reduce(x),
        "all_gather": lambda: c.all_gather(x),
        "shape": lambda: c.all_reduce(torch.ones(3, 4)),
        "dtype": lambda: c.all_reduce(x.double()),
        "reduction": lambda: c.all_reduce(x, op="max"),
        "big": lambda: c.all_reduce(torch.ones(1_000_000)),
        "root 0": lambda: c.broadcast(x, 0),
        "root 1": lambda: c.broadcast(x, 1),
        "barrier": lambda: c.barrier(),
    }[which]()


def diverging(transport, first, second):
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    c.all_reduce(torch.ones(2)).wait()
    try:
        calls(c, second if c.rank == 1 else first).wait()
    except Diverged as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("all_reduce", "all_gather"),
        ("all_reduce", "shape"),
        ("all_reduce", "dtype"),
        ("all_reduce", "reduction"),
        ("all_reduce", "big"),
        ("root 0", "root 1"),
        ("barrier", "all_gather"),
    ],
)
def test_different_calls_are_an_error_on_both_sides_with_both_sites(ranks, transport, first, second):
    for text in ranks(3).run(diverging, transport, first, second):
        assert "rank 0 on" in text or "rank 2 on" in text
        assert "rank 1 on" in text
        assert text.count("test_faults.py:") >= 2
        assert "All ranks must make the same calls" in text
        words = {"all_reduce": "all_reduce(float32[12], sum)", "big": "float32[1000000]", "root 1": "root 1"}
        for name in (first, second):
            assert words.get(name, "") in text


def wrong_message(transport):
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    try:
        if c.rank == 0:
            c.send(torch.ones(3), 1).wait()
        else:
            c.recv(torch.ones(4), 0).wait()
        c.barrier().wait()
    except Diverged as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_of_another_shape_is_an_error_on_both_sides(ranks, transport):
    for text in ranks(2).run(wrong_message, transport):
        assert "send(float32[3])" in text
        assert "recv(float32[4])" in text
        assert text.count("test_faults.py:") == 2


def unchecked():
    c = comm.connect(CommOptions(transport="c10d", check=False))
    c.all_reduce(torch.ones(3)).wait()
    return c.counters.total().control


def test_the_fingerprint_over_c10d_can_be_turned_off(ranks):
    assert ranks(2).run(unchecked) == [0, 0]


def late(transport, timeout, delay):
    with log_lines() as lines:
        c = comm.connect(CommOptions(transport=transport, timeout=timeout, warn_after=0.3))
        c.all_reduce(torch.ones(2)).wait()
        dist.barrier()
        if c.rank == 1:
            time.sleep(delay)
        try:
            c.all_gather(torch.ones(3)).wait()
        except SherdError as error:
            return f"{type(error).__name__}: {error}", lines
        return "no error", lines


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_is_named_with_what_everyone_last_did(ranks, transport):
    results = ranks(3).run(late, transport, 2.0, 4.0)
    for rank in (0, 2):
        text = results[rank][0]
        assert text.startswith("TimedOut") or "did not reach this call within" in text, text
        assert "rank 1 on" in text.partition("did not reach this call")[0]
        assert "all_reduce(float32[2], sum) at" in text  # what rank 1 last did
        assert "is in all_gather(float32[3]) at" in text
    assert "did not reach this call" in results[1][0] or "left" in results[1][0]  # it hears of it when it comes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_busy_rank_gets_a_warning_with_its_name_and_no_error(ranks, transport):
    results = ranks(2).run(late, transport, TIMEOUT, 1.6)
    assert [text for text, _ in results] == ["no error"] * 2
    warned = results[0][1]
    assert 1 <= len(warned) <= 4
    assert "rank 0 on" in warned[0]
    assert "for rank 1 on" in warned[0]
    assert not results[1][1]


def leaves_early(transport):
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    c.barrier().wait()
    if c.rank == 0:
        c.close()
        c.close()
        try:
            c.barrier()
        except CommClosed as error:
            time.sleep(0.3)  # the process lives on: it is the communicator that was left
            return str(error)
    try:
        c.all_reduce(torch.ones(3)).wait()
    except PeerLost as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_left_is_named(ranks, transport):
    closed, lost = ranks(2).run(leaves_early, transport)
    assert "it was closed" in closed
    assert re.search(r"rank 0 on \S+ \(pid \d+\) left", lost)


NOTE = "Asking is collective: ask on every rank"


def asks(transport, how):
    """Rank 0 asks; rank 1 does something else, nothing, or the same in another way."""
    c = comm.connect(CommOptions(transport=transport, timeout=3.0 if how == "late" else TIMEOUT, warn_after=0.3))
    with log_lines() as lines:
        try:
            with comm.labelled("asking", NOTE):
                c.all_gather(torch.ones(2)).wait()  # together: this is over, and no reason for what follows
            if c.rank == 0 or how == "both":
                with comm.labelled("asking", NOTE):
                    c.all_gather(torch.ones(2 + c.rank)).wait()
            elif how == "other":
                c.barrier().wait()
            elif how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "late":
                time.sleep(5)
                c.barrier().wait()
            else:
                c.close()
                time.sleep(0.5)
        except SherdError as error:
            return type(error).__name__, str(error), lines
    return "no error", "", lines


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("how", "kind", "match"),
    [
        (
            "other",
            "Diverged",
            rf"^{NOTE}\. Here ranks made different calls as call \d+: rank 0 on .* at asking; rank 1",
        ),
        (
            "both",
            "Diverged",
            r"^ranks made different calls as call \d+: rank 0 on .* at asking; rank 1 .* at asking\. ",
        ),
        ("left", "PeerLost", rf"^{NOTE}\. rank 1 on \S+ \(pid \d+\) left; it last finished .* at asking \("),
        ("late", "TimedOut", rf"^{NOTE}\. rank 1 on \S+ \(pid \d+\) did not reach this call within"),
    ],
)
def test_a_note_comes_first_where_a_rank_is_alone(ranks, transport, how, kind, match):
    (found, text, lines), (other, words, _) = ranks(2).run(asks, transport, how)
    assert found == kind
    assert re.search(match, text), text
    if kind == "Diverged":
        assert (other, words) == (found, text)
    assert "[note" not in "".join([text, words, *lines])


def test_a_note_is_no_reason_where_a_rank_was_killed():
    results = run_ranks(asks, 2, "host", "killed", timeout=50, expected_exits={1: -signal.SIGKILL})
    assert isinstance(results[1], Died)
    kind, text, _ = results[0]
    assert kind == "PeerLost"
    assert re.search(r"^rank 1 on \S+ \(pid \d+\) .*at asking \(", text), text
    assert NOTE not in text


def exits(transport):
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    c.barrier().wait()
    if c.rank == 1:
        sys.exit(3)
    c.all_reduce(torch.ones(3)).wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_exits_is_named_with_its_code(transport):
    with pytest.raises(RankFailed) as caught:
        run_ranks(exits, 2, transport, timeout=30)
    assert re.search(r"PeerLost: rank 1 on .*SystemExit: 3", caught.value.failures[0]), caught.value.failures


def connects_late(delay):
    if int(os.environ["RANK"]) == 1:
        time.sleep(delay)
    try:
        comm.connect(CommOptions(timeout=1.0)).close()
    except SherdError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_connect_is_named():
    first, second = run_ranks(connects_late, 2, 2.0)
    assert "ranks [1] did not reach the handshake" in first
    assert re.match(r"rank 0 on \S+ \(pid \d+\) reports: rank 0 on .*: ranks \[1\] did not reach the handshake", second)


SCRIPT = """
import sys, time, torch
from sherd import comm
c = comm.connect()
c.all_reduce(torch.ones(3)).wait()
sys.stdout.write("ready\\n")
sys.stdout.flush()
if c.rank == 0:
    time.sleep(600)
c.barrier().wait()
"""


def test_a_signal_to_the_launcher_leaves_nothing_behind(tmp_path):
    launched = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        script = tmp_path / f"waits_for_{number}.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "sherd.cli", "run", "-n", "2", str(script)]
        launched[number] = script, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for number, (script, launcher) in launched.items():
        for _ in range(2):
            assert "ready" in launcher.stdout.readline()
        ranks = processes_running(script)
        assert len(ranks) == 2
        assert any("sherd" in name for pid in ranks for name in mapped(pid))  # memfds are there while it runs
        launcher.send_signal(number)
        assert launcher.wait(timeout=100) == 128 + number
        assert not processes_running(script)


def processes_running(script):
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(script) in words and "sherd.cli" not in words:
            found.append(folder)
    return found


def mapped(process):
    return [line for line in (process / "maps").read_text().splitlines() if "memfd" in line]
