"""The cluster transport: hosts by label on one machine, against one process and against flat c10d, bit for bit."""

from __future__ import annotations

import weakref

import pytest
import torch

from sherd import CommOptions, comm
from sherd.errors import Diverged, PeerLost, Unsupported
from tests.comm import test_leaks, test_operations, test_under_way
from tests.comm.test_under_way import MIXED, mixture
from tests.helpers.comm_reference import reduced, tensor_of
from tests.helpers.hosts import on_hosts
from tests.helpers.log_lines import log_lines

SMALL_CHUNKS = test_operations.SMALL_CHUNKS
CLUSTER = {"transport": "cluster", **SMALL_CHUNKS}


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 1), (2, 3)])
def test_every_operation(ranks, hosts, local):
    ranks(hosts * local).run(on_hosts, local, test_operations.every_operation, CLUSTER, local)


def test_every_operation_with_default_chunks(ranks):
    ranks(4).run(on_hosts, 2, test_operations.every_operation, {"transport": "cluster"}, 2)


def test_reductions_codecs_and_output_dtypes(ranks):
    ranks(4).run(on_hosts, 2, test_operations.reductions_codecs_and_dtypes, "cluster")


def test_a_codec_with_blocks_gives_the_same_bits_as_over_c10d(ranks):
    ours = ranks(4).run(on_hosts, 2, test_operations.codec_with_blocks, "cluster")
    flat = ranks(4).run(on_hosts, 2, test_operations.codec_with_blocks, "c10d")
    for mine, theirs in zip(ours, flat, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_tensors_larger_than_any_buffer(ranks):
    ranks(4).run(on_hosts, 2, test_operations.larger_than_any_buffer, "cluster")


def test_the_own_part_of_a_reduce_scatter_may_lie_elsewhere(ranks):
    for numel in (5, 40_000, 700_000):
        for codec in (None, comm.Cast(torch.bfloat16)):
            ranks(4).run(on_hosts, 2, test_operations.reduce_with_own, "cluster", numel, torch.float32, codec)


def test_released_inputs_may_be_used_again(ranks):
    ranks(4).run(on_hosts, 2, test_operations.reuse_inputs, "cluster")


def test_more_operations_may_be_under_way_than_there_are_headers(ranks):
    ranks(4).run(on_hosts, 2, test_operations.many_under_way, "cluster")


def test_bad_arguments_are_refused_before_anything_is_sent(ranks):
    ranks(2).run(on_hosts, 1, test_operations.bad_arguments, "cluster")


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 1), (2, 3)])
def test_a_mixture(ranks, hosts, local):
    assert min(ranks(hosts * local).run(on_hosts, local, mixture, CLUSTER, hosts, MIXED)) > 15


def test_a_mixture_with_default_chunks(ranks):
    assert min(ranks(4).run(on_hosts, 2, mixture, {"transport": "cluster"}, 7, MIXED)) > 15


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 4), (4, 2)])
def test_long_mixtures(ranks, hosts, local, seed):
    assert min(ranks(hosts * local).run(on_hosts, local, mixture, CLUSTER, 100 + seed, 8.0)) > 15


@pytest.mark.parametrize("local", [1, 2])
def test_nobody_waits_in_a_circle(ranks, local):
    results = ranks(2 * local).run(on_hosts, local, crossed_waits, 2 * local - 1)
    assert results[0] == 5.0


def crossed_waits(far):
    """A message waited for while a collective is under way on one side, and after it on the other."""
    with comm.connect(CommOptions(transport="cluster", timeout=30)) as c:
        big, token = torch.ones(3_000_000), torch.zeros(1)
        handle = c.all_reduce(big)
        if c.rank == 0:
            c.recv(token, far).wait()
        assert handle.wait()[0] == c.world
        if c.rank == far:
            c.send(token + 5, 0).wait()
        other = c.subgroup(range(c.world))
        both = [c.all_reduce(big), other.all_reduce(big)]
        for one in both if c.rank else reversed(both):
            assert one.wait()[0] == c.world
        c.barrier().wait()
        other.close()
        return token.item()


@pytest.mark.parametrize("local", [1, 2])
def test_messages_keep_their_order(ranks, local):
    ranks(2).run(on_hosts, local, test_under_way.messages_in_any_order, "cluster" if local == 1 else "host")


def groups():
    with comm.connect(CommOptions(transport="cluster")) as c:
        assert c.all_gather_object({"rank": c.rank, "long": "x" * c.rank * 3000}) == [
            {"rank": r, "long": "x" * r * 3000} for r in range(c.world)
        ]
        assert c.broadcast_object(["from", c.rank], root=2) == ["from", 2]
        within, spread, one = c.subgroup([2, 3]), c.subgroup([0, 1, 3]), c.subgroup([1])
        assert [g and (g.transport, g.rank, g.world) for g in (within, spread, one)] == [
            ("host", c.rank - 2, 2) if c.rank >= 2 else None,
            ("c10d", [0, 1, None, 2][c.rank], 3) if c.rank != 2 else None,
            ("solo", 0, 1) if c.rank == 1 else None,
        ]
        for group, members in ((within, [2, 3]), (spread, [0, 1, 3]), (one, [1])):
            if group:
                assert group.all_gather(torch.tensor([c.rank])).wait().tolist() == members
                group.close()
        c.barrier().wait()


def test_objects_and_subgroups(ranks):
    ranks(4).run(on_hosts, 2, groups)


def shared_memory(numel):
    with comm.connect(CommOptions(transport="cluster", **SMALL_CHUNKS)) as c:
        rank, world, host = c.rank, c.world, c.host
        assert (host.transport, host.rank, host.world) == ("host", rank % 2, 2)
        inputs = [tensor_of(r, (numel * world,), torch.float32) for r in range(world)]
        buffers = c.shared_buffers(numel * world)
        assert len(buffers) == host.world
        lent = buffers[host.rank].copy_(inputs[rank])
        expected = reduced(inputs, 2).chunk(world)
        test_operations.same(c.reduce_scatter(lent).wait(), expected[rank], "lent reduce_scatter")
        test_operations.same(c.all_reduce(lent).wait(), torch.cat(expected), "lent all_reduce")
        whole = c.shared_tensor(world, numel)
        c.all_gather(expected[rank].view(1, -1), whole).wait()
        test_operations.same(whole, torch.stack(expected), "into a shared tensor")
        c.barrier().wait()
        before = c.host.counters.total().payload
        whole[rank] += 1  # only this rank's slice, in memory that its neighbour maps too
        assert c.publish(whole[rank : rank + 1], whole).wait() is whole
        test_operations.same(whole, torch.stack(expected) + 1, "published")
        assert c.host.counters.total().payload == before  # nothing moved inside the host
        c.barrier().wait()
        if rank == 0:
            whole.fill_(7)  # of this host alone
        c.barrier().wait()
        return whole[0, 0].item()


@pytest.mark.parametrize("numel", [3, 40_000])
def test_shared_memory_is_that_of_a_host(ranks, numel):
    values = ranks(4).run(on_hosts, 2, shared_memory, numel)
    assert values[:2] == [7.0, 7.0]
    assert 7.0 not in values[2:]


def publishing(transport):
    with comm.connect(CommOptions(transport=transport)) as c:
        whole = torch.zeros(c.world * 3) if transport == "c10d" else c.shared_tensor(c.world * 3)
        mine = whole[3 * c.rank : 3 * c.rank + 3].fill_(c.rank + 1.0)
        c.publish(mine, whole).wait()
        private = torch.zeros(c.world, 2)
        c.publish(torch.full((1, 2), float(c.rank)), private).wait()
        c.barrier().wait()
        return whole.tolist(), private[:, 1].tolist(), c.host.world


@pytest.mark.parametrize(("transport", "sharing"), [("host", 4), ("cluster", 2), ("c10d", 1)])
def test_every_transport_publishes(ranks, transport, sharing):
    local = 4 if transport == "host" else 2
    expected = [r + 1.0 for r in range(4) for _ in range(3)], [0.0, 1.0, 2.0, 3.0], sharing
    assert ranks(4).run(on_hosts, local, publishing, transport) == [expected] * 4


def other_shared_tensor():
    with comm.connect(CommOptions(transport="cluster", timeout=30)) as c:
        tensors = [c.shared_tensor(4, 2), c.shared_tensor(4, 2)]
        with pytest.raises(Diverged, match="into shared tensor 1 at byte 0"):
            c.all_gather(torch.ones(1, 2), tensors[c.rank // 2]).wait()


def test_all_hosts_must_mean_the_same_shared_tensor(ranks):
    ranks(4).run(on_hosts, 2, other_shared_tensor)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 1), (2, 3)])
def test_what_crosses_the_network_is_the_formula(ranks, hosts, local):
    world, slice_bytes = hosts * local, 4096 * 4
    for rank, payload in enumerate(ranks(world).run(on_hosts, local, counted)):
        crossing = (hosts - 1) * slice_bytes
        assert payload["reduce_scatter"] == payload["all_gather"] == crossing
        assert payload["all_reduce"] == 2 * crossing
        assert payload["all_to_all"] == local * crossing
        assert payload["broadcast"] == (world * crossing if rank in (0, world - 1) else 0)
        elsewhere = rank % local == local - 1 and rank != world - 1  # it sends the sum of its host
        assert payload["reduce"] == (world * slice_bytes if elsewhere else 0)
        far = (
            local % world
        )  # the first rank of the second host: rank 0 sends it one message, and rank 0's last neighbour
        assert payload.get("send", 0) == (slice_bytes if rank == 0 and far else 0)
        assert payload["barrier"] == 0
        inside = payload["inside"]
        assert (inside > 0) == (local > 1)


def counted():
    with comm.connect(CommOptions(transport="cluster", **SMALL_CHUNKS)) as c:
        n, world = 4096 * c.world, c.world
        c.reduce_scatter(torch.ones(n)).wait()
        c.all_gather(torch.ones(4096)).wait()
        c.all_reduce(torch.ones(n)).wait()
        c.all_to_all(torch.ones(n)).wait()
        c.broadcast(torch.ones(n), world - 1).wait()
        c.reduce(torch.ones(n), root=world - 1).wait()
        whole = c.shared_tensor(n)
        assert c.broadcast(whole, 0, source=torch.ones(n) if c.rank == 0 else None).wait().sum() == n
        for to in {c.host.world - 1, c.host.world} - {0}:  # on the same host and on the next
            if c.rank in (0, to):
                (c.recv(torch.ones(4096), 0) if c.rank else c.send(torch.ones(4096), to)).wait()
        c.barrier().wait()
        assert c.counters.total().control > 0
        counts = {name: count.payload for name, count in c.counters.by_operation.items()}
        return {**counts, "inside": c.host.counters.total().payload}


def chosen(options):
    with log_lines() as lines:
        try:
            with comm.connect(CommOptions(**options)) as c:
                return c.transport, c.tree.group, lines
        except Unsupported as error:
            return str(error)


def test_which_hosts_get_it_by_themselves(ranks):
    assert ranks(4).run(on_hosts, 2, chosen, {}) == [("cluster", 2, [])] * 4
    assert ranks(4).run(on_hosts, 1, chosen, {}) == [("c10d", 1, [])] * 4
    assert ranks(4).run(on_hosts, 2, chosen, {"order": "transport"}) == [("c10d", 2, [])] * 4
    for local, options, words in (
        (2, {"group": 4}, "group=4 is not the 2 ranks of a host"),
        (3, {}, "these hold [[0, 1, 2], [3]]"),
    ):
        (_, _, said), *others = ranks(4).run(on_hosts, local, chosen, options)
        assert len(said) == 1
        assert "sherd uses c10d" in said[0]
        assert words in said[0]
        assert [name for name, _, lines in others if not lines] == ["c10d"] * 3
        refused = ranks(4).run(on_hosts, local, chosen, {**options, "transport": "cluster"})
        assert all('transport="cluster" cannot be used' in text and words in text for text in refused)
    assert all("on one host" in text for text in ranks(2).run(on_hosts, 2, chosen, {"transport": "cluster"}))


def dropped(transport):
    """A communicator that nobody holds is gone at once, and its ranks' peers hear of it."""
    c = comm.connect(CommOptions(transport=transport, timeout=30))
    c.all_reduce(torch.ones(50_000)).wait()
    gone = weakref.ref(c)
    if c.rank == 1:
        del c
        return gone() is None
    with pytest.raises(PeerLost, match=r"rank 1 on .* left"):
        c.barrier().wait()
    return True


@pytest.mark.parametrize("transport", ["cluster", "c10d"])
def test_a_dropped_communicator_is_gone_at_once(ranks, transport):
    assert all(ranks(4).run(on_hosts, 2, dropped, transport))


def test_operations_leak_nothing(ranks):
    assert max(ranks(4).run(on_hosts, 2, test_leaks.a_thousand, "cluster", 100)) < 30_000


@pytest.mark.parametrize("way", [test_leaks.connect_and_close, test_leaks.connect_and_drop])
def test_communicators_that_are_closed_or_dropped_leave_nothing(ranks, way):
    test_leaks.leave_nothing(ranks(4).run(on_hosts, 2, way, "cluster", 2))
