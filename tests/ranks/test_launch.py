"""`sherd.launch`: ranks from a prompt or a script. What they print is seen, and none of them outlives its caller."""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import sherd
from sherd.errors import ConfigError, RankFailed
from sherd.ranks import call, launching
from sherd.ranks.output import Output
from tests.helpers.processes import alive, wait_for

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """No child and no file; and at the start, no variable that would make up for what ranks have to do themselves."""
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with call.rendezvous():
        pass  # what torch opens once, for good, is open now
    me = psutil.Process()
    children, files = set(me.children(recursive=True)), me.num_fds()
    yield
    assert set(me.children(recursive=True)) <= children
    assert me.num_fds() == files


class Prompt:
    """A person at Python's own prompt."""

    def __enter__(self):
        # A session of its own, as notebook servers give their kernels: a signal goes to all processes in it.
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q", "-u"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.seen = ""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        return self

    def _read(self):
        while text := self.process.stdout.readline():
            self.seen += text

    def type(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def see(self, text):
        try:
            wait_for(lambda: text in self.seen, repr(text))
        except AssertionError as error:
            raise AssertionError(f"{error}; there was:\n{self.seen}") from None

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdin.close()
        self.process.stdout.close()


TRAINING = """
import os, pickle, psutil, signal, sys, time, torch, torch.distributed as dist, sherd
from pathlib import Path

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(15, 7)
    def forward(self, x):
        return self.linear(x)

def train(steps, go, lr):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = sherd.distribute(model, optimizer, strategy="zero2")
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 15)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
    while not Path(go).exists():
        time.sleep(0.01)
    assert type(pickle.loads(pickle.dumps(Net()))) is Net
    plain = Net()
    plain.load_state_dict(model.state_dict())
    return int(os.environ["RANK"]), plain

def forever():
    print("pid", os.getpid(), "waits")
    print("so does stderr", file=sys.stderr)
    time.sleep(600)

"""


def test_a_function_typed_at_the_prompt_trains_and_can_be_interrupted(tmp_path):
    with Prompt() as prompt:
        prompt.type(TRAINING)
        prompt.type(f"results = sherd.launch(train, 2, 3, {str(tmp_path / 'go')!r}, lr=0.01)\n")
        prompt.see("step 2\n")  # ranks only go on once this was seen
        prompt.see("[rank 1] step 2\n")
        (tmp_path / "go").touch()
        prompt.type("(rank0, net0), (rank1, net1) = results\n")
        prompt.type("same = torch.equal(net0.linear.weight, net1.linear.weight)\n")
        prompt.type("print('came back:', rank0, rank1, type(net1) is Net, same)\n")
        prompt.see("came back: 0 1 True True")

        prompt.type("handler = signal.signal(signal.SIGINT, signal.default_int_handler)\n")
        prompt.type("sherd.launch(forever, 2)\n")
        prompt.see("waits\n")
        prompt.see("[rank 1] so does stderr\n")
        os.killpg(prompt.process.pid, signal.SIGINT)
        prompt.type("print('children:', psutil.Process().children(recursive=True))\n")
        prompt.see("children: []")
        assert "KeyboardInterrupt" in prompt.seen
        assert "[rank 1] Traceback" not in prompt.seen  # the interrupt was the caller's alone


SCRIPT = """
import os, subprocess, time
from pathlib import Path
import sherd

def forever(folder):
    child = subprocess.Popen(["sleep", "600"])
    name = f"{folder}/pids-{os.environ['RANK']}"
    Path(name + ".partial").write_text(f"{os.getpid()} {child.pid}")
    Path(name + ".partial").rename(name)
    time.sleep(600)

here = os.path.dirname(__file__)
with open(here + "/runs", "a") as runs:
    runs.write("once\\n")
sherd.launch(forever, 2, here)
"""


def test_a_script_needs_no_guard_and_its_ranks_do_not_outlive_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    caller = subprocess.Popen([sys.executable, str(tmp_path / "script.py")])
    try:
        wait_for(lambda: len(list(tmp_path.glob("pids-[01]"))) == 2, "ranks")
        pids = [int(pid) for file in tmp_path.glob("pids-[01]") for pid in file.read_text().split()]
        assert all(map(alive, pids))
        assert (tmp_path / "runs").read_text() == "once\n"
    finally:
        caller.kill()
        caller.wait()
    wait_for(lambda: not any(map(alive, pids)), "the end of the ranks and of their children")


def test_everything_travels_by_value(capsys, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "elsewhere.invalid")
    factor = 10

    class Local:
        def __init__(self, value):
            self.value = value

    def work(number, *, extra):
        dist.init_process_group("gloo")
        total = torch.tensor(float(dist.get_rank() + number))
        dist.all_reduce(total)
        left = subprocess.Popen(["sleep", "600"])  # it also holds on to our stdout
        with pytest.raises(ConfigError) as nested:
            sherd.launch(work, 2)
        print(f"rank {dist.get_rank()} says", "größer", end="")
        return {
            "local": Local(extra(factor)),
            "total": total,
            "threads": (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()),
            "argv": sys.argv,
            "left": left.pid,
            "nested": str(nested.value),
        }

    results = sherd.launch(work, 2, 5, extra=lambda x: x + int(os.environ["RANK"]))
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank, result in enumerate(results):
        assert isinstance(result["local"], Local)
        assert result["local"].value == 10 + rank
        assert result["total"] == 11.0
        assert result["threads"] == (str(threads), threads)
        assert result["argv"] == sys.argv
        wait_for(lambda: not alive(result["left"]), "the end of what a rank had started")  # noqa: B023
        assert f"called inside rank {rank}" in result["nested"]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 1] rank 1 says größer", "rank 0 says größer"]


def test_the_first_rank_that_fails_ends_the_others_and_has_its_say(capsys):
    def fail():
        print("still fine")
        if os.environ["RANK"] == "1":
            raise ValueError("the weather is bad")
        time.sleep(600)

    with pytest.raises(RankFailed) as caught:
        sherd.launch(fail, 2)
    assert list(caught.value.failures) == [1]
    assert 'raise ValueError("the weather is bad")' in caught.value.failures[1]
    assert "launching.py" not in str(caught.value)
    assert "rank 0 did not fail" in str(caught.value)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 1] still fine", "still fine"]


def test_a_killed_rank_is_named():
    def die():
        comm = sherd.comm.connect()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier().wait()

    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL") as caught:
        sherd.launch(die, 2)
    assert list(caught.value.failures) == [1, 0]
    assert "PeerLost" in caught.value.failures[0]


def test_a_result_that_cannot_travel_is_said_to_be_the_problem():
    with pytest.raises(RankFailed, match=r"rank 0 returned a _thread\.lock, which cannot be pickled"):
        sherd.launch(threading.Lock, 1)


def test_a_rank_that_does_not_exit_costs_no_result(monkeypatch):
    monkeypatch.setattr(launching, "LEAVE_TIMEOUT", 0.5)

    def leave_a_thread():
        threading.Thread(target=time.sleep, args=(600,)).start()
        return json.dumps("done")

    with pytest.warns(UserWarning, match="every rank has returned its result, but then rank 0 of 1 did not finish"):
        assert sherd.launch(leave_a_thread, 1) == ['"done"']


def test_what_cannot_be_launched_is_refused(monkeypatch):
    lock = threading.Lock()

    def use_the_lock(*args):
        return lock, args

    with pytest.raises(ConfigError, match=r"use_the_lock cannot be sent .*Found in: variable lock\."):
        sherd.launch(use_the_lock, 2)
    with pytest.raises(ConfigError, match=r"Found in: argument 1, argument key\."):
        sherd.launch(functools.partial(print), 2, 1, lock, key=lock)
    for ranks in (0, -1, 2.0, True, "2"):
        with pytest.raises(ConfigError, match="ranks must be a whole number"):
            sherd.launch(print, ranks)
    with pytest.raises(ConfigError, match="must be a function"):
        sherd.launch(3, 2)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="called inside rank 3"):
        sherd.launch(print, 2)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["one\ntw", "o\n"], ["> one\n", "> two\n"]),
        (["no end"], ["> no end\n"]),
        (["a\r\nb\r", "\nc\n"], ["> a\r\n", "> b\r\n", "> c\n"]),
        (["\r 10%", "\r 20%", "\r 30%\n"], ["> \r", ">  10%\r", ">  20%\r", ">  30%\n"]),
        (["\u2028 is no end\n"], ["> \u2028 is no end\n"]),
    ],
)
def test_output_is_passed_on_by_whole_lines(capsys, pieces, lines):
    reader, writer = os.pipe()
    output = Output(os.fdopen(reader, "rb", buffering=0), "stdout", "> ")
    for piece in pieces:
        for byte in piece.encode():  # one at a time: a character may come in halves
            os.write(writer, bytes([byte]))
            output.forward()
    os.close(writer)
    output.close()
    assert capsys.readouterr().out == "".join(lines)


@pytest.mark.pure
def test_a_bar_is_seen_while_it_grows(capsys):
    reader, writer = os.pipe()
    output = Output(os.fdopen(reader, "rb", buffering=0), "stderr", "")
    os.write(writer, b"10%\r20%\rhalf a li")
    output.forward()
    assert capsys.readouterr().err == "10%\r20%\r"
    output.close()  # although the other end is open
    assert capsys.readouterr().err == "half a li\n"
    os.close(writer)


@pytest.mark.pure
def test_functions_of_a_module_go_by_name():
    assert b"test_launch" in pickle.loads(launching._shipped(test_functions_of_a_module_go_by_name, (), {}))[1][0]
