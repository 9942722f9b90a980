"""The interface that leads to the other hosts, from the ways that they find to the master."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from sherd.comm.meeting import network
from sherd.errors import ConfigError

pytestmark = pytest.mark.pure

CABLE, FAST, LO = ["10.0.0.2", "fd00::2"], ["192.168.7.2"], ["127.0.0.1", "::1"]


@pytest.fixture
def machine(monkeypatch):
    """A machine with these interfaces."""

    def set_up(down=(), **interfaces):
        addresses = {name: [_entry(address) for address in found] for name, found in interfaces.items()}
        stats = {
            name: SimpleNamespace(isup=name not in down, flags="up,loopback" if found == LO else "up,broadcast")
            for name, found in interfaces.items()
        }
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)

    return set_up


def _entry(address):
    return SimpleNamespace(address=address, family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def way(reached, address):
    return {"reached": reached, "address": address}


MASTER = way("127.0.1.1", "127.0.0.1")  # as seen by itself


def test_the_interface_on_the_way_to_the_master(machine):
    machine(lo=LO, eth0=CABLE, eth1=FAST)
    for address, name in (("10.0.0.2", "eth0"), ("192.168.7.2", "eth1"), ("fd00::2", "eth0")):
        mine = way("10.0.0.9", address)
        assert network.choose(mine, [MASTER, mine]) == network.Interface(name, address)


def test_a_master_whose_name_leads_to_loopback_hears_it_from_the_others(machine):
    machine(lo=LO, eth0=CABLE, eth1=FAST)
    everybody = [MASTER, way("192.168.7.2", "192.168.7.3"), way("10.0.0.2", "10.0.0.4")]
    assert network.choose(MASTER, everybody) == network.Interface("eth1", "192.168.7.2")
    assert network.choose(MASTER, [MASTER, way("::ffff:10.0.0.2", "10.0.0.4")]).name == "eth0"


def test_what_others_say_counts_only_if_the_address_is_here(machine):
    machine(lo=LO, eth0=CABLE, eth1=FAST)
    strange = [way("203.0.113.5", "10.0.0.4"), way("eth9; rm", "x"), {}]
    assert network.choose(MASTER, [MASTER, *strange]) is None  # translated addresses, and two cables: not to be told
    machine(lo=LO, eth0=CABLE)
    assert network.choose(MASTER, [MASTER, *strange]) == network.Interface("eth0", "10.0.0.2")


def test_one_machine_uses_loopback_by_its_real_name(machine):
    machine(lo7=LO, eth0=CABLE)
    assert network.choose(MASTER, [MASTER, MASTER]) == network.Interface("lo7", "127.0.0.1")
    assert network.loopback() == network.Interface("lo7", "127.0.0.1")


def test_the_interface_of_an_address_of_one_link(machine):
    machine(eth0=["fe80::2%eth0"], eth1=["fe80::2%eth1"])
    assert network.interface_of("fe80::2%eth1").name == "eth1"
    assert network.interface_of("fe80::3%eth1") is None


def test_the_way_on_this_machine():
    assert network.way_to("127.0.1.1") == {"reached": "127.0.1.1", "address": "127.0.0.1"}
    assert network.loopback() in (network.interface_of("127.0.0.1"), network.interface_of("::1"))


@pytest.mark.parametrize("name", ["no.such.host.invalid", "a..b", "x" * 70])
def test_a_name_that_does_not_resolve(name):
    with pytest.raises(ConfigError, match=r"does not resolve on this machine \(.+\); write an address"):
        network.way_to(name)
