"""`sherd.testing`: no rank may hang the caller, hide another rank's failure or leave something behind."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sherd.errors import ConfigError, RankFailed
from sherd.testing import Died, RankPool, RanksTimedOut, run_ranks
from tests.helpers.processes import alive, descriptors, eventually

pytestmark = [pytest.mark.ranks, pytest.mark.alone]


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, timeout=20.0, grace=0.5) as pool:
        yield pool


def rank() -> int:
    return int(os.environ["RANK"])


# What ranks run


def rank_and(*args):
    return rank(), *args


def pid() -> int:
    return os.getpid()


def environ() -> dict[str, str]:
    return dict(os.environ)


def surroundings():
    return str(Path.cwd()), sys.path, torch.get_num_threads(), dist.is_torchelastic_launched()


def all_reduce(value: torch.Tensor) -> torch.Tensor:
    dist.init_process_group("gloo")
    value = value * (rank() + 1)
    dist.all_reduce(value)
    return value


def random_number() -> float:
    return torch.rand(()).item()


def scale(value: float, *, by: float) -> float:
    return value * by


def big() -> torch.Tensor:
    return torch.full((3_000_000,), float(rank()))


def raise_late(delays: list[float]) -> None:
    time.sleep(delays[rank()])
    raise ValueError(f"I am rank {rank()}")


def raise_on(which: int) -> str:
    if rank() == which:
        raise KeyError("only here")
    return "fine"


def stuck_in_this_function() -> None:
    threading.Event().wait(60)


def hang_on(which: int) -> int:
    if rank() == which:
        threading.Thread(target=stuck_in_this_function, daemon=True).start()
        time.sleep(60)
    return rank()


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(60)  # PyDLL, unlike CDLL, keeps the GIL during the call


def stop_on(which: int) -> None:
    if rank() == which:
        os.kill(os.getpid(), signal.SIGSTOP)


def leave(which: int, how: str):
    if rank() != which:
        time.sleep(0.1)
        return "survived"
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[how])
    return None


def crash(which: int):
    if rank() == which:
        ctypes.string_at(0)


def notice_the_dead() -> None:
    dist.init_process_group("gloo")
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def kill_after_return(path: str) -> int:
    """Rank 1 returns at once; rank 0 then kills it."""
    file = Path(path)
    if rank() == 1:
        file.write_text(str(os.getpid()))
        return 1
    assert eventually(lambda: file.exists() and file.read_text() != "")
    time.sleep(0.2)
    os.kill(int(file.read_text()), signal.SIGKILL)
    time.sleep(0.3)
    return 0


def unpicklable_on(which: int):
    return threading.Lock() if rank() == which else "fine"


class OnlyThere:
    def __reduce__(self):
        return _refuse_here, (os.getpid(),)


def _refuse_here(home: int) -> None:
    if os.getpid() != home:
        raise TypeError("not at home")


def homesick() -> OnlyThere:
    return OnlyThere()


def leave_a_thread_behind() -> None:
    if rank() == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()


def write_pid(folder: str) -> None:
    Path(folder, f"{rank()}").write_text(str(os.getpid()))
    if rank() == 0:
        hold_the_gil()
    time.sleep(60)


def pids_in(folder: Path, count: int) -> list[int]:
    def texts():
        return [file.read_text() for file in folder.iterdir() if file.name.isdigit()]

    assert eventually(lambda: len(texts()) == count and all(texts()), 30.0)
    return [int(text) for text in texts()]


def call_and_be_killed(folder: str) -> None:
    def kill() -> None:
        assert all(map(alive, pids_in(Path(folder), 2)))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    run_ranks(write_pid, 2, folder)


forgotten: list[RankPool] = []


def call_and_forget() -> list[int]:
    forgotten.append(RankPool(2))
    return forgotten[0].run(pid)


# Results and surroundings


def test_results_come_in_rank_order():
    assert run_ranks(rank_and, 3, "a", 5) == [(0, "a", 5), (1, "a", 5), (2, "a", 5)]


def test_a_world_of_one():
    assert run_ranks(rank_and, 1) == [(0,)]


def test_a_partial_carries_keywords(pair):
    assert pair.run(functools.partial(scale, by=3.0), 2.0) == [6.0, 6.0]


def test_the_environment_is_that_of_torchrun(pair):
    first, second = pair.run(environ), pair.run(environ)
    for number, env in enumerate(first):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(number), str(number))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
    assert first[0]["MASTER_PORT"] == first[1]["MASTER_PORT"]
    assert first[0]["TORCHELASTIC_RUN_ID"] != second[0]["TORCHELASTIC_RUN_ID"]


def test_ranks_follow_the_caller_into_its_surroundings(pair, tmp_path, monkeypatch):
    pair.run(pid)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.setenv("SHERD_TEST_CALLER", "set after the ranks were started")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert pair.run(surroundings) == [(str(tmp_path), sys.path, threads, True)] * 2
    assert pair.run(environ)[1]["SHERD_TEST_CALLER"] == "set after the ranks were started"


def test_env_is_for_one_run_and_wins(pair):
    changed = pair.run(environ, env={"SHERD_TEST_EXTRA": "1", "LOCAL_WORLD_SIZE": "1"})
    after = pair.run(environ)
    assert [(env["SHERD_TEST_EXTRA"], env["LOCAL_WORLD_SIZE"]) for env in changed] == [("1", "1")] * 2
    assert all("SHERD_TEST_EXTRA" not in env and env["LOCAL_WORLD_SIZE"] == "2" for env in after)


def test_ranks_talk_and_tensors_travel_by_value():
    for result in run_ranks(all_reduce, 2, torch.tensor([1.0, 2.0])):
        assert torch.equal(result, torch.tensor([3.0, 6.0]))
        assert not result.is_shared()


def test_large_results(pair):
    for number, result in enumerate(pair.run(big)):
        assert result.shape == (3_000_000,)
        assert bool((result == number).all())


# Pools


def test_a_pool_keeps_its_processes_but_not_its_groups_and_seeds(pair):
    before = pair.run(pid)
    randoms = pair.run(random_number)
    for factor in (1.0, 10.0):
        assert pair.run(all_reduce, torch.tensor(factor)) == [3 * factor] * 2
    assert pair.run(random_number) == randoms
    assert pair.run(pid) == before


def test_a_pool_recovers_after_a_failure_and_a_timeout(pair):
    first = pair.run(pid)
    with pytest.raises(RankFailed, match="only here"):
        pair.run(raise_on, 1)
    second = pair.run(pid)
    with pytest.raises(RanksTimedOut):
        pair.run(hang_on, 1, timeout=0.3)
    third = pair.run(pid)
    assert len({*first, *second, *third}) == 6
    assert not any(alive(number) for number in first + second)


def test_a_rank_that_dies_between_runs_is_told(pair):
    victim = pair.run(pid)[1]
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{victim}").exists())
    time.sleep(0.05)  # the fork server reaps it, then reports it
    with pytest.raises(RankFailed, match=r"waiting for the next run(.|\n)*rank 1 was killed by SIGKILL"):
        pair.run(pid)
    assert len(pair.run(pid)) == 2


def test_a_closed_pool_ends_its_ranks_and_says_so():
    pool = RankPool(2)
    pids = pool.run(pid)
    pool.close()
    pool.close()
    assert not any(map(alive, pids))
    with pytest.raises(ConfigError, match="closed"):
        pool.run(pid)


def test_a_rank_must_also_exit():
    with pytest.raises(RanksTimedOut, match="rank 1 of 2 did not finish exiting"):
        run_ranks(leave_a_thread_behind, 2, timeout=1.0)


# Failures


def test_every_failing_rank_is_heard_and_the_first_comes_first(pair):
    with pytest.raises(RankFailed) as caught:
        pair.run(raise_late, [0.1, 0.0])
    text = str(caught.value)
    assert list(caught.value.failures) == [1, 0]
    assert text.index("rank 1 raised ValueError: I am rank 1") < text.index("rank 0 raised ValueError: I am rank 0")
    assert text.count("in raise_late") == 2
    assert "worker.py" not in text
    assert pickle.loads(pickle.dumps(caught.value)).failures == caught.value.failures


def test_the_others_are_ended_after_a_grace_and_it_is_said_where_they_were(pair):
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed") as caught:
        pair.run(raise_late, [60.0, 0.0])
    assert time.monotonic() - started < 10
    assert "rank 0 did not fail, was still busy 0.5 s later and had to be ended" in str(caught.value)
    assert " in raise_late" in str(caught.value).partition("rank 0 did not fail")[2]
    assert list(caught.value.failures) == [1]


def test_a_rank_that_was_fine_is_said_to_be(pair):
    with pytest.raises(RankFailed, match="rank 0 had finished running the function"):
        pair.run(raise_on, 1)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGTERM", "was killed by SIGTERM"),
        ("os._exit", "exited with code 3"),
        ("sys.exit", "exited with code 3"),
    ],
)
def test_an_exit_is_reported_though_the_others_are_fine(pair, how, words):
    with pytest.raises(RankFailed) as caught:
        pair.run(leave, 1, how)
    assert caught.value.failures.keys() == {1}
    assert f"rank 1 {words}" in str(caught.value)


def test_a_crash_leaves_its_python_stack(pair):
    with pytest.raises(RankFailed, match=r"rank 1 was killed by SIGSEGV(.|\n)* in crash"):
        pair.run(crash, 1)


def test_a_killed_rank_is_told_before_those_that_noticed(pair):
    with pytest.raises(RankFailed) as caught:
        pair.run(notice_the_dead)
    assert next(iter(caught.value.failures)) == 1


def test_results_that_cannot_travel(pair):
    with pytest.raises(RankFailed, match=r"rank 1 returned a _thread\.lock, which cannot be pickled"):
        pair.run(unpicklable_on, 1)
    with pytest.raises(RankFailed, match=r"rank 1 returned a result that cannot be unpickled .*TypeError: not at home"):
        pair.run(homesick)


# Timeouts


def test_a_timeout_shows_every_stack(pair):
    started = time.monotonic()
    with pytest.raises(RanksTimedOut, match=r"rank 1 of 2 did not finish running the function in 0\.5 s") as caught:
        pair.run(hang_on, 1, timeout=0.5)
    assert 0.5 <= time.monotonic() - started < 10
    assert caught.value.failures.keys() == {1}
    assert " in hang_on" in caught.value.failures[1]
    assert " in stuck_in_this_function" in caught.value.failures[1]  # the other thread
    assert "rank 0 had finished" in str(caught.value)


def test_a_rank_that_holds_the_gil_cannot_hang_the_caller(pair):
    with pytest.raises(RanksTimedOut) as caught:
        pair.run(hold_the_gil, timeout=0.5)
    assert all(" in hold_the_gil" in caught.value.failures[number] for number in (0, 1))


def test_a_stopped_rank_cannot_hang_the_caller(pair):
    stopped = pair.run(pid)[1]
    with pytest.raises(RanksTimedOut, match=r"rank 1 was still busy(.|\n)*the process is stopped"):
        pair.run(stop_on, 1, timeout=0.5)
    assert not alive(stopped)


# Deaths on purpose


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), ("os._exit", 3)])
def test_expected_exits_leave_the_survivors_results(pair, how, code):
    assert pair.run(leave, 0, how, expected_exits={0: code}) == [Died(code), "survived"]
    assert run_ranks(leave, 3, 1, how, expected_exits={1: code}) == ["survived", Died(code), "survived"]


def test_a_rank_may_be_killed_after_it_returned(pair, tmp_path):
    assert pair.run(kill_after_return, str(tmp_path / "a"), expected_exits={1: -9}) == [0, Died(-9)]
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL after it had returned"):
        pair.run(kill_after_return, str(tmp_path / "b"))


def test_an_exit_that_was_expected_must_come(pair):
    with pytest.raises(RankFailed, match="rank 1 returned, but expected_exits says that it was killed by SIGKILL"):
        pair.run(pid, expected_exits={1: -9})
    with pytest.raises(RankFailed, match=r"rank 1 exited with code 3, but expected_exits says .* SIGKILL"):
        pair.run(leave, 1, "os._exit", expected_exits={1: -9})
    with pytest.raises(RankFailed, match="rank 1 raised KeyError"):
        pair.run(raise_on, 1, expected_exits={1: 1})


# Misuse


def test_what_cannot_be_sent_is_refused(pair):
    def local() -> None: ...

    for fn in (lambda: None, local, functools.partial(local)):
        with pytest.raises(ConfigError, match="top level of a module"):
            pair.run(fn)
    with pytest.raises(ConfigError, match=r"types: lock\) cannot be sent"):
        pair.run(rank_and, threading.Lock())
    with pytest.raises(ConfigError, match="must be a function"):
        pair.run(3)


def test_arguments_are_checked(pair):
    with pytest.raises(ConfigError, match="world_size"):
        run_ranks(pid, 0)
    with pytest.raises(ConfigError, match="timeout"):
        pair.run(pid, timeout=0.0)
    with pytest.raises(ConfigError, match="names rank 2, but the ranks are 0 to 1"):
        pair.run(pid, expected_exits={2: -9})
    with pytest.raises(ConfigError, match="strings"):
        pair.run(pid, env={"A": 1})


# Nothing is left behind


def test_no_files_and_no_processes_are_left():
    run_ranks(all_reduce, 2, torch.ones(1))  # what is opened once, for good, is open now
    files = descriptors()
    children = len(multiprocessing.active_children())
    pids: list[int] = []
    for _ in range(10):
        pids += run_ranks(pid, 2)
        with pytest.raises(RankFailed):
            run_ranks(raise_late, 2, [0.0, 0.0])
    assert descriptors() == files
    assert len(multiprocessing.active_children()) == children
    assert not any(map(alive, pids))


def test_an_interrupt_ends_the_ranks(tmp_path):
    def interrupt() -> None:
        pids_in(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with RankPool(2) as pool:
            pool.run(pid)
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                pool.run(write_pid, str(tmp_path))
            assert not any(map(alive, pids_in(tmp_path, 2)))
    finally:
        signal.signal(signal.SIGINT, usual)


# A rank can be a caller itself, which is cheaper than a new interpreter that imports torch.


def test_ranks_do_not_outlive_a_killed_caller(tmp_path):
    assert run_ranks(call_and_be_killed, 1, str(tmp_path), expected_exits={0: -9}) == [Died(-9)]
    pids = pids_in(tmp_path, 2)
    assert eventually(lambda: not any(map(alive, pids)))


def test_a_pool_that_nobody_closed_does_not_keep_its_caller():
    [pids] = run_ranks(call_and_forget, 1, timeout=20.0)
    assert len(pids) == 2
    assert not any(map(alive, pids))
