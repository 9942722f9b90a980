"""map_reduce has the same bits on any number of ranks, whoever is slow, fails or dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sherd
from sherd import observe
from sherd.api.helpers import process
from sherd.comm.meeting.tickets import Tickets
from sherd.errors import ChunkFailed, ConfigError, Diverged, PeerLost
from sherd.mapreduce import grouping
from sherd.testing import Died

DEADLINE = 60.0  # seconds; for what must happen
ITEMS = torch.randn(1001, generator=torch.Generator().manual_seed(0))


class Numbers(IterableDataset):
    def __iter__(self):
        yield from ITEMS[:37]


def many_reductions():
    """Of every kind, in one run."""
    loader = DataLoader(TensorDataset(ITEMS, ITEMS.exp()), batch_size=10, shuffle=True, drop_last=True)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    before = torch.get_rng_state()
    found = {
        "sum": sherd.map_reduce(torch.exp, ITEMS, chunk=7),
        "mean": sherd.map_reduce(lambda x: {"x": x.expand(3), "n": (1, x.item())}, ITEMS, "mean"),
        "max": sherd.map_reduce(torch.Tensor.item, ITEMS, "max", chunk=400),
        "own": sherd.map_reduce(lambda x: [x], range(30), lambda a, b: a + b, chunk=4),
        "matrices": sherd.map_reduce(lambda x: torch.eye(3) + x * torch.ones(3, 3).tril() / 9, ITEMS[:50], torch.mm),
        "batches": sherd.map_reduce(lambda batch: batch[1].sum(), loader),
        "samples": sherd.map_reduce(lambda batch: len(batch[0]), loader),
        "stream": sherd.map_reduce(torch.sum, DataLoader(Numbers(), batch_size=5), chunk=2),
        "random": sherd.map_reduce(lambda _: torch.rand(()), range(50), chunk=3, seed=5),
        "groups": sherd.map_reduce(torch.exp, ITEMS, "mean", lambda x: int(100 * x), chunk=9),
        "words": sherd.map_reduce(lambda word: [(letter, 1) for letter in word], words, key="pairs", chunk=2),
        "none": sherd.map_reduce(len, [], key=len),
    }
    assert torch.equal(before, torch.get_rng_state()), "the program's random numbers are its own"
    return process.communicator().transport, repr_of(found)


def repr_of(value):
    """Text that tells bits apart."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {[each.hex() for each in value.double().flatten().tolist()]}"
    if isinstance(value, dict):
        return str({key: repr_of(each) for key, each in value.items()})
    return str(tuple(map(repr_of, value))) if isinstance(value, tuple) else repr(value)


@pytest.fixture(scope="module")
def alone():
    return many_reductions()[1]


@pytest.mark.fake
def test_alone(alone):
    assert "'samples': '1001'" in alone, "each sample once, also those of a batch that training drops"
    assert "{'t': '2', 'h': '2', 'e': '3', 'q': '1'," in alone, "keys in the order of their first items"
    assert f"'own': '{list(range(30))}'" in alone
    assert sherd.map_reduce(torch.exp, ITEMS.double()).item() == pytest.approx(ITEMS.double().exp().sum().item())


@pytest.mark.parametrize(
    ("world", "transport", "hosts"),
    [(2, "host", 1), (3, "host", 1), (4, "host", 1), (2, "c10d", 1), (3, "c10d", 1), (4, "cluster", 2)],
)
def test_the_same_bits_on_any_ranks(ranks, alone, world, transport, hosts):
    found = ranks(world).run(on_hosts, hosts, env={"SHERD_TRANSPORT": transport})
    assert found == [(transport, alone)] * world


def on_hosts(hosts):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if hosts > 1:
        os.environ["SHERD_HOST"] = f"machine-{rank * hosts // world}"
    return many_reductions()


# ---------------------------------------------------------------- slow, failing and dead ranks


def wait_for(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def one_is_slow(folder: Path):
    """Rank 1 is not done with its first chunk before the others are done with all the rest."""
    done = []

    def map_fn(item):
        if sherd.rank() == 1:
            (folder / "slow").touch()
            wait_for(lambda: len(list(folder.glob("item*"))) >= 30 - 3)
        else:
            wait_for((folder / "slow").exists)
            (folder / f"item{item}").touch()
        done.append(item)
        return float(ITEMS[item])

    result = sherd.map_reduce(map_fn, range(30), chunk=3)
    return result.hex(), done


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_slow_rank_gets_fewer_chunks(ranks, tmp_path, transport):
    found = ranks(3).run(one_is_slow, tmp_path, env={"SHERD_TRANSPORT": transport, "SHERD_TIMEOUT": "5"})
    bits = sherd.map_reduce(lambda item: float(ITEMS[item]), range(30), chunk=3).hex()
    assert [result for result, _ in found] == [bits] * 3
    items = [done for _, done in found]
    assert len(items[1]) == 3, "the slow one has one chunk"
    assert sorted(item for done in items for item in done) == list(range(30)), "and each item was mapped once"


def failing(folder: Path, times, retries):
    """Item 11 fails so many times, on whichever rank."""
    attempts = []

    def map_fn(item):
        if item == 11:
            attempts.append(item)
            before = len(list(folder.glob("failed*")))
            if before < times:
                (folder / f"failed{before}").touch()
                raise ZeroDivisionError(f"attempt {before}")
        return float(ITEMS[item])

    try:
        result = sherd.map_reduce(map_fn, range(30), chunk=3, retries=retries).hex()
    except ChunkFailed as error:
        result = (error.chunk, error.item, str(error))
    after = sherd.map_reduce(lambda item: item, range(10))  # ranks are still in step
    return result, len(attempts), after


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_chunk_that_fails_is_computed_elsewhere(ranks, tmp_path, world):
    bits = sherd.map_reduce(lambda item: float(ITEMS[item]), range(30), chunk=3).hex()
    found = ranks(world).run(failing, tmp_path, 2, 2)
    assert [result for result, _, _ in found] == [bits] * world
    assert sum(attempts for _, attempts, _ in found) == 3
    assert len(list(tmp_path.glob("failed*"))) == 2, "it did fail"
    if world > 1:
        assert max(attempts for _, attempts, _ in found) < 3, "not always on one rank"


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_chunk_that_fails_for_good_is_named_on_every_rank(ranks, tmp_path, transport):
    (tmp_path / "once").mkdir()
    env = {"SHERD_TRANSPORT": transport}
    for rank, ((chunk, item, text), _, after) in enumerate(ranks(2).run(failing, tmp_path / "once", 99, 0, env=env)):
        assert (chunk, item, after) == (3, 11, 45)
        assert f"rank {rank}: sherd.map_reduce: chunk 3 (items 9 to 11) failed at item 11 on rank " in text
        assert "raise ZeroDivisionError" in text and "ZeroDivisionError: attempt 0" in text
    (tmp_path / "thrice").mkdir()
    for (chunk, _, text), _, after in ranks(2).run(failing, tmp_path / "thrice", 99, 2, env=env):
        assert (chunk, after) == (3, 45) and "after 3 attempts, on ranks " in text and "attempt 2" in text


def dying():
    def map_fn(item):
        if sherd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    try:
        sherd.map_reduce(map_fn, range(1000), chunk=1)
    except PeerLost as error:
        return error.ranks, str(error)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_rank_that_is_killed_is_named(ranks, transport):
    found = ranks(3).run(dying, expected_exits={1: -signal.SIGKILL}, env={"SHERD_TRANSPORT": transport})
    assert isinstance(found[1], Died)
    for survivor in (found[0], found[2]):
        assert survivor[0] == (1,) and "rank 1" in survivor[1]


# ---------------------------------------------------------------- what a store may do


def with_strange_tickets(numbers):
    """Whoever reaches the store can make it count anything."""
    drawn = iter(numbers)
    patched = pytest.MonkeyPatch()
    patched.setattr(Tickets, "draw", lambda self: next(drawn, None))
    with patched.context():
        try:
            return sherd.map_reduce(lambda item: item, range(30), chunk=3)
        except sherd.CommError as error:
            return str(error)
        finally:
            patched.undo()


def test_numbers_of_a_store_are_hints(ranks):
    pool = ranks(2)
    assert pool.run(with_strange_tickets, []) == [435, 435], "no number at all"
    assert pool.run(with_strange_tickets, [-5, 3]) == [435, 435]
    assert pool.run(with_strange_tickets, [1 << 61]) == [435, 435]
    for text in pool.run(with_strange_tickets, [0, 4]):
        assert "chunk 0 of 10 was dealt to rank 0 and to rank 1: someone else wrote to the store" in text


# ---------------------------------------------------------------- keys


def shuffled():
    """What each rank holds during the reduce."""
    held = []
    patched = pytest.MonkeyPatch()
    finished = grouping._finished

    def spy(received, reduction_of):
        held.append({key for parcel in received for entries in parcel.values() for key in entries})
        return finished(received, reduction_of)

    patched.setattr(grouping, "_finished", spy)
    try:
        found = sherd.map_reduce(lambda number: number, range(6000), "sum", lambda number: f"key {number % 2000}")
    finally:
        patched.undo()
    return held, found


def test_no_rank_holds_the_results_of_all_keys(ranks):
    found = ranks(3).run(shuffled)
    expected = {f"key {number}": 3 * number + 6000 for number in range(2000)}
    parts = [held[0] for held, _ in found]
    assert all(result == expected and list(result) == list(expected) for _, result in found)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 2000
    assert max(map(len, parts)) < 800


# ---------------------------------------------------------------- events and bad input


@pytest.mark.fake
def test_an_event_says_what_was_done(tmp_path):
    before = observe.use(observe.EventStream(tmp_path, 0))
    try:
        sherd.map_reduce(lambda item: item, range(10), chunk=3, desc="squares")
    finally:
        observe.use(before).close()
    (event,) = [event for event in observe.read(tmp_path) if event.kind == "map"]
    fields = event.fields
    assert (fields["name"], fields["items"], fields["chunk"], fields["chunks"]) == ("squares", 10, 3, 4)
    assert fields["seconds"] >= 0


@pytest.mark.fake
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1], len), {}, "got a list as map_fn; write a function of an item"),
        ((len, {"a": 1}), {}, r"write list\(data.items\(\)\)"),
        ((len, (x for x in "ab")), {}, r"got a generator as data.*list\(data\)"),
        ((len, Numbers()), {}, "got a Numbers as data"),
        ((len, [[1]], "summ"), {}, "did you mean 'sum'"),
        ((len, [[1]]), {"key": 3}, "got key=3; write a function of an item"),
        ((len, [[1]]), {"chunk": 0}, "got chunk=0; write a whole number of at least 1"),
        ((len, [[1]]), {"retries": -1}, "got retries=-1"),
        ((len, [[1]]), {"seed": 0.5}, "got seed=0.5"),
        ((len, []), {}, "got no items"),
    ],
)
def test_bad_input(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        sherd.map_reduce(*arguments, **options)


@pytest.mark.fake
@pytest.mark.parametrize("map_fn", [lambda item: [1], lambda item: "ab", lambda item: 3])
def test_pairs_that_are_none(map_fn):
    with pytest.raises(ChunkFailed, match='with key="pairs" map_fn returns pairs of a key and a value'):
        sherd.map_reduce(map_fn, [1], key="pairs")


def different(what):
    rank = sherd.rank()
    try:
        if what == "length":
            sherd.map_reduce(lambda item: item, range(10 + rank))
        if what == "own":
            sherd.map_reduce(lambda item: item, range(10), "sum" if rank else "nothing")
        if what == "merge":  # fails on the owner alone
            sherd.map_reduce(lambda item: [item], range(10), one_at_a_time, chunk=1)
    except (Diverged, ConfigError, ChunkFailed) as error:
        return type(error).__name__, str(error), sherd.map_reduce(lambda item: item, range(10))


def one_at_a_time(a, b):
    if len(a) + len(b) > 2:
        raise ArithmeticError("too many")
    return a + b


def test_what_one_rank_refuses_all_refuse(ranks):
    for kind, text, after in ranks(2).run(different, "length"):
        assert kind == "Diverged" and "10" in text and "11" in text and "rank 1" in text and after == 45
    for kind, text, after in ranks(2).run(different, "own"):
        assert kind == "ConfigError" and "failed on rank 0" in text and "got reduce='nothing'" in text and after == 45
    for kind, text, after in ranks(2).run(different, "merge"):
        assert kind == "ChunkFailed" and "ArithmeticError: too many" in text and after == 45


class BreaksOff(IterableDataset):
    """A stream that raises at its fifth item."""

    def __iter__(self):
        yield from ITEMS[:4]
        raise OSError("the network is gone")


class StopsAtFour(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 4:
            raise StopIteration
        return float(index)


def lost_items():
    """What looks like the end of the data, and is none."""
    for data in (DataLoader(BreaksOff(), batch_size=1), StopsAtFour()):
        with pytest.raises(ChunkFailed):
            sherd.map_reduce(lambda item: float(torch.as_tensor(item).sum()), data, chunk=3, retries=1, progress=False)


@pytest.mark.ranks
def test_a_stream_that_breaks_off_is_not_taken_for_its_end(ranks):
    ranks(2).run(lost_items)
