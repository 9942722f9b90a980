"""The parts of the host transport by themselves, in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sherd import CommOptions
from sherd.comm import calls
from sherd.comm.codec import Cast
from sherd.comm.host import futex
from sherd.comm.host.board import Board, State, progress
from sherd.comm.host.cores import cores, spins_pay
from sherd.comm.host.joining import rendezvous
from sherd.comm.host.joining.rendezvous import meet, unsupported_reason
from sherd.comm.host.memory import STAGED, SharedBlock, SharedMemory, new_memory
from sherd.comm.host.transfer.staging import Geometry, Staging
from sherd.comm.meeting.peers import Peers
from sherd.errors import ConfigError, PeerLost, TimedOut
from tests.helpers.processes import python

pytestmark = pytest.mark.pure


def block(nbytes):
    fd = new_memory("test", nbytes)
    try:
        return SharedBlock(fd)
    finally:
        os.close(fd)


def test_this_machine_is_supported():
    assert unsupported_reason() is None


def test_a_segment_cannot_shrink_under_its_users():
    fd = new_memory("test", 5000)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_two_mappings_of_a_segment_are_one_memory():
    fd = new_memory("test", 4096)
    one, two = SharedBlock(fd), SharedBlock(fd)
    os.close(fd)
    one.tensor(64, 3, torch.float64).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert two.tensor(64, 3, torch.float64).tolist() == [1.0, 2.0, 3.0]
    assert one.tensor(0, 0, torch.float32).numel() == 0


def test_a_futex_wakes_and_times_out_and_sees_a_changed_word():
    memory = block(4096)
    words = memory.words()
    start = time.monotonic()
    futex.wait(memory.address, 0, 0.05)
    assert time.monotonic() - start >= 0.04
    words[0] = 7
    futex.wait(memory.address, 0, 60)  # the word is not 0: returns at once
    sleeper = threading.Thread(target=futex.wait, args=(memory.address, 7, 60))
    sleeper.start()
    while sleeper.is_alive():  # a wake before the sleeper sleeps is lost; here nothing looks again
        futex.wake(memory.address)
        time.sleep(0.005)
    futex.fence()
    with pytest.raises(OSError, match="futex"):
        futex.wait(12345 + 4096 * 3, 0, 0.01)


@given(
    numel=st.integers(0, 10**7),
    pieces=st.integers(1, 64),
    chunk=st.integers(1, 256).map(lambda n: n * 4096),
    itemsize=st.sampled_from((1, 2, 4, 8)),
    codec=st.sampled_from((None, Cast(torch.bfloat16), Cast(torch.float64))),
)
def test_a_geometry_holds_everything_and_fits(numel, pieces, chunk, itemsize, codec):
    g = Geometry.fit(numel, pieces, chunk, itemsize, codec)
    used = codec.wire_bytes(g.elements) if codec else g.elements * itemsize
    assert used <= g.stride
    assert g.stride * pieces <= chunk
    assert g.elements * g.chunks >= numel
    assert g.elements * (g.chunks - 1) < max(numel, 1)


def test_a_chunk_without_room_says_what_to_write():
    with pytest.raises(ConfigError, match="chunk_bytes="):
        Geometry.fit(10, 100, 4096, 4, None)


def test_a_chunk_is_free_again_when_everybody_has_read_it():
    boards = [Board(memory, r, 2) for memory in [block(Board.nbytes(2))] for r in range(2)]
    ring = Staging(block(Staging.nbytes(2, 4096, 2)), boards[0], 4096, 2)
    for number in (1, 2):
        assert ring.free_after() == 0
        ring.take(progress(number, 1))
    assert ring.free_after() == progress(1, 1)
    boards[0].raise_flag(boards[0].done[0], progress(5))
    boards[1].raise_flag(boards[1].done[1], progress(1))
    assert ring.free_after() == progress(1, 1)
    boards[1].raise_flag(boards[1].done[1], progress(1, 1))
    assert ring.free_after() == 0


@pytest.mark.parametrize("flags", ["posted", "done"])
def test_a_sleeper_is_woken_once_by_whoever_raises_the_last_flag_it_needs(flags):
    memory = block(Board.nbytes(4))
    boards = [Board(memory, r, 4) for r in range(4)]
    mine, words = getattr(boards[2], flags), boards[0].words
    needed = [mine[r] for r in (0, 1, 3)]
    bed = boards[0]._sleepers._beds[2]
    sleeper = threading.Thread(target=boards[2].sleep, args=(needed, progress(7, 1), 60))
    sleeper.start()
    while not boards[0]._sleepers.asleep[2]:
        time.sleep(0.001)
    other = boards[0].done if flags == "posted" else boards[0].posted
    for r in (0, 1, 3):
        boards[r].raise_flag(other[r], progress(9))  # of the other kind
        boards[r].raise_flag(mine[r], progress(7))  # not far enough
    for r in (3, 0):
        boards[r].raise_flag(mine[r], progress(8))
        assert words[bed] == 0
    boards[1].raise_flag(mine[1], progress(7, 1))
    assert words[bed] == 1
    sleeper.join()
    boards[2].sleep(needed, progress(7, 1), 60)  # all are there: returns at once


def test_a_sleeper_that_waits_for_a_message_is_woken_by_that_alone():
    memory = block(Board.nbytes(2))
    boards = [Board(memory, r, 2) for r in range(2)]
    sleeper = threading.Thread(target=boards[1].sleep, args=((boards[1].sent(0, 1),), progress(1, 1), 60))
    sleeper.start()
    while not boards[0]._sleepers.asleep[1]:
        time.sleep(0.001)
    boards[0].raise_flag(boards[0].posted[0], progress(5))
    boards[0].raise_flag(boards[0].taken(1, 0), progress(5))
    assert boards[0].words[boards[0]._sleepers._beds[1]] == 0
    boards[0].raise_flag(boards[0].sent(0, 1), progress(1, 1))
    sleeper.join()


def test_the_board_knows_who_writes_each_word_and_what_everyone_did():
    memory = block(Board.nbytes(5))
    boards = [Board(memory, r, 5) for r in range(5)]
    for r in range(5):
        assert boards[0].writer(boards[0].posted[r]) == boards[0].writer(boards[0].done[r]) == r
        for to in range(5):
            assert boards[0].writer(boards[0].sent(r, to)) == r
            assert boards[0].writer(boards[0].taken(r, to)) == to
    assert boards[1].last_activity(3) == "has made no call yet"
    call = calls.Call("all_reduce", "all_reduce(float32[3], sum)")
    with calls.labelled("bucket 7 of the backward pass"):
        boards[3].write_header(9, call, calls.call_site(), (-1, 0), 4)
    boards[3].raise_flag(boards[3].posted[3], progress(9, 1))
    assert "is in all_reduce(float32[3], sum) at bucket 7 of the backward pass (call 9" in boards[1].last_activity(3)
    boards[3].raise_flag(boards[3].done[3], progress(9, 1))
    assert boards[1].last_activity(3).startswith("last finished")
    assert boards[1].location(3, 9) == (-1, 0, 4)
    assert boards[0].all_well()
    boards[2].leave_word(State.LEFT, "goodbye")
    boards[2].leave_word(State.DIVERGED, "too late")
    assert boards[0].failures() == {2: (State.LEFT, "goodbye")}
    assert not boards[0].all_well()


def test_more_call_texts_than_fit_are_overwritten_in_turn():
    board = Board(block(Board.nbytes(1)), 0, 1)
    for i in range(700):
        with calls.labelled(f"line {i}"):
            board.write_header(i + 1, calls.Call("x", f"call {i}"), calls.call_site(), (-1, 0), 0)
            assert board.call_text(0, i + 1) == f"call {i} at line {i}"


def test_labels_that_change_with_every_step_do_not_pile_up():
    for i in range(calls.MAX_TEXTS + 10):
        with calls.labelled(f"step {i}"):
            site = calls.call_site()
            assert calls.site_text(site) == f"step {i}"
    assert len(calls._texts) <= calls.MAX_TEXTS
    assert calls.site_text((-1, 12345)) == "a line that is no longer remembered"


def test_shared_memory_finds_the_segment_of_a_tensor():
    memory, first, second = SharedMemory(), block(8192), block(4096)
    assert memory.find(torch.ones(3)) is STAGED
    memory.add(first, common=False)
    memory.add(second, common=True)
    inside = first.tensor(4000, 100, torch.float32)
    assert memory.find(inside[10:]) == (0, 4040)
    assert memory.find(second.tensor(0, 5, torch.int64)) == (1, 0)
    assert memory.find(torch.ones(3)) == STAGED
    assert memory.find_common(second.tensor(8, 5, torch.int64)) is not None
    assert memory.find_common(inside) is None
    assert memory.view((0, 4040), 5, torch.float32).data_ptr() == inside[10:].data_ptr()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "was killed by SIGTERM"),
    ],
)
@pytest.mark.parametrize("collected", [False, True])
def test_how_a_process_ended_is_known_where_the_kernel_tells(code, said, collected):
    child = subprocess.Popen([sys.executable, "-S", "-c", f"input(); {code}"], stdin=subprocess.PIPE)
    peers = Peers()
    peers.add(4, child.pid, os.pidfd_open(child.pid))
    assert peers.dead() == []
    child.stdin.write(b"\n")
    child.stdin.close()
    if collected:
        child.wait()
    while not peers.dead():
        time.sleep(0.005)
    assert peers.dead() == [4]
    # Once its parent has collected it, only Linux 6.15 and later still know.
    assert peers.how_it_ended(4) in ({said, "ended"} if collected else {said})
    child.wait()
    other = peers.renumbered({4: 0, 1: 1})
    peers.close()
    assert other.dead() == [0]
    other.close()
    assert peers.dead() == []


class Meeting:
    """Ranks that are threads of this process: an exchange between them, and what each found."""

    def __init__(self, world, labels):
        self._barrier = threading.Barrier(world)
        self._values = {}
        self.found = [None] * world
        threads = [threading.Thread(target=self._rank, args=(r, label)) for r, label in enumerate(labels)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _rank(self, rank, label):
        def exchange(key, value):
            self._values[key, rank] = value
            self._barrier.wait()
            return [self._values[key, r] for r in range(len(self.found))]

        self.found[rank] = meet(rank, rank, exchange, CommOptions(host=label))


def test_ranks_find_out_who_shares_their_host():
    meeting = Meeting(5, ["a", "b", "a", "b", None])
    assert [m.hosts for m in meeting.found] == [[[0, 2], [1, 3], [4]]] * 5
    assert [m.link.members for m in meeting.found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4]]
    assert " as a (pid" in meeting.found[0].cards[2].name
    for m in meeting.found:
        m.link.close()


def test_a_leader_that_is_gone_or_silent_is_named():
    meeting = Meeting(2, [None, None])
    leader, member = (m.link for m in meeting.found)
    with pytest.raises(TimedOut, match=r"waited 0.1 s for rank 0 on .* to share 'x'"):
        member.share("x", 10, timeout=0.1)
    leader.close()
    with pytest.raises(PeerLost, match=r"rank 0 on .* (left|was gone) before it shared 'x'"):
        member.share("x", 10, timeout=5)
    member.close()


def test_another_user_is_turned_away(monkeypatch):
    real = rendezvous.credentials
    monkeypatch.setattr(rendezvous, "credentials", lambda sock: (real(sock)[0], real(sock)[1] + 1))
    meeting = Meeting(2, [None, None])
    assert [m.hosts for m in meeting.found] == [[[0], [1]]] * 2


def test_a_machine_that_cannot_share_memory_is_not_asked_to(monkeypatch):
    monkeypatch.setattr(rendezvous, "unsupported_reason", lambda: "memfd is forbidden")
    meeting = Meeting(2, [None, None])
    assert [m.hosts for m in meeting.found] == [[[0], [1]]] * 2
    assert meeting.found[0].cards[1].refusal == "memfd is forbidden"


@pytest.mark.ranks
def test_signals_are_not_swallowed_while_waiting():
    code = (
        "import threading, os, signal, time\n"
        "from tests.comm.host.test_parts import block\n"
        "from sherd.comm.host import futex\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs in the background start without it
        "memory = block(4096)\n"
        "try:\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    while True: futex.wait(memory.address, 0, 600)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = python(code)
    assert done.stdout.strip() == "interrupted", done.stderr


@pytest.mark.ranks
def test_a_killed_sleeper_is_no_problem_for_the_waker():
    memory = block(4096)
    child = os.fork()
    if child == 0:
        futex.wait(memory.address, 0, 60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    futex.wake(memory.address)


def test_ranks_spin_where_each_has_a_core_unless_others_need_them(monkeypatch):
    monkeypatch.delenv("SHERD_SPIN", raising=False)
    assert spins_pay(cores())
    assert not spins_pay(cores() + 1)
    monkeypatch.setenv("SHERD_SPIN", "0")
    assert not spins_pay(1)
    monkeypatch.setenv("SHERD_SPIN", "no")
    with pytest.raises(ConfigError, match="SHERD_SPIN='no' must be 0 or 1"):
        spins_pay(1)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "300000 100000"}, 3),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        ({"a/b/cpu.max": "50000 100000"}, 1),
        ({"elsewhere/cpu.max": "100000 100000"}, 8),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_a_container_may_have_less_time_than_cores(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("5:cpu:/x\n0::/a/b\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert cores(root, own) == expected
    assert cores(root, tmp_path / "missing") == (expected if not any(n.startswith("a/") for n in files) else 8)
