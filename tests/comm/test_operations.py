"""Every operation over every transport and dtype, against one process, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from sherd import CommOptions, comm
from sherd.comm.host.joining import rendezvous
from sherd.comm.summation import REDUCTIONS
from sherd.errors import ConfigError, Unsupported
from tests.helpers.comm_reference import DTYPES, OPERATORS, reduced, tensor_of
from tests.helpers.log_lines import log_lines

TRANSPORTS = ("host", "c10d")
# Small chunks, so that these tensors stream through them many times over.
SMALL_CHUNKS = {"chunk_bytes": 4096, "chunks": 2}
SPINNING = {"SHERD_SPIN": "1"}  # as outside of tests that run side by side
SHAPES = ((1,), (7, 15), (3, 0, 2), (257,), (40_001,))


def same(found, expected, what):
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert torch.equal(found, expected), (what, (found.double() - expected.double()).abs().max())


def every_operation(options, group):
    with comm.connect(CommOptions(**options, group=group)) as c:
        rank, world = c.rank, c.world
        assert c.transport == options["transport"]
        for seed, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
            what = (shape, dtype)
            mine = tensor_of(rank, shape, dtype, seed)
            all_inputs = [tensor_of(r, shape, dtype, seed) for r in range(world)]
            tall = [tensor_of(r, (world * shape[0], *shape[1:]), dtype, seed) for r in range(world)]
            total = reduced(all_inputs, group)
            same(c.all_reduce(mine).wait(), total, ("all_reduce", *what))
            same(c.all_gather(mine).wait(), torch.cat(all_inputs), ("all_gather", *what))
            slices = reduced(tall, group).chunk(world)
            same(c.reduce_scatter(tall[rank]).wait(), slices[rank], ("reduce_scatter", *what))
            pieces = torch.cat([t.chunk(world)[rank] for t in tall])
            same(c.all_to_all(tall[rank]).wait(), pieces, ("all_to_all", *what))
            root = seed % world
            same(c.broadcast(mine.clone(), root).wait(), all_inputs[root], ("broadcast", *what))
            given = mine if rank == root else None
            same(c.broadcast(torch.zeros_like(mine), root, source=given).wait(), all_inputs[root], ("source", *what))
            expected = total if rank == root else total.new_empty(0)
            same(c.reduce(mine, root=root).wait(), expected, ("reduce", *what))
            in_place = mine.clone()
            found = c.reduce(in_place, in_place if rank == root else mine.new_empty(0), root=root)
            same(found.wait(), expected, ("reduce in place", *what))
            ring = torch.empty_like(mine)
            sent, received = c.send(mine, (rank + 1) % world), c.recv(ring, (rank - 1) % world)
            same(received.wait(), all_inputs[(rank - 1) % world], ("recv", *what))
            sent.wait()
            in_place = mine.clone()
            assert c.all_reduce(in_place, in_place).wait() is in_place
            same(in_place, total, ("in place", *what))
            if mine.dim() > 1:
                gaps = mine.transpose(0, -1).contiguous().transpose(0, -1)
                assert not gaps.is_contiguous() or not gaps.numel()
                same(c.all_reduce(gaps).wait(), total, ("non-contiguous", *what))
                output = torch.empty_like(total.transpose(0, -1).contiguous()).transpose(0, -1)
                assert c.all_reduce(mine, output).wait() is output
                same(output, total, ("non-contiguous output", *what))
            c.barrier().wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world", "group"), [(2, 2), (3, 3), (4, 2)])
def test_every_operation(ranks, transport, world, group):
    ranks(world).run(every_operation, {"transport": transport, **SMALL_CHUNKS}, group, env=SPINNING)


def test_every_operation_with_default_chunks(ranks):
    ranks(3).run(every_operation, {"transport": "host"}, 1)


def reductions_codecs_and_dtypes(transport):
    with comm.connect(CommOptions(transport=transport, group=2, **SMALL_CHUNKS)) as c:
        rank, world = c.rank, c.world
        for op, dtype, numel in itertools.product(OPERATORS, DTYPES, (60, 40_000)):
            inputs = [tensor_of(r, (numel,), dtype) for r in range(world)]
            same(c.all_reduce(inputs[rank], op=op).wait(), reduced(inputs, 2, op), (op, dtype))
            expected = reduced(inputs, 2, op).chunk(world)[rank]
            same(c.reduce_scatter(inputs[rank], op=op).wait(), expected, (op, dtype))
            expected = reduced(inputs, 2, op) if rank == 1 else expected[:0]
            same(c.reduce(inputs[rank], root=1, op=op).wait(), expected, (op, dtype))
        for numel in (60, 60_000):
            inputs = [tensor_of(r, (numel,), torch.float32) for r in range(world)]
            cast = [x.bfloat16().float() for x in inputs]
            found = c.reduce_scatter(inputs[rank], codec=comm.Cast(torch.bfloat16)).wait()
            same(found, reduced(cast, 2).chunk(world)[rank], "codec")
            same(c.all_gather(inputs[rank], codec=comm.Cast(torch.bfloat16)).wait(), torch.cat(cast), "codec")
            total = reduced(cast, 2).bfloat16().float()
            same(c.all_reduce(inputs[rank], codec=comm.Cast(torch.bfloat16)).wait(), total, "codec")
            halves = [x.bfloat16() for x in inputs]
            wide = reduced(halves, 2, dtype=torch.float32)
            same(c.all_reduce(halves[rank], dtype=torch.float32).wait(), wide, "output dtype")
            same(c.reduce_scatter(halves[rank], dtype=torch.float32).wait(), wide.chunk(world)[rank], "output dtype")
            same(c.all_gather(halves[rank], dtype=torch.float32).wait(), torch.cat(halves).float(), "output dtype")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reductions_codecs_and_output_dtypes(ranks, transport):
    ranks(4).run(reductions_codecs_and_dtypes, transport)


class Runs(comm.Codec):
    """Averages of runs of three: a codec with blocks, whose result shows where a stream was cut."""

    block = 3
    name = "runs-of-three"

    def wire_bytes(self, numel):
        return 4 * -(-numel // 3)

    def encode(self, source, wire):
        padded = torch.zeros(3 * (wire.numel() // 4))
        padded[: source.numel()] = source
        wire.view(torch.float32).copy_(padded.view(-1, 3).mean(1))

    def decode(self, wire, target):
        target.copy_(wire.view(torch.float32).repeat_interleave(3)[: target.numel()])


def codec_with_blocks(transport):
    with comm.connect(CommOptions(transport=transport, **SMALL_CHUNKS)) as c:
        x = tensor_of(c.rank, (c.world * 5000,), torch.float32)
        codec = Runs()
        return [
            c.reduce_scatter(x, codec=codec).wait(),
            c.all_reduce(x, codec=codec).wait(),
            c.all_gather(x, codec=codec).wait(),
        ]


def test_a_codec_with_blocks_gives_the_same_bits_however_it_is_streamed(ranks):
    host, c10d = (ranks(2).run(codec_with_blocks, transport) for transport in TRANSPORTS)
    for ours, theirs in zip(host, c10d, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(host[0][0], host[1][0])


def asynchronous():
    with comm.connect(CommOptions(transport="host", **SMALL_CHUNKS)) as c:
        rank, world = c.rank, c.world
        tensors = [tensor_of(rank, (n,), torch.float32, seed=n) for n in (3, 5000, 64, 40_000, 1)]
        handles = [c.all_reduce(t) for t in tensors]
        messages = [c.send(tensors[3], (rank + 1) % world), c.recv(torch.empty(40_000), (rank - 1) % world)]
        handles.append(c.barrier())
        order = [4, 0, 3, 1, 2] if rank else [0, 1, 2, 3, 4]  # ranks may wait in different orders
        for i in order:
            inputs = [tensor_of(r, (tensors[i].numel(),), torch.float32, seed=tensors[i].numel()) for r in range(world)]
            same(handles[i].wait(), reduced(inputs, world), i)
            assert handles[i].done()
        assert torch.equal(messages[1].wait(), tensor_of((rank - 1) % world, (40_000,), torch.float32, seed=40_000))
        messages[0].wait()
        handles[-1].wait()
        many = [c.all_reduce(torch.tensor([float(i)])) for i in range(500)]  # more than there are headers and chunks
        assert [h.wait().item() for h in many] == [float(i * world) for i in range(500)]
        handle = c.all_reduce(torch.ones(9000))
        while not handle.done():
            pass
        assert handle.wait()[0] == world


def test_operations_may_be_under_way_together(ranks):
    ranks(3).run(asynchronous)


def shared_memory():
    with comm.connect(CommOptions(transport="host", group=2, **SMALL_CHUNKS)) as c:
        rank, world = c.rank, c.world
        for numel in (world, 8 * world, 30_000 * world):
            inputs = [tensor_of(r, (numel,), torch.float32) for r in range(world)]
            buffers = c.shared_buffers(numel)
            buffers[rank].copy_(inputs[rank])
            expected = reduced(inputs, 2)
            same(c.reduce_scatter(buffers[rank]).wait(), expected.chunk(world)[rank], "lent reduce_scatter")
            same(c.all_reduce(buffers[rank]).wait(), expected, "lent all_reduce")
            same(c.all_gather(buffers[rank]).wait(), torch.cat(inputs), "lent all_gather")
            at_root = expected if rank == 2 else expected[:0]
            same(c.reduce(buffers[rank], root=2).wait(), at_root, "lent reduce")
            pieces = torch.cat([x.chunk(world)[rank] for x in inputs])
            same(c.all_to_all(buffers[rank]).wait(), pieces, "lent all_to_all")
            # One rank lends, the others give private tensors.
            mixed = buffers[rank] if rank == 1 else inputs[rank]
            same(c.reduce_scatter(mixed).wait(), expected.chunk(world)[rank], "mixed reduce_scatter")
            same(c.all_reduce(mixed).wait(), expected, "mixed all_reduce")
            same(c.reduce(mixed, root=2).wait(), at_root, "mixed reduce")
            same(c.broadcast(mixed.clone() if rank != 1 else mixed, 1).wait(), inputs[1], "lent broadcast")
            if rank == 0:
                c.send(buffers[0], 1).wait()
            if rank == 1:
                same(c.recv(torch.empty(numel), 0).wait(), inputs[0], "lent send")
            same(c.all_reduce(buffers[rank], buffers[rank]).wait(), expected, "lent, in place")
            common = c.shared_tensor(numel)
            same(c.broadcast(common, 1, source=inputs[1] if rank == 1 else None).wait(), inputs[1], "shared broadcast")
            c.barrier().wait()
            if rank == 2:
                common.copy_(inputs[2])
            same(c.broadcast(common, 2, what="again").wait(), inputs[2], "shared broadcast in place")
            common = c.shared_tensor(world, numel)
            same(c.all_gather(inputs[rank].view(1, -1), common).wait(), torch.stack(inputs), "into a shared tensor")
            c.barrier().wait()
            common[rank] = rank
            same(c.all_gather(common[rank : rank + 1], common).wait()[:, 0], torch.arange(float(world)), "in place")
            c.barrier().wait()


def test_shared_tensors_and_buffers(ranks):
    ranks(4).run(shared_memory)


def larger_than_any_buffer(transport):
    with comm.connect(CommOptions(transport=transport, group=2)) as c:
        rank, world = c.rank, c.world
        inputs = [tensor_of(r, (world * 1_500_001,), torch.float32) for r in range(world)]
        expected = reduced(inputs, 2)
        same(c.reduce_scatter(inputs[rank]).wait(), expected.chunk(world)[rank], "reduce_scatter")
        same(c.all_gather(inputs[rank]).wait(), torch.cat(inputs), "all_gather")
        same(c.reduce(inputs[rank], root=1).wait(), expected if rank == 1 else expected[:0], "reduce")
        same(c.all_reduce(inputs[rank], inputs[rank]).wait(), expected, "all_reduce")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_larger_than_any_buffer(ranks, transport):
    ranks(3).run(larger_than_any_buffer, transport)


def objects_and_groups(transport):
    with comm.connect(CommOptions(transport=transport)) as c:
        assert c.all_gather_object({"rank": c.rank, "long": "x" * c.rank * 3000}) == [
            {"rank": r, "long": "x" * r * 3000} for r in range(c.world)
        ]
        assert c.broadcast_object(["from", c.rank], root=2) == ["from", 2]
        outer = c.subgroup([0, 2])
        inner = c.subgroup([1])
        assert (outer is None) == (c.rank == 1)
        assert (inner is None) == (c.rank != 1)
        if outer:
            assert (outer.rank, outer.world) == (c.rank // 2, 2)
            assert outer.all_gather(torch.tensor([c.rank])).wait().tolist() == [0, 2]
            outer.close()
        if inner:
            assert inner.all_reduce(torch.ones(2)).wait().tolist() == [1, 1]
            inner.close()
        c.barrier().wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_objects_and_subgroups(ranks, transport):
    ranks(3).run(objects_and_groups, transport)


def counted(transport):
    with comm.connect(CommOptions(transport=transport, **SMALL_CHUNKS)) as c:
        n, world = 4096 * c.world, c.world
        c.reduce_scatter(torch.ones(n)).wait()
        c.all_gather(torch.ones(n // world)).wait()
        c.all_reduce(torch.ones(n)).wait()
        c.all_to_all(torch.ones(n)).wait()
        c.broadcast(torch.ones(n), 1).wait()
        c.reduce_scatter(torch.ones(n), codec=comm.Cast(torch.bfloat16)).wait()
        c.reduce(torch.ones(n), root=2).wait()
        if c.rank < 2:
            (c.recv if c.rank else c.send)(torch.ones(n), 1 - c.rank).wait()
        c.barrier().wait()
        assert c.counters.total().control > 0
        return {name: count.payload for name, count in c.counters.by_operation.items()}


def many_under_way(transport):
    with comm.connect(CommOptions(transport=transport)) as ranks:
        sizes = [300_000 if index % 20 == 5 else (7, 4_000, 40_000)[index % 3] for index in range(200)]
        tensors = [tensor_of(ranks.rank, (size,), torch.float32, seed=index) for index, size in enumerate(sizes)]
        for handle in [ranks.broadcast(tensor, root=1) for tensor in tensors]:
            handle.wait()
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor, tensor_of(1, tensor.shape, torch.float32, seed=index)), index


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_more_operations_may_be_under_way_than_there_are_headers(ranks, transport):
    ranks(2).run(many_under_way, transport)
    ranks(3).run(many_under_way, transport)


def reduce_with_own(transport, numel, dtype, codec):
    with comm.connect(CommOptions(transport=transport)) as ranks:
        rank, world = ranks.rank, ranks.world
        source = tensor_of(rank, (numel * world,), dtype)
        plain = ranks.reduce_scatter(source.clone(), op="mean", codec=codec).wait()
        own = source.view(world, -1)[rank].clone()
        lent = (
            ranks.shared_buffers(numel * world, dtype=dtype)[ranks.host.rank] if ranks.shares_memory else source.clone()
        )
        for place in (source.clone(), lent):
            place.copy_(source)
            place.view(world, -1)[rank] = float("nan")  # scratch: nobody may look
            assert torch.equal(ranks.reduce_scatter(place, op="mean", codec=codec, own=own).wait(), plain)
            assert torch.equal(own, source.view(world, -1)[rank])
        if codec is None:
            plain = ranks.reduce(source.clone(), root=1, op="mean").wait()
            for place in (source.clone(), lent):
                place.copy_(source if rank != 1 else torch.full_like(source, float("nan")))
                own = source.clone() if rank == 1 else None
                assert torch.equal(ranks.reduce(place, root=1, op="mean", own=own).wait(), plain)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_the_own_part_of_a_reduce_scatter_may_lie_elsewhere(ranks, transport):
    for numel in (5, 40_000, 700_000):
        for codec in (None, comm.Cast(torch.bfloat16)):
            ranks(3).run(reduce_with_own, transport, numel, torch.float32, codec)


def reuse_inputs(transport):
    """Whatever is under way, an input that was released may be overwritten."""
    with comm.connect(CommOptions(transport=transport)) as ranks:
        lent = [torch.empty(300_000 * ranks.world) for _ in range(3)]
        if ranks.shares_memory:
            lent = [ranks.shared_buffers(300_000 * ranks.world)[ranks.host.rank] for _ in range(3)]
        inputs = [
            [tensor_of(10 * turn + r, lent[0].shape, torch.float32) for r in range(ranks.world)] for turn in range(9)
        ]
        handles = []
        for turn, place in zip(range(9), itertools.cycle(lent)):
            if turn >= len(lent):
                handles[turn - len(lent)].release()
            place.copy_(inputs[turn][ranks.rank])
            of = ranks.all_gather if turn % 4 == 3 else ranks.reduce_scatter
            handles.append(of(place))
        for turn, handle in enumerate(handles):
            whole = reduced(inputs[turn], ranks.tree.group).view(ranks.world, -1)[ranks.rank]
            assert torch.equal(handle.wait(), torch.cat(inputs[turn]) if turn % 4 == 3 else whole), turn


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_released_inputs_may_be_used_again(ranks, transport):
    ranks(3).run(reuse_inputs, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_payload_bytes_are_the_formula(ranks, transport):
    world = 4
    slice_bytes = 4096 * 4
    for rank, payload in enumerate(ranks(world).run(counted, transport)):
        assert payload["reduce_scatter"] == (world - 1) * (slice_bytes + slice_bytes // 2)
        assert payload["all_gather"] == payload["all_to_all"] == (world - 1) * slice_bytes
        assert payload["all_reduce"] == 2 * (world - 1) * slice_bytes
        assert payload["broadcast"] == ((world - 1) * world * slice_bytes if rank == 1 else 0)
        assert payload["reduce"] == (0 if rank == 2 else world * slice_bytes)
        assert payload.get("send", 0) == (world * slice_bytes if rank == 0 else 0)
        assert payload["barrier"] == 0


@pytest.mark.fake
def test_a_world_of_one_does_the_same_calls():
    with comm.connect(CommOptions()) as c:
        x = torch.randn(6, 3, requires_grad=True)
        for found in (c.all_reduce(x), c.reduce_scatter(x, op="mean"), c.all_gather(x), c.all_to_all(x)):
            assert torch.equal(found.wait(), x)
        assert torch.equal(c.all_reduce(x, codec=comm.Cast(torch.bfloat16)).wait(), x.bfloat16().float())
        assert torch.equal(c.all_gather(x, dtype=torch.float64).wait(), x.double())
        assert c.broadcast(x.detach(), 0).wait().shape == (6, 3)
        assert torch.equal(c.broadcast(torch.zeros(6, 3), source=x).wait(), x)
        assert torch.equal(c.reduce(x, root=0, op="mean").wait(), x)
        assert c.barrier().done()
        assert c.all_gather_object("me") == ["me"]
        assert c.broadcast_object("me") == "me"
        assert c.shared_tensor(2, 3).shape == (2, 3)
        assert len(c.shared_buffers(4)) == 1
        assert c.subgroup([0]).world == 1
        assert c.counters.total().payload == 0
        with pytest.raises(ConfigError, match="to=0, which is this rank itself"):
            c.send(x, 0)


def bad_arguments(transport):
    with comm.connect(CommOptions(transport=transport)) as c:
        x = torch.ones(5)
        for wrong, message in (
            (lambda: c.reduce_scatter(x), "equal parts.*pad it to a multiple of 2"),
            (lambda: c.all_reduce(x, op="sun"), "did you mean 'sum'"),
            (lambda: c.all_gather(x, torch.empty(9)), "needs an output of shape \\(10,\\)"),
            (lambda: c.all_gather(x, torch.empty(10), dtype=torch.int64), "give one of the two"),
            (lambda: c.broadcast(x, 2), "root=2; write a rank from 0 to 1"),
            (lambda: c.broadcast(x, c.rank, source=torch.ones(4)), "own has 4 elements of torch.float32, expected 5"),
            (lambda: c.reduce(x, root=2), "root=2; write a rank from 0 to 1"),
            (lambda: c.reduce(x, root=0, op="sun"), "did you mean 'sum'"),
            (lambda: c.reduce(x, torch.empty(4), root=c.rank), "needs an output of shape \\(5,\\)"),
            (lambda: c.reduce(x, torch.empty(5), root=1 - c.rank), "needs an output of shape \\(0,\\)"),
            (lambda: c.send(x, c.rank), "this rank itself"),
            (lambda: c.all_to_all(t := torch.ones(2), t), "cannot work in place"),
            (lambda: c.subgroup([1, 0]), "ascending"),
            (lambda: comm.Cast(torch.int32), "floating-point"),
        ):
            with pytest.raises(ConfigError, match=message):
                wrong()
        if not c.shares_memory:
            with pytest.raises(Unsupported, match="shares_memory"):
                c.shared_tensor(3)
        # None of these broke anything.
        assert c.all_reduce(x).wait().tolist() == [2.0] * 5


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bad_arguments_are_refused_before_anything_is_sent(ranks, transport):
    ranks(2).run(bad_arguments, transport)


def backend_order():
    with comm.connect(CommOptions(transport="c10d", order="transport")) as c:
        x = torch.full((6,), float(c.rank + 1))
        assert c.all_reduce(x, op="mean").wait().tolist() == [1.5] * 6
        assert c.reduce_scatter(x, dtype=torch.float64).wait().tolist() == [3.0] * 3
        assert x[0] == c.rank + 1


def test_the_backends_own_order_can_be_asked_for(ranks):
    ranks(2).run(backend_order)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
EVERY_DTYPE = (*FLOATS, *WHOLE, torch.bool, torch.complex64, torch.complex128)


def backend_order_of_everything():
    made = 0
    with (
        comm.connect(CommOptions(transport="c10d", order="transport")) as theirs,
        comm.connect(CommOptions(transport="c10d")) as ours,
    ):
        for dtype in EVERY_DTYPE:
            x = torch.tensor([3, 1, 5, 0] if ours.rank else [1, 1, 2, 0]).to(dtype)  # no sum of these is rounded
            for op in REDUCTIONS:
                for operation in ("all_reduce", "reduce_scatter"):
                    try:
                        ours.check(operation, x, detail=op)
                    except (ConfigError, Unsupported):
                        continue
                    expected, found = (getattr(c, operation)(x, op=op).wait() for c in (ours, theirs))
                    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (dtype, op, operation)
                    made += 1
    assert made > 100


def test_what_the_backend_cannot_reduce_in_its_own_order_is_reduced_here(ranks):
    ranks(2).run(backend_order_of_everything)


def hosts_by_label(transport):
    import os

    label = "left" if int(os.environ["RANK"]) < 2 else "right"
    try:
        with comm.connect(CommOptions(transport=transport, host=label)) as c:
            return c.transport, c.tree.group
    except Unsupported as error:
        return str(error)


def without_memfd(transport):
    with pytest.MonkeyPatch.context() as patch, log_lines() as lines:
        patch.setattr(rendezvous, "unsupported_reason", lambda: "memfd is forbidden")
        try:
            with comm.connect(CommOptions(transport=transport)) as c:
                assert c.all_reduce(torch.ones(2)).wait().tolist() == [2.0, 2.0]
                return c.transport, lines
        except Unsupported as error:
            return str(error)


def test_where_memory_cannot_be_shared_c10d_is_used_and_said_once(ranks):
    (first, said), (second, silent) = ranks(2).run(without_memfd, "auto")
    assert (first, second) == ("c10d", "c10d")
    assert len(said) == 1
    assert "memfd is forbidden" in said[0]
    assert not silent
    assert all("memfd is forbidden. Write transport=" in text for text in ranks(2).run(without_memfd, "host"))


def test_labels_make_one_machine_play_several_hosts(ranks):
    assert ranks(4).run(hosts_by_label, "auto") == [("cluster", 2)] * 4
    assert all("2 hosts: [[0, 1], [2, 3]]" in text for text in ranks(4).run(hosts_by_label, "host"))
