"""A process that ends on another host is seen at once, and one that says goodbye is not mistaken for it."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from sherd.comm.c10d.guard import Guard

ENOUGH = 10.0  # seconds; it takes a millisecond


@pytest.fixture
def server():
    return TCPStore("localhost", 0, is_master=True)


def client(server):
    return PrefixStore("outer", PrefixStore("inner", TCPStore("localhost", server.port)))


def sees_an_end(guard):
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        if guard.dead():
            return True
        time.sleep(0.001)
    return False


def watched_in_a_process(server, then):
    """Rank 0 in a forked process, which does `then` when it is watched; and the guard of rank 1 here."""
    ready, go_on = os.pipe()
    child = os.fork()
    if not child:
        try:
            guard = Guard(client(server), 0, None, True, ENOUGH)
            os.read(ready, 1)
            then(guard)
        finally:
            os._exit(0)
    watching = Guard(client(server), 1, 0, False, ENOUGH)
    assert watching.dead() == []
    os.write(go_on, b".")
    os.close(go_on)
    os.close(ready)
    return child, watching


def test_a_killed_process_is_seen(server):
    child, guard = watched_in_a_process(server, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert sees_an_end(guard)
    assert guard.dead() == [0]  # and it stays dead
    os.waitpid(child, 0)


def test_goodbye_is_no_end(server):
    child, guard = watched_in_a_process(server, lambda guard: guard.close())
    os.waitpid(child, 0)
    for _ in range(100):
        assert guard.dead() == []
        time.sleep(0.001)


def fork_and_die(_):
    """A worker of a loader outlives the rank for a while."""
    if not os.fork():
        time.sleep(ENOUGH)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_process_does_not_stand_in_for_the_rank(server):
    child, guard = watched_in_a_process(server, fork_and_die)
    os.waitpid(child, 0)
    begin = time.monotonic()
    assert sees_an_end(guard)
    assert time.monotonic() - begin < ENOUGH / 2


def test_where_ranks_cannot_be_reached_nobody_is_called_dead(server):
    store = HashStore()  # of no server
    listening = Guard(store, 0, None, True, ENOUGH)
    watching = Guard(store, 1, 0, False, ENOUGH)
    assert watching.dead() == []
    server.set("guard/0", '["127.0.0.1", 9]')  # nobody is there
    assert Guard(server, 1, 0, False, ENOUGH).dead() == []
    assert Guard(server, 1, 7, False, 0.1).dead() == []  # it never came
    listening.close()
    watching.close()
