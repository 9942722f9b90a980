"""Reductions of what ranks lend: all of them, or only some; issued together; in place."""

from __future__ import annotations

import itertools

import pytest
import torch

from sherd import CommOptions, comm
from sherd.comm.host.board import Board
from tests.helpers.comm_reference import DTYPES, reduced, tensor_of

NUMELS = (20_000, 70_001)  # at 2 bytes too small to be lent; and so odd that the last slice is shorter


def contribution(c, lends, numel, dtype, seed):
    """This rank's tensor of `numel` elements, in memory that others can read if it `lends`."""
    shared = c.shared_buffers(numel, dtype=dtype)[c.rank]
    mine = shared if lends else torch.empty_like(shared)
    return mine.copy_(tensor_of(c.rank, (numel,), dtype, seed))


def reductions(group, who):
    with comm.connect(CommOptions(transport="host", group=group)) as c:
        for seed, (numel, dtype, op) in enumerate(itertools.product(NUMELS, DTYPES, ("sum", "mean"))):
            lends, what = c.rank in who, (numel, dtype, op)
            inputs = [tensor_of(r, (numel,), dtype, seed) for r in range(c.world)]
            mine = contribution(c, lends, numel, dtype, seed)
            version = mine._version
            assert c.all_reduce(mine, mine, op=op).wait() is mine
            assert torch.equal(mine, reduced(inputs, group, op)), ("in place", *what)
            assert mine._version > version
            wide = [tensor_of(r, (numel * c.world,), dtype, seed) for r in range(c.world)]
            mine, total = contribution(c, lends, numel * c.world, dtype, seed), reduced(wide, group, op).chunk(c.world)
            assert torch.equal(c.reduce_scatter(mine, op=op).wait(), total[c.rank]), ("reduce_scatter", *what)
            own = mine.chunk(c.world)[c.rank].clone()
            mine.chunk(c.world)[c.rank].zero_()
            assert torch.equal(c.reduce_scatter(mine, own=own, op=op).wait(), total[c.rank]), ("own", *what)
            c.barrier().wait()


@pytest.mark.parametrize(("world", "group"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("who", [(0, 1, 2, 3), (0, 2), (1,)])
def test_ranks_that_lend_and_ranks_that_do_not_give_the_same_bits(ranks, world, group, who):
    ranks(world).run(reductions, group, who)


def many_at_once(who):
    """Reductions of both kinds, more than there are slots, each rank at its own pace."""
    with comm.connect(CommOptions(transport="host")) as c:
        numel, slots = 60_000 * c.world, 3
        lent = [c.shared_buffers(numel)[c.rank] for _ in range(slots)]
        if c.rank not in who:
            lent = [torch.empty_like(slot) for slot in lent]
        handles = [None] * slots
        found = []
        for step in range(30):
            slot, in_place = step % slots, step % 4 == 3
            if handles[slot] is not None:
                handles[slot].release()
                if step % 5 == c.rank:
                    handles[slot].wait()
            if step >= slots and (step - slots) % 4 == 3:
                found[step - slots] = lent[slot].clone()  # in place, and its slot is used again
            lent[slot].copy_(tensor_of(c.rank, (numel,), torch.float32, step))
            handle = c.all_reduce(lent[slot], lent[slot]) if in_place else c.reduce_scatter(lent[slot])
            if step % 3 == c.rank:
                handle.done()
            handles[slot] = handle
            found.append(handle)
        for step, each in enumerate(found):
            inputs = [tensor_of(r, (numel,), torch.float32, step) for r in range(c.world)]
            total = reduced(inputs, c.world)
            result = each if isinstance(each, torch.Tensor) else each.wait()
            assert torch.equal(result, total if step % 4 == 3 else total.chunk(c.world)[c.rank]), step


@pytest.mark.parametrize("who", [(0, 1, 2), (0, 2)])
def test_many_are_under_way_at_once(ranks, who):
    ranks(3).run(many_at_once, who)


def written_headers():
    """The numbers of the operations whose headers this rank writes, with one rank that lends and one that does not."""
    numbers, write = [], Board.write_header

    def noted(self, operation, *args):
        numbers.append(operation)
        write(self, operation, *args)

    with comm.connect(CommOptions(transport="host")) as c, pytest.MonkeyPatch.context() as patch:
        mine = contribution(c, c.rank == 0, 100_000, torch.float32, 0)
        c.barrier().wait()
        patch.setattr(Board, "write_header", noted)
        c.reduce_scatter(mine).wait()
        c.all_reduce(mine, mine).wait()
    return numbers


def test_a_header_that_others_may_be_reading_is_not_written_again(ranks):
    for numbers in ranks(2).run(written_headers):
        assert len(numbers) == len(set(numbers)) == 2


def dropped_handles():
    """What a rank lends stays there until the others have read it, even if nobody keeps the handle."""
    with comm.connect(CommOptions(transport="host")) as c:
        for step in range(8):
            numel = 100_000 * c.world
            mine = c.shared_buffers(numel)[c.rank].copy_(tensor_of(c.rank, (numel,), torch.float32, step))
            out = torch.empty(numel // c.world)
            c.reduce_scatter(mine, out)
            del mine
            c.barrier().wait()
            inputs = [tensor_of(r, (numel,), torch.float32, step) for r in range(c.world)]
            assert torch.equal(out, reduced(inputs, c.world).chunk(c.world)[c.rank])


def test_a_dropped_handle_is_completed_by_what_comes_after_it(ranks):
    ranks(3).run(dropped_handles)
