"""Private memory of peers that is read in place: the same bits as through staging chunks, and never of a rank that
gave up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from hashlib import sha256

import pytest
import torch

from sherd import CommOptions, comm
from sherd.comm.host import remote_reader
from sherd.errors import PeerLost, SherdError
from sherd.patches.process import heap
from sherd.testing import run_ranks
from tests.helpers.comm_reference import reduced, tensor_of

pytestmark = pytest.mark.ranks

LARGE = 3 * (1 << 20)  # elements; contributions and slices of them are more than the ring of chunks holds


def moved(allowed, dtype):
    """Everything that a rank gets of large operations, by its digest, and the chunks that it staged for them."""
    if not allowed:
        remote_reader.can_read = lambda pid, address, value: False
    c = comm.connect(CommOptions(transport="host", timeout=60))
    x = tensor_of(c.rank, (LARGE,), dtype, seed=1)
    results = [c.reduce_scatter(x, op="mean" if x.is_floating_point() else "sum").wait()]
    before = c._streams._large.written
    results.append(c.all_gather(x).wait())
    results.append(c.all_to_all(x).wait())
    results.append(c.broadcast(x.clone(), root=1).wait())
    staged = c._streams._large.written - before
    total = reduced([tensor_of(r, (LARGE,), dtype, seed=1) for r in range(c.world)], c.tree.group)
    exact = x.is_floating_point() or torch.equal(results[0], total.view(c.world, -1)[c.rank])
    whole = torch.cat([tensor_of(r, (LARGE,), dtype, seed=1) for r in range(c.world)])
    assert torch.equal(results[1], whole)
    return [sha256(result.view(torch.uint8).numpy()).digest() for result in results], staged, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("world", [2, 3])
def test_reading_in_place_gives_the_bits_that_staging_gives(world, dtype):
    peeked = run_ranks(moved, world, True, dtype, timeout=60)
    staged = run_ranks(moved, world, False, dtype, timeout=60)
    for one, other in zip(peeked, staged, strict=True):
        assert one[0] == other[0]
        assert one[1] == 0
        assert other[1] > 0
        assert one[2]
        assert other[2]


def converted():
    c = comm.connect(CommOptions(transport="host", timeout=60))
    x = tensor_of(c.rank, (LARGE,), torch.float32, seed=2)
    out = c.all_gather(x, dtype=torch.bfloat16).wait()
    return torch.equal(out, torch.cat([tensor_of(r, (LARGE,), torch.float32, seed=2) for r in range(2)]).bfloat16())


def test_parts_that_are_converted_on_the_way():
    assert run_ranks(converted, 2, timeout=60) == [True, True]


def given_up(how):
    """Rank 1 reads what rank 0 lends, and gives up before rank 0 has done so; its memory is used for something else."""
    c = comm.connect(CommOptions(transport="host", timeout=60))
    x = torch.full((LARGE,), float(c.rank))
    c.barrier().wait()
    handle = c.all_gather(x)
    if c.rank == 1:
        while c._board.words[c._board.posted[0]] < handle.base:
            pass
        assert not handle.done()
        if how == "close":
            c.close()
        else:
            c._scheduler.abandon(KeyboardInterrupt())
        x.fill_(77.0)
        return "gave up"
    while not c._board.failures():
        pass
    try:
        handle.wait()
    except PeerLost as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["close", "error"])
def test_what_a_rank_that_gave_up_had_lent_is_not_used(how):
    error, _ = run_ranks(given_up, 2, how, timeout=60)
    assert re.search(r"rank 1 on \S+ \(pid \d+\)", error), error


def test_a_process_is_known_by_its_word():
    address, value = remote_reader.MINE
    assert remote_reader.can_read(os.getpid(), address, value)
    assert not remote_reader.can_read(os.getpid(), address, value + 1)
    assert not remote_reader.can_read(os.getpid(), 8, value)
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    assert not remote_reader.can_read(child.pid, address, value)


class Nobody:
    """A board on which all are well, and a waiter that finds nothing wrong."""

    def all_well(self):
        return True

    def check(self, needed):
        pass


@pytest.mark.pure
def test_memory_that_cannot_be_read_is_an_error():
    with pytest.raises(SherdError, match=rf"memory of process {os.getpid()}: Bad address"):
        remote_reader.RemoteReader([os.getpid()], Nobody(), Nobody()).read(0, 8, torch.zeros(4))


_FAULTS = """
import resource, torch
from sherd.patches.process import heap
heap.install()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(3_000_000) for _ in range(8)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
step()
print(min(step() for _ in range(3)))
"""


ASKED = {"SHERD_KEEP_FREED_MEMORY": "1"}


@pytest.mark.pure
def test_freed_memory_is_nobodys_business_unless_asked(monkeypatch):
    monkeypatch.delenv("SHERD_KEEP_FREED_MEMORY", raising=False)
    monkeypatch.setattr(heap, "_set_limits", lambda *_, **__: pytest.fail("nobody has asked"))
    heap.install()


@pytest.mark.parametrize(
    ("environment", "kept"), [(ASKED, True), ({**ASKED, "MALLOC_MMAP_THRESHOLD_": "65536"}, False)]
)
def test_freed_memory_is_kept_if_the_user_asks_for_it(environment, kept):
    inherited = {k: v for k, v in os.environ.items() if k not in (*heap._CHOICES, "GLIBC_TUNABLES")}
    faults = int(subprocess.check_output([sys.executable, "-c", _FAULTS], env={**inherited, **environment}))
    pages = 8 * 12_000_000 // 4096
    assert faults < pages / 10 if kept else faults > pages / 2
