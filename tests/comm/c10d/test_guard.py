"""A process that ends on another host is seen at once, and one that says goodbye is not mistaken for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

import sherd.comm.meeting.guard
from sherd.comm.meeting.guard import Guard
from tests.helpers.processes import eventually

pytestmark = pytest.mark.fake

ENOUGH = 10.0  # seconds; it takes a millisecond


@pytest.fixture
def server():
    return TCPStore("localhost", 0, is_master=True)


def client(server):
    return PrefixStore("outer", PrefixStore("inner", TCPStore("localhost", server.port)))


def watching(store, door):
    guard = Guard(store, 0, False)
    assert guard.seeks == 0
    guard.watch(door)
    assert guard.seeks is None
    return guard


def sees_an_end(guard, within=ENOUGH):
    return eventually(guard.dead, within)


def watched_in_a_process(server, then):
    """Rank 0 in a forked process, which does `then` when it is watched; and the guard of rank 1 here."""
    ready, go_on = os.pipe()
    child = os.fork()
    if not child:
        try:
            store = client(server)
            guard = Guard(store, None, True)
            store.set("door", json.dumps(guard.door))
            os.read(ready, 1)
            then(guard)
        finally:
            os._exit(0)
    store = client(server)
    guard = watching(store, json.loads(store.get("door")))
    assert not sees_an_end(guard, 0.02)
    os.write(go_on, b".")
    os.close(go_on)
    os.close(ready)
    return child, guard


@pytest.mark.ranks
def test_a_killed_process_is_seen(server):
    child, guard = watched_in_a_process(server, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert sees_an_end(guard)
    assert guard.dead() == [0]  # and it stays dead
    os.waitpid(child, 0)


@pytest.mark.ranks
def test_goodbye_is_no_end_and_everyone_hears_it(server):
    child, guard = watched_in_a_process(server, lambda guard: guard.close())
    os.waitpid(child, 0)
    assert not sees_an_end(guard, 0.1)
    listening = Guard(server, None, True)
    guards = [watching(server, listening.door) for _ in range(3)]
    listening.close()
    assert not any(sees_an_end(guard, 0.05) for guard in guards)


def fork_and_die(_):
    """A worker of a loader outlives the rank for a while."""
    if not os.fork():
        time.sleep(ENOUGH)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
def test_a_forked_process_does_not_stand_in_for_the_rank(server):
    child, guard = watched_in_a_process(server, fork_and_die)
    os.waitpid(child, 0)
    assert sees_an_end(guard, ENOUGH / 2)


def test_a_connection_that_something_else_closes_is_made_again(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guard = watching(server, ("127.0.0.1", listener.getsockname()[1]))
        for _ in range(3):
            caller, _ = listener.accept()
            caller.close()
            assert not sees_an_end(guard, 0.02)
    assert sees_an_end(guard)  # now nobody is there


@pytest.mark.parametrize("door", [None, ("127.0.0.1", 9), ("no such host", 9)])
def test_who_was_never_reached_is_not_called_dead(server, door):
    assert not sees_an_end(watching(server, door), 0.05)


def test_where_there_is_no_way_to_the_others_there_is_no_door(monkeypatch):
    assert Guard(HashStore(), None, True).door is None
    for host in ("::ffff:127.0.0.1", "no such host", "a" * 300):
        monkeypatch.setattr(sherd.comm.meeting.guard, "server_of", lambda store, host=host: host)
        guard = Guard(HashStore(), None, True)
        assert guard.door is None or guard.door[0] == ""
        guard.close()


def test_on_the_host_of_the_store_the_door_is_at_its_address(server):
    guard = Guard(server, None, True)
    assert guard.door[0] == ""  # not 127.0.0.1, which is another place on every host
    guard.close()


def test_a_guard_that_is_closed_in_the_middle_of_a_look_says_nothing(server):
    listening = Guard(server, None, True)
    guard = watching(server, listening.door)
    connection = guard._connection
    guard.close()
    guard._look(connection)
    assert guard.dead() == []
    listening.close()
