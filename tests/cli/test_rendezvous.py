"""Launchers of several machines that meet, or say in one line why they do not. Threads play the machines."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from sherd.cli.launch.request import Request
from sherd.cli.machines import board, rendezvous
from sherd.cli.machines.aside import NoAnswer
from sherd.cli.machines.board import FAULT, OFF, PLAN, Board
from sherd.cli.machines.news import Newsroom
from sherd.cli.machines.rendezvous import meet, meet_alone
from sherd.cli.machines.seat import SILENT_SECONDS, Seat
from sherd.comm.trust.seal import Seal
from sherd.errors import ConfigError, SherdError
from tests.helpers.processes import free_port

pytestmark = pytest.mark.ranks

TOKEN = Seal(b"k" * 32)


@pytest.fixture
def port():
    return free_port()


def request(port, machine=0, machines=2, *, ranks=2, wait=20.0, address="127.0.0.1"):
    return Request([], ranks, machines, machine, address, port, None, wait)


def attend(asked, seal=TOKEN, hold=None):
    """What a machine learns, or the error that it shows."""
    try:
        with meet(asked, seal) as meeting:
            if hold:
                hold.wait()
            return meeting
    except SherdError as error:
        return str(error)


def attended(*requests, seals=None):
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(attend, requests, seals or [TOKEN] * len(requests)))


@pytest.mark.parametrize("seal", [TOKEN, None])
def test_they_agree_who_is_who(port, seal):
    a, b, c = attended(*(request(port, n, 3, ranks=n + 1) for n in (0, 1, 2)), seals=[seal] * 3)
    assert [(m.machine, m.first_rank, m.ranks, m.world_size) for m in (a, b, c)] == [
        (0, 0, 1, 6),
        (1, 1, 2, 6),
        (2, 3, 3, 6),
    ]
    assert len({m.board.run for m in (a, b, c)}) == 1


def test_one_machine_listens_on_loopback_alone():
    with meet_alone(2, TOKEN) as meeting:
        listening = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
        found = [each.laddr.ip for each in listening if each.laddr.port == meeting.master_port]
    assert found == ["127.0.0.1"]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        error = attend(request(other.getsockname()[1]))
    assert re.fullmatch(r"port \d+ of 127\.0\.0\.1 is in use .*; write another one with --master-port, .*", error)


@pytest.mark.parametrize("machine", [0, 1])
def test_an_address_that_does_not_resolve(port, machine):
    error = attend(request(port, machine, address="no.such.host.invalid"))
    assert "'no.such.host.invalid' does not resolve on this machine" in error


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (0, r"machine 1 of 2 \(--node-rank 1\), at 127\.0\.0\.1:\d+ \(lo\)"),
        (1, r"machine 0 at 127\.0\.0\.1:\d+ \(Connection refused\); start it there with --node-rank 0"),
    ],
)
def test_the_user_is_told_whom_it_waits_for_and_that_it_gave_up(port, machine, words, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "SPEAK_SECONDS", 0.5)
    error = attend(request(port, machine, wait=1.0))
    assert re.fullmatch(rf"gave up after 1 s of waiting for {words} \(--wait sets this limit\)", error)
    assert len(re.findall(rf"^sherd run: waiting for {words}$", capfd.readouterr().err, flags=re.MULTILINE)) == 1


def test_what_listens_there_is_something_else(monkeypatch):
    monkeypatch.setattr(board, "CONNECT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        error = attend(request(other.getsockname()[1], 1, wait=1.0))
    assert "what answers there is not `sherd run`" in error


def test_different_numbers_of_machines(port):
    errors = attended(request(port, 0, 3), request(port, 1, 2))
    for error in errors:
        assert "machine 0 was started with --nnodes 3, machine 1 (" in error
        assert "with --nnodes 2; write the same number on every machine" in error


def test_two_machines_with_one_number(port):
    """One of them leaves; the other goes on waiting, and hears why it was in vain."""
    master, *others = attended(request(port, 0, 3, wait=4.0), request(port, 1, 3), request(port, 1, 3))
    assert re.fullmatch(r"gave up after 4 s of waiting for machine 2 of 3 \(--node-rank 2\), .*", master)
    second, first = sorted(others, reverse=True)
    assert first == f"called off: {master}"
    assert "two machines have --node-rank 1: this one (" in second
    assert "give each its own number, from 0 to 2" in second


def test_a_machine_that_comes_when_the_run_has_begun_does_not_end_it(port):
    hold = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(attend, request(port, n), TOKEN, hold) for n in (0, 1))
        there = Board(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), TOKEN)
        try:
            end = time.monotonic() + 20
            while not there.read(PLAN):
                assert time.monotonic() < end
                time.sleep(0.05)
            assert "two machines have --node-rank 1" in attend(request(port, 1))
            assert "--nnodes 3" in attend(request(port, 1, 3))
            assert there.read(OFF) is None
        finally:
            hold.set()
        assert (first.result().first_rank, second.result().first_rank) == (0, 2)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_launcher_that_ends_while_it_waits_may_come_again(port, monkeypatch, end):
    if end == "is killed":
        monkeypatch.setattr(Seat, "leave", lambda seat: time.sleep(SILENT_SECONDS + 1))  # as machine 0 counts
    with ThreadPoolExecutor(3) as pool:
        master = pool.submit(attend, request(port, 0, 3, wait=60))
        assert "gave up" in attend(request(port, 1, 3, wait=1.5))
        others = [pool.submit(attend, request(port, 1, 3, wait=60)), pool.submit(attend, request(port, 2, 3, wait=60))]
        assert [each.result().machine for each in (master, *others)] == [0, 1, 2]


@pytest.mark.parametrize("seals", [(TOKEN, None), (None, TOKEN), (TOKEN, Seal(b"x" * 32))])
def test_machines_with_different_tokens(port, seals, capfd):
    first, second = attended(request(port, 0, wait=1.5), request(port, 1, wait=1.5), seals=seals)
    assert "has another SHERD_TOKEN, or only one of the two machines has one" in second
    assert "gave up after 1.5 s of waiting for machine 1" in first


def test_what_a_stranger_writes_is_ignored(port, capfd):
    """Garbage at every key, before and while the machines meet; what looks right carries no seal."""
    stop, written = threading.Event(), threading.Event()
    keys = [PLAN, OFF, FAULT, "sherd/launch/machine/1", "sherd/launch/end/0", "sherd/launch/end/1"]

    def stranger():
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        while not stop.is_set():
            for key in keys:
                for value in (
                    b"\x80\x04K\x01.",
                    b"[" * 100_000,
                    secrets.token_bytes(90),
                    json.dumps({"why": "x", "all": []}),
                ):
                    store.set(key, value)
            written.set()
            stop.wait(0.3)

    thread = threading.Thread(target=stranger)
    with ThreadPoolExecutor(1) as pool:
        master = pool.submit(attend, request(port))
        thread.start()
        assert written.wait(20)
        time.sleep(0.5)  # for machine 0 to look at it
        stop.set()
        thread.join()
        other = attend(request(port, 1))
        assert (master.result().first_rank, other.first_rank) == (0, 2)
    assert capfd.readouterr().err.count("wrote to 127.0.0.1") == 1


def test_the_first_fault_is_told_to_all_and_stays(port):
    with ThreadPoolExecutor(2) as pool:
        hold = threading.Event()

        def on(machine):
            with meet(request(port, machine), TOKEN) as meeting:
                news = Newsroom(meeting)
                if machine == 1:
                    meeting.board.store.set(FAULT, "what a stranger planted")
                    news.tell(3, 77, "was killed by SIGKILL")
                    news.tell(2, 78, "exited with code 1")
                    hold.set()
                    return meeting.board.read(FAULT)
                hold.wait()
                news.tell(0, 79, "exited with code 1")  # after it: it must not be said to be the first
                time.sleep(1)
                return news.failure

        told, heard = pool.submit(on, 1), pool.submit(on, 0)
        assert (told.result()["rank"], told.result()["pid"], told.result()["how"]) == (3, 77, "was killed by SIGKILL")
        assert re.fullmatch(r"rank 3 on machine \S+ failed first \(pid 77\): it was killed by SIGKILL", heard.result())


def test_a_machine_that_leaves_after_the_plan_calls_the_run_off(port):
    def leaves():
        with meet(request(port, 1), TOKEN):
            raise ConfigError("no files left")

    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(leaves)
        with meet(request(port, 0), TOKEN) as meeting:
            news, end = Newsroom(meeting), time.monotonic() + 20
            while not news.failure and time.monotonic() < end:
                time.sleep(0.05)
            assert news.failure == "no files left; stopping the ranks of this machine"
            news.close(well=False)
        with pytest.raises(ConfigError, match="no files left"):
            gone.result()


@pytest.mark.parametrize(("end", "lost"), [({"well": True}, False), (None, True)])
def test_machine_0_may_leave_before_ranks_of_others_that_take_long(end, lost):
    class Hearing:
        cut = False
        reads = 0

        def read(self, key):
            self.reads += 1
            if self.cut:
                raise DistError("machine 0 is gone")
            return end if key.endswith("end/0") else None

    hearing = Hearing()
    news = Newsroom(SimpleNamespace(hearing=hearing, board=None, machines=2, machine=1, first_rank=1, ranks=1))
    patience = time.monotonic() + 20
    while hearing.reads < 4 and time.monotonic() < patience:
        time.sleep(0.01)
    hearing.cut = True
    while not (news.lost or news.all_ended) and time.monotonic() < patience:
        time.sleep(0.01)
    assert (news.lost, news.all_ended, bool(news.failure)) == (lost, not lost, lost)


def test_a_store_that_never_answers_is_one_that_is_gone():
    asked, over = threading.Event(), threading.Event()

    def check(keys):
        asked.set()
        over.wait(60)
        return False

    silent = Board(SimpleNamespace(check=check, set_timeout=lambda _: None), TOKEN, "run", patience=0.1)
    try:
        with pytest.raises(DistError, match=r"no answer within 0\.1 s"):
            silent.read(PLAN)
        assert asked.is_set()
    finally:
        over.set()


def test_who_leaves_waits_for_a_silent_store_once(monkeypatch):
    """And not for each of the last words: together they take longer than whoever asked for the end may wait."""
    asked, pending = [], Future()

    def no_answer(job, seconds):
        asked.append(seconds)
        raise NoAnswer(seconds, pending)

    monkeypatch.setattr(board, "aside", no_answer)
    monkeypatch.setattr(Newsroom, "_hear", lambda news: None)
    ours = Board(SimpleNamespace(set_timeout=lambda _: None), TOKEN, "run")
    news = Newsroom(SimpleNamespace(board=ours, hearing=None, machines=2, machine=0, first_rank=0, ranks=1))
    news.tell(0, 1, "was stopped")
    news.close(well=False, stopped=True)
    with pytest.raises(KeyboardInterrupt), rendezvous._called_off(ours, request(0)):
        raise KeyboardInterrupt
    assert asked == [board.BRIEF_SECONDS]
    pending.set_result(None)
    news.tell_ended(well=False)
    assert len(asked) == 2, "it answers again, so it is asked"
