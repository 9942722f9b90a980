"""Training steps between hosts with real cables: their bytes, and what happens when a cable or a host fails in one."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import nn

import sherd
from sherd import CommOptions, comm
from sherd.api.training import training_of
from sherd.engine.parameters.gathered.gathering import WINDOW
from sherd.errors import SherdError
from sherd.testing import Died
from tests.comm.cluster.test_hosts import CHATTER, HEADERS, PLACES, TIMEOUT, VICTIM, WARN_AFTER, cluster_or_skip
from tests.helpers.log_lines import log_lines
from tests.helpers.processes import wait_for
from tests.helpers.training import same, weights

pytestmark = pytest.mark.hosts

STEPS = 5
FAULT = 3  # the step in which something happens


def stack(width, depth=8):
    """Equal layers, without biases: a gradient each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def distributed(c, strategy, width, layers_per_bucket=1, **options):
    model = stack(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bucket_bytes = layers_per_bucket * width * width * 4
    return sherd.distribute(model, optimizer, strategy=strategy, comm=c, bucket_bytes=bucket_bytes, **options)


def loss_of(model, step, rank):
    x = torch.randn(3, model[0].in_features, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.requires_grad_()).square().mean()  # backward uses every layer


def host_of(hosts, c):
    return hosts[c.rank * len(hosts) // c.world]


# ---------------------------------------------------------------- bytes


EXCHANGES = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
"""How often a step sends all parameters or gradients to the other hosts."""


class Sent(NamedTuple):
    """What leaves a host in STEPS steps of training."""

    cable: int  # bytes, by the cable's own count
    payloads: list[int]  # of this rank in each step, by the communicator's
    formula: int  # payload of all of a host's ranks in a step


def counted(hosts, transport, strategies):
    """What a rank's host sends, by strategy."""
    found = {}
    with comm.connect(CommOptions(transport=transport, timeout=40.0)) as c:
        for strategy in strategies:
            model, optimizer = distributed(c, strategy, width=384)
            payloads = []
            for step in range(1 + STEPS):
                if step == 1:  # the first one learns the order of buckets
                    before = on_cable(hosts, c)
                c.counters.reset()
                loss_of(model, step, c.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                payloads.append(c.counters.total().payload)
            cable, engine = on_cable(hosts, c) - before, training_of(model).engine
            # Of parameters that are gathered on use, those that forward used last are still there for backward.
            kept = 0 if engine.store.whole else WINDOW * engine.layout.buckets[0].numel
            formula = (EXCHANGES[strategy] * engine.layout.padded_numel - kept) * 4 * (len(hosts) - 1) // len(hosts)
            found[strategy] = Sent(cable, payloads[1:], formula)
    return found


def on_cable(hosts, c):
    """Bytes that have left this rank's host, while nobody sends any."""
    c.barrier().wait()
    sent = host_of(hosts, c).sent()
    c.barrier().wait()
    return sent


@pytest.mark.parametrize("transport", PLACES)
def test_a_step_sends_over_a_cable_what_the_formula_says(hosts, transport):
    count, local = PLACES[transport]
    pool = hosts(count, local)
    for found in pool.run(counted, list(pool), transport, EXCHANGES):
        for strategy, sent in found.items():
            assert sent.payloads == [sent.formula // local] * STEPS, strategy
            whole = STEPS * sent.formula
            assert whole < sent.cable < whole * (1 + HEADERS) + CHATTER, strategy


# ---------------------------------------------------------------- faults


class Meeting:
    """Ranks wait for each other by files, which no fault of a network disturbs."""

    def __init__(self, folder, rank):
        self._folder = folder
        self._rank = rank

    def attend(self, name, count):
        """Wait until `count` ranks have come."""
        (self._folder / f"{name}-{self._rank}").touch()
        wait_for(lambda: len(list(self._folder.glob(f"{name}-*"))) >= count, f"{name} of {count} ranks", 30.0)


class Told(NamedTuple):
    """What a rank got to know of a fault, and where it was."""

    error: str
    text: str
    seconds: float
    step: int
    call: str
    sent: float  # of the payload of a step, before the fault
    changed: bool  # whether the weights are others than before the step
    again: str  # the error of another step
    lines: list[str]  # warnings


def trained(hosts, folder, transport, strategy, what, victim):
    """Train, until in the middle of a backward `victim`, a host, has `what` done to it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting, local = Meeting(folder, rank), world // len(hosts)
    meeting.attend("start", world)  # imports may take longer than the timeout
    with log_lines() as lines:
        c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT, warn_after=WARN_AFTER))
        model, optimizer = distributed(c, strategy, width=192)
        hit, payloads, fault = rank // local == victim, [], []

        def break_something(_):
            if step != FAULT:
                return
            meeting.attend("middle", world)  # all ranks are in this backward, and without this one none can end it
            fault.append(c.counters.total().payload - payloads[-1])
            if what == "kill" and hit:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "cut" and hit and rank % local == 0:
                hosts[victim].link_down()
            if what == "pause" and rank == 0:
                hosts[victim].pause()
            if what == "cut" or not hit:
                meeting.attend("broken", world if what == "cut" else world - local)
            fault.append(time.monotonic())

        model[len(model) // 2].weight.register_hook(break_something)
        with pytest.raises(SherdError) as caught:
            for step in range(STEPS):
                payloads.append(c.counters.total().payload)
                before, call = whole_weights(model), "forward"
                loss = loss_of(model, step, rank)
                call = "backward"
                loss.backward()
                call = "step"
                optimizer.step()
                optimizer.zero_grad()
        sent, began = fault
        seconds = time.monotonic() - began
        if what == "pause" and rank == 0:
            time.sleep(1.0)  # the others give up at the same time, more or less
            hosts[victim].resume()
        with pytest.raises(SherdError) as again:
            optimizer.step()
        return Told(
            error=type(caught.value).__name__,
            text=str(caught.value),
            seconds=seconds,
            step=step,
            call=call,
            sent=sent / (payloads[2] - payloads[1]),
            changed=any(not torch.equal(*pair) for pair in zip(whole_weights(model), before, strict=True)),
            again=str(again.value),
            lines=[line for line in lines if "has waited" in line],
        )


def whole_weights(model):
    """Copies of weights; of the slices that a rank has, where it does not have more."""
    store, buckets = training_of(model).engine.store, training_of(model).engine.buckets.buckets
    return [
        each.detach().clone()
        for each in (model.parameters() if store.whole else [bucket.values.owned for bucket in buckets])
    ]


def blamed(told):
    """The hosts of which an error says that they did not reach the call, or were lost."""
    headline = re.split("did not reach this call|was lost|ended", told.text)[0].rpartition("reports: ")[2]
    return set(re.findall(r"rank \d+ on (host\d+) \(pid \d+\)", headline))


def late(lines):
    """The hosts that were waited for, by these warnings."""
    return {host for line in lines for host in re.findall(r"has waited [\d.]+ s for rank \d+ on (host\d+) \(pid", line)}


def check_blame(results, culprits):
    """Ranks are told of `culprits`, hosts, and of nobody else."""
    assert all(blamed(told) and blamed(told) <= culprits for told in results), results


STRATEGIES = ("ddp", "zero2", "zero3")
CUTS = [("cut", transport, strategy) for transport in PLACES for strategy in STRATEGIES]
PAUSES = [("pause", "cluster", "ddp"), ("pause", "c10d", "zero3")]
KILLS = [("kill", "cluster", "zero3"), ("kill", "c10d", "zero2")]
AT_ONCE = 5


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory):
    """What the ranks of a case were told. Several cases run at once, as all that most of them do is wait."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        cases = [*CUTS, *PAUSES, *KILLS]
        yield {case: threads.submit(after, tmp_path_factory.mktemp("meeting"), *case) for case in cases}


def after(folder, what, transport, strategy):
    """What the ranks were told of the fault: those of the hosts that were not hit, and those of the one that was."""
    count, local = PLACES[transport]
    killed = range(VICTIM * local, (VICTIM + 1) * local) if what == "kill" else ()
    with cluster_or_skip(count, local) as hosts:
        arguments = (list(hosts), folder, transport, strategy, what, VICTIM)
        results = hosts.run(trained, *arguments, expected_exits=dict.fromkeys(killed, -signal.SIGKILL))
        hosts[VICTIM].link_up()
    first = VICTIM * local
    return [*results[:first], *results[first + local :]], results[first : first + local]


def check(told):
    """An error in the middle of the step, which is not forgotten, and nothing updated."""
    assert (told.step, told.call) == (FAULT, "backward"), told
    assert 0 < told.sent < 1, told
    assert told.seconds < 2 * TIMEOUT + 1, told
    assert not told.changed, told
    assert told.again, told


@pytest.mark.alone
@pytest.mark.parametrize("case", CUTS, ids="-".join)
def test_a_cable_cut_in_the_middle_of_a_step(aftermath, case):
    _, transport, _ = case
    here, beyond = aftermath[case].result()
    for told in (*here, *beyond):
        check(told)
        assert told.error in ("TimedOut", "PeerLost"), told
    others = {f"host{number}" for number in range(PLACES[transport][0])} - {"host1"}
    check_blame(here, {"host1"})
    check_blame(beyond, others)


@pytest.mark.alone
@pytest.mark.parametrize("case", PAUSES, ids="-".join)
def test_a_host_paused_in_the_middle_of_a_step(aftermath, case):
    here, paused = aftermath[case].result()
    for told in (*here, *paused):
        check(told)
    assert {told.error for told in here} == {"TimedOut"}, here
    assert {told.error for told in paused} <= {"TimedOut", "PeerLost"}, paused  # they hear of it when they go on
    check_blame(here, {"host1"})
    assert "host1" in {host for told in here for host in late(told.lines)}, here


@pytest.mark.alone
@pytest.mark.parametrize("case", KILLS, ids="-".join)
def test_a_host_killed_in_the_middle_of_a_step(aftermath, case):
    here, killed = aftermath[case].result()
    assert set(killed) == {Died(-signal.SIGKILL)}
    for told in here:
        check(told)
        assert told.error == "PeerLost", told
        assert blamed(told) == {"host1"}, told
        assert told.seconds < TIMEOUT, told


SLEEPS, CRAWLS = 1, 3  # the steps in which a host computes slowly, and sends slowly


def slowed(hosts, strategy, slow):
    """Weights after training with a slow host; the warnings of this rank by step."""
    with log_lines() as lines:
        c = comm.connect(CommOptions(transport="cluster", timeout=30.0, warn_after=0.4))
        model, optimizer = distributed(c, strategy, width=192, layers_per_bucket=8)  # 1 MB in one call
        hit, warnings = host_of(hosts, c).number == VICTIM, []

        def slow_down(_):
            if slow and hit and step == SLEEPS:
                time.sleep(1.0)
            if slow and hit and step == CRAWLS and c.host.rank == 0:
                hosts[VICTIM].slow_down("4mbit")

        model[len(model) // 2].weight.register_hook(slow_down)
        for step in range(CRAWLS + 1):
            lines.clear()
            loss_of(model, step, c.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            warnings.append([line for line in lines if "has waited" in line])
        return weights(model), warnings


def test_a_slow_host_is_a_warning_that_names_it_and_training_goes_on():
    with cluster_or_skip(2, 2) as hosts:
        quick = hosts.run(slowed, list(hosts), "zero2", False)
        slow = hosts.run(slowed, list(hosts), "zero2", True)
    for found, _ in (*quick, *slow):
        same(found, quick[0][0])
    for step in (SLEEPS, CRAWLS):
        lines = [line for _, warnings in slow[:2] for line in warnings[step]]
        assert "host1" in late(lines), (step, lines)
