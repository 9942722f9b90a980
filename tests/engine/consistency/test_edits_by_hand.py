"""Parameters that a program writes by itself: what a rank sees of it, what the ranks compare, and what they keep."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sherd
from sherd import Diverged
from sherd.api.training import training_of
from sherd.comm.host.memory import PAGE
from sherd.engine.buckets.checksum import checksum
from sherd.engine.parameters import page_map
from tests.helpers.training import (
    SHARDED,
    STRATEGIES,
    all_same,
    batch,
    connected,
    distributed,
    loss_of,
    network,
    same,
    train,
    weights,
)

PRIVATE = sherd.ZeRO(stage=2, share_host_memory=False)
GATHERED = sherd.ZeRO(stage=3, share_host_memory=False)


@contextlib.contextmanager
def page_map_by(ask):
    """The page map is asked in this way; None: it cannot be read."""
    before, page_map._how = page_map._how, lambda: ask
    try:
        yield
    finally:
        page_map._how = before


def by_pointer(tensor, value):
    """Write one element without torch noticing."""
    ctypes.c_float.from_address(tensor.data_ptr()).value = value


def the_ranks_own(transport):
    """A write is seen at once by the rank that made it and by nobody else, and needs nobody."""
    with connected(transport) as c:
        for strategy in (*SHARDED, PRIVATE):
            model, optimizer = distributed(c, strategy)
            train(model, optimizer, [batch(c.rank)])
            before = weights(model)
            if c.rank == 1:
                model[2].bias.data.fill_(7.0)
                assert torch.equal(model.state_dict()["2.bias"], torch.full((5,), 7.0))
                assert torch.equal(model[2](torch.zeros(7)), torch.full((5,), 7.0))
            c.barrier().wait()
            if c.rank == 0:
                same(weights(model), before, strategy)
            c.barrier().wait()
            if c.rank == 1:
                model[2].bias.data.copy_(before["2.bias"])  # as it was: no edit
            train(model, optimizer, [batch(c.rank, 1)])


def test_a_write_stays_the_ranks_own(ranks):
    ranks(2).run(the_ranks_own, "host")


def numpy_and_pointers(how):
    ask = {"scan": page_map._scan, "read": page_map._read}[how]
    with connected() as c, page_map_by(ask):
        found = {}
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            for step in range(3):
                model[0].weight.detach().numpy()[2] *= 0.5
                by_pointer(model[2].weight, 0.25 + step)
                train(model, optimizer, [batch(c.rank, step)])
            found[strategy] = weights(model)
        all_same(found)


@pytest.mark.parametrize("how", ["scan", "read"])
def test_writes_of_numpy_and_through_pointers_are_found(ranks, how):
    if not page_map._is_right(page_map._scan) and how == "scan":
        pytest.skip("this kernel has no PAGEMAP_SCAN")
    ranks(2).run(numpy_and_pointers, how)


def different(strategy, when):
    with connected() as c:
        model, optimizer = distributed(c, strategy)
        train(model, optimizer, [batch(c.rank)])
        if when == "step":
            loss_of(model, batch(c.rank, 1)).backward()
        by_pointer(model[2].weight, 3.0 + c.rank)
        model[0].bias.data.add_(c.rank)
        with pytest.raises(Diverged) as caught:
            if when == "backward":  # where they are made; the ranks compare before they update
                train(model, optimizer, [batch(c.rank, 1)])
            elif when == "step":
                optimizer.step()
            else:
                with sherd.full_parameters(model):
                    pass
        assert "'0.bias' and 1 other were edited" in str(caught.value), caught.value


@pytest.mark.parametrize("when", ["backward", "step", "full_parameters"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_different_writes_are_refused_before_any_update(ranks, strategy, when):
    ranks(2).run(different, strategy, when)


def mended():
    """Edits that differ do not matter once all ranks have loaded the same."""
    with connected() as c:
        found = {}
        for strategy in (*STRATEGIES, PRIVATE, GATHERED):
            model, optimizer = distributed(c, strategy)
            train(model, optimizer, [batch(c.rank)])
            for parameter in model.parameters():
                parameter.data.add_(c.rank)
            model[0].load_state_dict({"weight": torch.ones(7, 15), "bias": torch.zeros(7)})
            model.load_state_dict(network(4).state_dict())
            same(weights(model), weights(network(4)), strategy)
            train(model, optimizer, [batch(c.rank, 1)])
            found[strategy] = weights(model)
        all_same(found)


def test_loading_takes_the_place_of_what_ranks_wrote(ranks):
    ranks(2).run(mended)


def unseen():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("sherd").addHandler(handler)
    with connected() as c, page_map_by(None):
        found = {}
        for strategy, check in (("ddp", "edits"), *((s, "edits") for s in SHARDED), (GATHERED, "edits")):
            model, optimizer = distributed(c, strategy, check=check)
            for step in range(3):
                model[0].weight.data.mul_(0.5)
                if strategy is not GATHERED:  # there, nothing shows what a pointer writes
                    by_pointer(model[2].weight, 0.25 + step)
                else:
                    model[2].weight.data.view(-1)[0] = 0.25 + step
                train(model, optimizer, [batch(c.rank, step)])
            found[strategy] = weights(model)
        all_same(found)
        model, optimizer = distributed(c, "zero2", check="edits")
        model[0].weight.data.mul_(1.0 + c.rank)
        with pytest.raises(Diverged, match=r"'0\.weight' was edited"):
            train(model, optimizer, [batch(c.rank)])
    return sum("cannot be read" in each and 'check="edits"' in each for each in records)


def test_without_a_page_map_it_is_said_once_and_checksums_find_edits(ranks):
    assert ranks(2).run(unseen) == [1, 0]


def compared_under_ddp(strategy):
    """Each rank's own, unless they are to be compared."""
    with connected() as c:
        strategy = PRIVATE if strategy == "private" else strategy
        model, optimizer = distributed(c, strategy)
        model[0].weight.data.mul_(1.0 + c.rank)
        train(model, optimizer, [batch(c.rank)])
        for when in ("backward", "step"):
            model, optimizer = distributed(c, strategy, check="edits")
            if when == "step":
                loss_of(model, batch(c.rank)).backward()
            model[0].weight.data.mul_(1.0 + c.rank)
            with pytest.raises(Diverged, match=r"'0\.weight' was edited"):
                if when == "step":
                    optimizer.step()
                loss_of(model, batch(c.rank)).backward()


@pytest.mark.parametrize("strategy", ["ddp", "private"])
def test_where_ranks_have_copies_edits_are_their_own_unless_they_are_compared(ranks, strategy):
    ranks(2).run(compared_under_ddp, strategy)


def read_only():
    with connected() as c:
        model, _ = distributed(c, GATHERED)
        array = model[0].weight.detach().numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


def test_what_is_gathered_on_use_gives_numpy_a_copy_that_cannot_be_written(ranks):
    ranks(2).run(read_only)


def untouched():
    """A step without edits makes no copies, and reading through `.data` none either."""
    with connected() as c:
        model, optimizer = distributed(c, "zero2")
        store = training_of(model).engine.store
        for step in range(3):
            train(model, optimizer, [batch(c.rank, step)])
            assert sum(float(p.data.sum()) for p in model.parameters())
            assert all(view.written() == [] for view in store._own_views.values())
        model[0].weight.data.mul_(1.0)
        assert any(view.written() for view in store._own_views.values()), "or the test proves nothing"
        train(model, optimizer, [batch(c.rank, step)])
        assert all(view.written() == [] for view in store._own_views.values())


def test_reading_costs_nothing_and_pages_are_given_back(ranks):
    ranks(2).run(untouched)


@pytest.mark.pure
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_both_ways_to_ask_find_the_pages_that_were_written(pattern):
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, len(pattern) * PAGE)
        private = mmap.mmap(fd, len(pattern) * PAGE, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
    for page, write in enumerate(pattern):
        if write:
            private[page * PAGE + 5] = 1
        elif page % 2:
            private[page * PAGE]
    address = page_map._address(private)
    for ask in (page_map._scan, page_map._read):
        if page_map._is_right(ask):
            found = [page for start, stop in ask(address, len(pattern) * PAGE) for page in range(start, stop)]
            assert found == [page for page, write in enumerate(pattern) if write]


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_a_checksum_tells_order_sign_and_nan_apart(dtype):
    plain = torch.tensor([0.0, 1.0, 2.0, float("nan")]).to(dtype)
    assert checksum(plain) == checksum(plain.clone())
    assert checksum(plain) != checksum(plain.flip(0))
    assert checksum(torch.stack([plain, plain.flip(0)], 1)[:, 0]) == checksum(plain)
    if dtype is not torch.bool:
        assert checksum(torch.zeros(3, dtype=dtype)) != checksum(-torch.zeros(3, dtype=dtype))


@pytest.mark.pure
@pytest.mark.parametrize("numel", [8192, 8192 + 511, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_of_a_long_tensor_tells_single_elements_apart(dtype, numel):
    plain = torch.randn(numel).to(dtype)
    before = checksum(plain)
    assert before == checksum(plain.clone())
    for index in (0, 1, numel // 2, numel - 1):
        other = plain.clone()
        other.view(torch.uint8)[index * dtype.itemsize] ^= 1  # the last bit
        assert checksum(other) != before, index
        other = plain.clone()
        other[[index, index - 7]] = other[[index - 7, index]]  # in one row, or in its columns
        assert checksum(other) != before, index
    assert checksum(plain.flip(0)) != before
    assert checksum(-plain) != before
    halves = plain.clone()
    halves[1::2].neg_()
    assert checksum(halves) != before


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [128, 256, 512])
def test_a_checksum_tells_permutations_and_signs_of_regular_tensors_apart(dtype, size):
    """Sums of rows and of columns are the same for all permutation matrices."""
    eye, ones = torch.eye(size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    swapped = eye.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    others = [eye.roll(1, 0), eye.roll(2, 0), eye.roll(size // 2, 1), eye.flip(0), swapped, -eye, ones, -ones]
    checkered = ones.clone()
    checkered[::2, ::2] = checkered[1::2, 1::2] = -1
    found = [checksum(each) for each in (eye, *others, checkered, -checkered)]
    assert len({*found}) == len(found)
