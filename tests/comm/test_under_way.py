"""Many operations under way at once: random mixtures against the reference, and the cases that once went wrong."""

from __future__ import annotations

import random
import time

import pytest
import torch

from sherd import CommOptions, comm
from sherd.errors import ConfigError, Diverged, PeerLost
from tests.comm.test_operations import SPINNING
from tests.helpers.comm_reference import reduced, tensor_of

SMALL_CHUNKS = {"chunk_bytes": 4096, "chunks": 2}
SIZES = (0, 1, 7, 64, 1023, 5460, 8193, 16_000, 16_385, 40_001, 300_000)
KINDS = ("all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "message")
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MIXED = 1.2  # seconds of a mixture
ROUNDS = 3  # and at least as many of 25 operations, on a machine however slow


class Mixture:
    """Issues the same random operations on every rank, waits for them in an order of each rank's own, checks each."""

    def __init__(self, c, seed):
        self.c = c
        self.same = random.Random(seed)
        self.own = random.Random(1000 * seed + c.rank)
        self.buffer = c.shared_buffers(2_000_000)[c.host.rank] if c.shares_memory else None
        self.used = 0
        self.pending = []
        self.issued = 0

    def place(self, x):
        """`x` as a private tensor, or in memory that peers can read."""
        numel = -(-x.numel() * x.element_size() // 64) * 16
        if self.buffer is None or self.own.random() < 0.5 or not x.numel() or self.used + numel > self.buffer.numel():
            return x.clone()
        lent = self.buffer[self.used : self.used + numel].view(x.dtype)[: x.numel()]
        self.used += numel
        return lent.copy_(x)

    def issue(self):
        c, world, rank = self.c, self.c.world, self.c.rank
        kind = self.same.choice(
            ("all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "message")
        )
        numel, dtype, seed = self.same.choice(SIZES), self.same.choice(DTYPES), self.same.randrange(1 << 20)
        if kind in ("reduce_scatter", "all_to_all"):
            numel -= numel % world
        inputs = [tensor_of(r, (numel,), dtype, seed) for r in range(world)]
        first, second = self.same.sample(range(world), 2)
        x = self.place(inputs[rank])
        if kind == "all_reduce":
            in_place = self.own.random() < 0.5
            self.add(kind, c.all_reduce(x, x if in_place else None), reduced(inputs, c.tree.group))
        elif kind == "reduce_scatter":
            self.add(kind, c.reduce_scatter(x), reduced(inputs, c.tree.group).view(world, -1)[rank])
        elif kind == "all_gather":
            self.add(kind, c.all_gather(x), torch.cat(inputs))
        elif kind == "all_to_all":
            self.add(kind, c.all_to_all(x), torch.cat([y.view(world, -1)[rank] for y in inputs]))
        elif kind == "broadcast":
            self.add(kind, c.broadcast(x, first), inputs[first])
        elif rank == first:
            self.add(kind, c.send(x, second), inputs[first])
        elif rank == second:
            self.add(kind, c.recv(self.place(torch.zeros_like(x)), first), inputs[first])

    def add(self, kind, handle, expected):
        self.issued += 1
        self.pending.append(((self.issued, kind, expected.shape, expected.dtype), handle, expected))

    def finish(self, index):
        what, handle, expected = self.pending.pop(index)
        found = handle.wait()
        assert torch.equal(found, expected), (what, int((found != expected).sum()))

    def run(self, seconds):
        end = time.monotonic() + seconds
        rounds = 0
        while rounds < ROUNDS or not self.c.broadcast_object(time.monotonic() > end):
            for _ in range(25):
                self.issue()
                chance = self.own.random()
                if self.pending and chance < 0.3:
                    self.finish(self.own.randrange(len(self.pending)))
                elif self.pending and chance < 0.5:
                    self.own.choice(self.pending)[1].done()
            while self.pending:
                self.finish(self.own.randrange(len(self.pending)))
            self.used = 0
            rounds += 1
        return self.issued


def mixture(options, seed, seconds):
    with comm.connect(CommOptions(timeout=30, **options)) as c:
        issued = Mixture(c, seed).run(seconds)
        c.barrier().wait()
        return issued


@pytest.mark.parametrize(("world", "chunks"), [(2, 2), (3, 1), (4, 2)])
def test_a_mixture_over_the_host_transport(ranks, world, chunks):
    options = {"transport": "host", "group": 2, "chunk_bytes": 4096, "chunks": chunks}
    assert min(ranks(world).run(mixture, options, world, MIXED, env=SPINNING)) > 25


def test_a_mixture_over_the_host_transport_with_default_chunks(ranks):
    assert min(ranks(3).run(mixture, {"transport": "host"}, 5, MIXED)) > 25


def test_a_mixture_over_c10d(ranks):
    assert min(ranks(3).run(mixture, {"transport": "c10d", "group": 2}, 6, MIXED)) > 25


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_long_mixtures(ranks, world, seed):
    options = {"transport": "host", "group": 2, **SMALL_CHUNKS}
    assert min(ranks(world).run(mixture, options, 100 + seed, 8.0)) > 25


def crossed_waits(transport):
    """A message waited for while a collective is under way, and the other way round, over two communicators."""
    with comm.connect(CommOptions(transport=transport, timeout=30)) as c:
        big, token = torch.ones(3_000_000), torch.zeros(1)
        handle = c.all_reduce(big)
        if c.rank == 0:
            c.recv(token, 1).wait()
            handle.wait()
        else:
            handle.wait()
            c.send(token + 5, 0).wait()
        if c.transport == "host":
            other = c.subgroup([0, 1])
            both = [c.all_reduce(big), other.all_reduce(big)]
            for one in both if c.rank else reversed(both):
                assert one.wait()[0] == 2
            other.close()
        return token.item()


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_nobody_waits_in_a_circle(ranks, transport):
    assert ranks(2).run(crossed_waits, transport) == [5.0, 0.0]


def messages_in_any_order(transport):
    with comm.connect(CommOptions(transport=transport, timeout=30)) as c:
        sizes = (400_000, 3, 0, 200_000, *range(1, 20))
        if c.rank == 0:
            for handle in [c.send(torch.full((n,), float(i)), 1) for i, n in enumerate(sizes)]:
                handle.wait()
        else:
            handles = [c.recv(torch.empty(n), 0) for n in sizes]
            for i in reversed(range(len(sizes))):
                assert torch.equal(handles[i].wait(), torch.full((sizes[i],), float(i))), i
        c.barrier().wait()


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_messages_keep_their_order_however_they_are_waited_for(ranks, transport):
    ranks(2).run(messages_in_any_order, transport)


def partly_in_place():
    with comm.connect(CommOptions(transport="host", timeout=30)) as c:
        shared = c.shared_tensor(2, 50_000)
        mine = torch.full((1, 50_000), c.rank + 1.0)
        if c.rank == 0:
            shared[0] = 1.0
            mine = shared[:1]
        c.all_gather(mine, shared).wait()
        result = shared[:, -1].tolist()
        c.barrier().wait()
        other = c.shared_tensor(2, 50_000)
        with pytest.raises(Diverged, match="into shared tensor 1 at byte 0"):
            c.all_gather(mine, other if c.rank else shared).wait()
        return result


def test_one_rank_may_write_in_place_but_all_must_mean_the_same_tensor(ranks):
    assert ranks(2).run(partly_in_place) == [[1.0, 2.0]] * 2


class Fails(comm.Codec):
    """Fails on one rank."""

    name = "fails"

    def __init__(self, now):
        self.now = now

    def wire_bytes(self, numel):
        return numel

    def encode(self, source, wire):
        if self.now:
            raise ValueError("a bug in the codec")
        wire.zero_()

    def decode(self, wire, target):
        target.zero_()


def failing_codec(transport):
    c = comm.connect(CommOptions(transport=transport, timeout=30))
    try:
        c.all_gather(torch.ones(1000), codec=Fails(c.rank == 1)).wait()
        c.barrier().wait()
    except (comm.CodecFailed, PeerLost) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_codec_that_fails_on_one_rank_is_an_error_on_all(ranks, transport):
    (lost, text), (failed, reason) = ranks(2).run(failing_codec, transport)
    assert (lost, failed) == ("PeerLost", "CodecFailed")
    for words in (text, reason):
        assert "codec fails could not encode 1000 elements of torch.float32: ValueError: a bug in the codec" in words
    assert "rank 1 on" in text


def raises_in_the_block(transport):
    try:
        with comm.connect(CommOptions(transport=transport, timeout=30)) as c:
            c.barrier().wait()
            if c.rank == 0:
                raise ValueError("the loss is not a number")
            c.barrier().wait()
    except (ValueError, PeerLost) as error:
        return str(error)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_others_hear_why_a_rank_left(ranks, transport):
    assert "the loss is not a number" in ranks(2).run(raises_in_the_block, transport)[1]


def different_options():
    import os

    try:
        comm.connect(CommOptions(chunks=2 + int(os.environ["RANK"])))
    except ConfigError as error:
        return str(error)


def test_ranks_must_agree_on_the_options(ranks):
    for text in ranks(2).run(different_options):
        assert "chunks is 2 on rank 0 and 3 on rank 1" in text
