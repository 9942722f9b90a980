"""Hosts played by network namespaces: separate, named, cut, slowed, paused and counted, and nothing left behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sherd.errors import ConfigError, Unsupported
from sherd.testing import Hosts, _namespaces
from tests.helpers.hosts import hosts_or_skip
from tests.helpers.processes import eventually

pytestmark = pytest.mark.hosts


def where():
    dist.init_process_group("gloo")
    x = torch.full((250_000,), float(dist.get_rank()))
    dist.all_reduce(x)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return socket.gethostname(), x[0].item(), [int(os.environ[name]) for name in names]


def test_ranks_are_on_hosts_with_names_and_cables_of_their_own(hosts):
    pool = hosts(2, 2)
    before = [pool[h].sent() for h in range(2)]
    results = pool.run(where)
    assert [name for name, *_ in results] == ["host0", "host0", "host1", "host1"]
    assert [total for _, total, _ in results] == [6.0] * 4
    assert [place for *_, place in results] == [[r, r % 2, 2, r // 2, 2] for r in range(4)]
    sent = [pool[h].sent() - before[h] for h in range(2)]
    assert min(sent) > 1_000_000  # gloo's ring crosses each cable with all of it, more or less
    assert socket.gethostname() not in ("host0", "host1")


def echoes(sock):
    """Answer until the other end is through."""
    while True:
        try:
            data, sender = sock.recvfrom(10)
        except TimeoutError:
            continue
        if data == b"end":
            return
        sock.sendto(data, sender)


def answers(sock, address, attempts):
    for _ in range(attempts):
        sock.sendto(b"hello", (address, 7000))
        try:
            return bool(sock.recvfrom(10))
        except (TimeoutError, ConnectionError):  # lost, or the other is not there yet
            time.sleep(0.05)
    return False


def reachable(hosts):
    """Whether host 0 hears host 1, whose cable is cut, and mended."""
    mine, other = hosts if os.environ["RANK"] == "0" else hosts[::-1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((mine.address, 7000))
        sock.settimeout(0.3)
        if mine.number == 1:
            return echoes(sock)
        found = [answers(sock, other.address, 20)]
        other.link_down()
        found.append(answers(sock, other.address, 2))
        other.link_up()
        found.append(answers(sock, other.address, 20))
        sock.sendto(b"end", (other.address, 7000))
        return found


@pytest.mark.alone
def test_a_cable_can_be_cut_and_mended():
    with hosts_or_skip(2) as hosts:
        assert hosts.run(reachable, list(hosts))[0] == [True, False, True]


def states(hosts):
    """Of the processes of all ranks, by the kernel's word, while host 1 is paused and when it goes on."""
    dist.init_process_group("gloo")
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    found = []
    if dist.get_rank() == 0:
        for change in (hosts[1].pause, hosts[1].resume):
            change()
            time.sleep(0.1)
            found.append([Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in pids])
    dist.barrier()
    return found


@pytest.mark.alone
def test_a_host_can_be_paused():
    with hosts_or_skip(2) as hosts:
        assert hosts.run(states, list(hosts))[0] == [[False, True], [False, False]]


def test_a_rate_bounds_what_a_host_sends():
    with hosts_or_skip(2, ranks_per_host=1, rate="50mbit") as hosts:
        hosts.run(where)
        assert "tbf" in _namespaces.run_inside(hosts[0].namespace, "tc", "qdisc", "show", "dev", "eth0")
        hosts[0].slow_down("20mbit")
        assert "rate 20Mbit" in _namespaces.run_inside(hosts[0].namespace, "tc", "qdisc", "show", "dev", "eth0")


def test_nothing_is_left_behind():
    threads = threading.active_count()
    with hosts_or_skip(2) as hosts:
        place = hosts[0].namespace
        assert Path(place).exists()
        hosts.run(where)
    assert eventually(lambda: not Path(place).exists())  # a thread is joined a moment before the kernel has ended it
    assert threading.active_count() <= threads
    assert not any("host0" in name for _, name in socket.if_nameindex())
    with pytest.raises(ConfigError, match="closed"):
        hosts.run(where)


@pytest.mark.pure
def test_where_namespaces_are_not_allowed_the_reason_is_said(monkeypatch):
    def refuse(name, *arguments):
        raise PermissionError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(_namespaces, "_system_call", refuse)
    with pytest.raises(Unsupported, match=r"cannot be made here: .*unshare: Operation not permitted; they need root"):
        Hosts(2)
