"""torch.distributed with sherd's backend as the default group, and one of gloo to compare with."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

import sherd  # noqa: F401 - makes the backend known
from sherd import CommOptions


@contextmanager
def backend(transport="host", timeout=40, gloo=True):
    """The default group is sherd's; yields one of gloo with the same ranks."""
    dist.init_process_group("sherd", pg_options=CommOptions.from_env(transport=transport, timeout=timeout))
    try:
        assert dist.get_backend() == "sherd"
        assert dist.group.WORLD.communicator.transport == transport
        # Not where groups are started again: gloo then reads what its last one left in the store, and waits for ever.
        yield dist.new_group(backend="gloo") if gloo else None
    finally:
        dist.destroy_process_group()


def in_two_threads(steps, begun=0):
    """A group that another thread uses while the main thread uses the default one.

    The other thread first completes `begun` calls that the main thread has made.
    """
    other, world = dist.new_group(), dist.get_world_size()
    works = [dist.all_reduce(torch.full((30_000,), float(n)), group=other, async_op=True) for n in range(begun)]
    found = []

    def talk():
        for work in works:
            found.append(work.result()[0][-1].item())
        for step in range(steps):
            found.append(summed(step, other))

    thread = threading.Thread(target=talk)
    thread.start()
    for step in range(steps):
        assert summed(step) == world * step
    thread.join()
    assert found == [world * step for step in (*range(begun), *range(steps))]
    assert summed(1, other) == world


def summed(value, group=None):
    """The sum over the ranks of a tensor full of a number, by its last element."""
    x = torch.full((20_000,), float(value))
    dist.all_reduce(x, group=group)
    return x[-1].item()
