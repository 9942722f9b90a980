"""A stranger sends everything he can think of to every port of a job, while it trains: nothing of it is ever run.

On one machine he can do no more than that, neither from outside nor as another user on loopback: the job ends with the
right numbers. Across machines sherd's own ports stand as well; what he can do to torch's own, with what, is in
docs/security.md (`python -m tests.stranger` measures it).
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import sherd
from sherd import CommOptions, comm
from sherd.errors import Unsupported
from sherd.testing import _namespaces
from sherd.testing.hosts import _Network
from tests import stranger

SCRIPT = "import sys; from tests.contracts.test_stranger import train; train(*sys.argv[1:])"
SECONDS = 60  # for anything to happen


def train(folder, transport):
    """The job, on each rank: until there is a file `stop` in the folder. Ranks but the first wait for the file `go` in
    the midst of the handshake. All are slow in turns once there is a file `slow`."""
    folder = Path(folder)

    def write(name, value):
        (folder / f".{name}").write_text(json.dumps(value))
        (folder / f".{name}").rename(folder / name)

    def late(*args, **options):
        while not (folder / "go").exists():
            time.sleep(0.02)
        return meet(*args, **options)

    died = []  # threads, of what they were told: a rank that has gone deaf believes nothing either
    threading.excepthook = lambda found: died.append(f"{found.thread.name}: {found.exc_value!r}")
    connecting = sys.modules["sherd.comm.connect"]
    meet = connecting.meet
    if os.environ["RANK"] != "0":
        connecting.meet = late
    try:
        ranks = comm.connect(CommOptions(transport=transport, timeout=90.0))
    finally:
        connecting.meet = meet
    with ranks:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sherd.distribute(model, optimizer, comm=ranks)
        step = 0
        while not ranks.broadcast_object((folder / "stop").exists()):
            x, y = batch(step, ranks.rank)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 3:
                store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                write(f"ready{ranks.rank}", {"ours": listeners(), "store": store})
            slow = ranks.rank == step % 2 and (folder / "slow").exists()  # in turns, so that each waits for the other
            time.sleep(0.4 if slow else 0.01)
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        found = {"steps": step, "weights": weights, "transport": ranks.transport, "died": died}
        write(f"result{ranks.rank}", found)
    threading.excepthook = threading.__excepthook__


def listeners():
    """The ports of this process that Python knows of: sherd's. Those of gloo and of a store are torch's."""
    sockets = [thing for thing in gc.get_objects() if issubclass(type(thing), socket.socket) and thing.fileno() >= 0]
    internet = [each for each in sockets if each.family in (socket.AF_INET, socket.AF_INET6)]
    return [s.getsockname()[:2] for s in internet if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (15, 5))


def expected(steps, ranks=2):
    """What one process makes of all batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = map(torch.cat, zip(*(batch(step, rank) for rank in range(ranks)), strict=True))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


class Job:
    """Ranks that train in a folder, whoever started them."""

    run_id = "sherd"

    def __init__(self, folder):
        self.folder, self.ran = folder, folder / "ran"

    def until(self, look, what):
        """What `look` returns, once that is something."""
        end = time.monotonic() + SECONDS
        while not (found := look()):
            assert time.monotonic() < end, f"no {what} within {SECONDS} s:\n{self.said()}"
            assert self.lives(), self.said()
            time.sleep(0.1)
        return found

    def read(self, *names):
        return [json.loads((self.folder / name).read_text()) for name in names]

    def ready(self):
        """What ranks say of themselves once they train."""
        names = ("ready0", "ready1")
        self.until(lambda: all((self.folder / name).exists() for name in names), names)
        return self.read(*names)

    def tell(self, name):
        (self.folder / name).touch()

    def send(self, addresses, namespace, seed=0):
        """Everything that can be said to a port, by nobody, from there."""
        for address in addresses:
            stranger.as_nobody(stranger.send_all, address, self.ran, seed, namespace=namespace)

    def plant(self, addresses, namespace, seed=0, lies_only=False):
        """Into the stores among them; how many keys were there."""
        args = self.run_id, self.ran, seed, lies_only
        return sum(stranger.as_nobody(stranger.plant, address, *args, namespace=namespace) for address in addresses)

    def finish(self):
        """The job is told to stop, ends well, and has the right numbers."""
        self.tell("stop")
        self.join()
        results = self.read("result0", "result1")
        for result in results:
            assert not result["died"], result["died"]
            for name, value in expected(result["steps"]).items():
                found = torch.tensor(result["weights"][name], dtype=torch.float64)
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
        assert not self.ran.exists(), "what a stranger sent was run"
        return results[0]


class Launched(Job):
    """By `sherd run` in some namespaces, one launcher in each."""

    def __init__(self, folder, launchers, transport, **environ):
        super().__init__(folder)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "SHERD_SPIN": "0", **environ}
        environ.pop("GLOO_SOCKET_IFNAME", None)
        (folder / "job.py").write_text(SCRIPT)
        self.log = (folder / "log").open("w")
        self.launchers = [
            subprocess.Popen(
                [sys.executable, "-m", "sherd.cli", "run", *options, str(folder / "job.py"), str(folder), transport],
                env=environ,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda path=namespace: _namespaces.enter(path),
            )
            for namespace, options in launchers
        ]

    @property
    def pids(self):
        return [pid for each in self.launchers for pid in stranger.family(each.pid)]

    @property
    def run_id(self):
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it has ended
                for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    name, _, value = word.partition(b"=")
                    if name == b"TORCHELASTIC_RUN_ID":
                        return value.decode()
        return "sherd"

    def lives(self):
        return all(each.poll() is None for each in self.launchers)

    def join(self):
        for each in self.launchers:
            assert each.wait(SECONDS) == 0, self.said()

    def said(self):
        """The last words, without those of torch about every message that it did not like."""
        noise = ("frame #", "[W", "Exception raised from", "\n")
        with (self.folder / "log").open() as lines:
            return "".join([line for line in lines if not line.startswith(noise)][-40:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for each in self.launchers:
            each.terminate()
        for each in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(20)
            each.kill()
            each.wait()
        self.log.close()


class Pooled(Job):
    """On hosts that are there already."""

    def __init__(self, folder, pool, transport, **environ):
        super().__init__(folder)
        self.errors = []
        self.thread = threading.Thread(target=self._run, args=(pool, transport, environ))
        self.thread.start()

    def _run(self, pool, transport, environ):
        try:
            pool.run(train, str(self.folder), transport, env=environ)
        except BaseException as error:
            self.errors.append(error)

    def lives(self):
        return self.thread.is_alive()

    def join(self):
        self.thread.join(SECONDS)
        assert not self.errors and not self.thread.is_alive(), self.said()

    def said(self):
        return "".join(map(str, self.errors))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.tell("go")
        self.tell("stop")
        self.thread.join(SECONDS)


@pytest.fixture
def places():
    """Hosts on a bridge, without ranks."""
    made = []

    def make(count):
        try:
            made.append(_Network(count, 1, None))
        except Unsupported as error:
            pytest.skip(str(error))
        return made[-1].hosts

    yield make
    for network in made:
        network.close()


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o755)
    return tmp_path


def one_machine(job, here, there, rounds):
    """A stranger next door, and another user on loopback."""

    def look():
        ports = stranger.tcp_ports(job.pids)
        beyond = [port for port in ports if not ipaddress.ip_address(port[0]).is_loopback]
        assert not beyond, f"listens beyond loopback: {beyond}"
        assert ports, "something listens, or nothing was tried here"
        outside = [(here.address, port) for _, port in ports]
        assert stranger.as_nobody(stranger.reach, outside, namespace=there.namespace) == []
        return ports

    # Rank 1 is late, so rank 0 listens for it, in the midst of the handshake.
    names = job.until(lambda: stranger.abstract_sockets(job.pids), "unix socket")
    job.send([*names, *look()], here.namespace)
    job.tell("go")
    job.ready()
    ports = look()
    assert job.plant(ports, here.namespace, lies_only=True), "there is a store"
    for seed in range(rounds):
        job.send([*stranger.abstract_sockets(job.pids), *ports], here.namespace, seed)
        assert job.plant(ports, here.namespace, seed), f"no store any more:\n{job.said()}"
    held = _hold(here.namespace, ports)
    job.tell("slow")
    time.sleep(1.5)
    result = job.finish()
    assert held
    return result


def _hold(namespace, ports, count=20):
    """Slow clients, that stay for as long as what this returns."""
    found = []

    def job():
        _namespaces.enter(namespace)
        found.extend(stranger.hold(ports, count))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    return found


def test_on_one_machine_a_stranger_changes_nothing(places, folder):
    here, there = places(2)
    with Launched(folder, [(here.namespace, ["-n", "2"])], "auto") as job:
        assert one_machine(job, here, there, rounds=1)["transport"] == "host"


@pytest.mark.fuzz
@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_on_one_machine_a_stranger_changes_nothing_for_long(places, folder, transport):
    here, there = places(2)
    with Launched(folder, [(here.namespace, ["-n", "2"])], transport) as job:
        one_machine(job, here, there, rounds=10)


def test_across_machines_a_stranger_runs_nothing_and_our_own_ports_stand(hosts, folder):
    pool = hosts(2, 1)
    there = pool[0].bridge
    with Pooled(folder, pool, "c10d", SHERD_TOKEN=secrets.token_hex()) as job:
        job.tell("go")
        ready = job.ready()
        ours = [tuple(port) for each in ready for port in each["ours"]]
        addresses = [pool[number].address for number in range(2)]
        assert ours and all(port[0] in addresses for port in ours), f"sherd's own ports, on one interface each: {ours}"
        job.send(ours, there)
        held = _hold(there, ours, 200)  # more than may wait there
        job.tell("slow")  # who waits looks for a reason
        for lies_only in (True, False):
            assert job.plant([ready[0]["store"]], there, lies_only=lies_only), "there is a store"
            time.sleep(2.0)
            assert job.lives(), job.said()
        job.finish()
        assert held


@pytest.mark.fuzz
@pytest.mark.parametrize("token", ["", "t" * 32], ids=["without a token", "with one"])
def test_across_machines_nothing_is_run_whatever_is_sent_where(places, folder, token, capsys):
    first, second, third = places(3)
    options = ["-n", "1", "--nnodes", "2", "--master-addr", first.address]
    launchers = [(host.namespace, [*options, "--node-rank", str(host.number)]) for host in (first, second)]
    with Launched(folder, launchers, "c10d", SHERD_TOKEN=token) as job:
        job.tell("go")
        job.ready()
        ports = {port for _, port in stranger.tcp_ports(job.pids)}
        everywhere = [(host.address, port) for host in (first, second) for port in ports]
        reached = stranger.as_nobody(stranger.reach, everywhere, namespace=third.namespace)
        for seed in range(5):
            job.send(reached, third.namespace, seed)
            planted = job.plant(reached, third.namespace, seed)
            assert planted or seed > 0, "there is a store, at least until he has written into it"
        time.sleep(1.0)
        job.tell("stop")
        codes = [each.wait(SECONDS) for each in job.launchers]  # it may have failed; it does not hang
        assert not job.ran.exists(), "what a stranger sent was run"
        with capsys.disabled():
            print(f"\n{'with' if token else 'without'} a token the launchers ended with {codes}:\n{job.said()}")
