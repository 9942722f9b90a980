"""Runs put together from the events of their ranks: merging, lag, death, restarts, and files that are still growing."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.errors import ConfigError
from sherd.observe import EventStream
from sherd.observe.events import SCHEMA, Event
from sherd.observe.means import LogEntry, averaged, tokens_of, weighted_mean
from sherd.observe.phases import PHASES
from sherd.observe.runs import Follower, RunRecord, load
from sherd.report.thinning import LIMIT, smoothed, thinned
from tests.helpers.fake_runs import FakeRun, write_run

pytestmark = pytest.mark.pure

FINITE = st.floats(-1e6, 1e6)


def event(kind, rank, step=None, t=0.0, **fields):
    return Event(SCHEMA, t, int(t * 1e9), rank, kind, step, fields)


def starts(world, pid=1, t=0.0, **fields):
    return [event("run.start", rank, t=t, world=world, pid=pid + rank, **fields) for rank in range(world)]


def fed(events, **options):
    record = RunRecord(**options)
    for each in events:
        record.feed(each)
    return record


def losses(record):
    return [(row.step, row.loss) for row in record.steps]


# ------------------------------------------------------------------------------------------------------- merging


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_ranks_that_lag_change_nothing(world, steps, chance):
    def of(rank):
        yield event("run.start", rank, world=world, pid=rank)
        for step in range(steps):
            yield event("log", rank, step, figures={"accuracy": rank / 8}, n=rank)
            yield event("step", rank, step, t=step, loss=rank + step, samples=rank + 1, norm_squared=float(rank))

    queues = [list(of(rank)) for rank in range(world)]
    in_order = fed(each for group in zip(*queues, strict=True) for each in group)
    record = RunRecord()
    while any(queues):
        record.feed(chance.choice([queue for queue in queues if queue]).pop(0))
    weight = sum(range(1, world + 1))
    mean = math.fsum(rank * (rank + 1) for rank in range(world)) / weight
    assert len(record.steps) == steps
    for row, other in zip(record.steps, in_order.steps, strict=True):
        assert row.ranks == tuple(range(world))
        assert row.loss == pytest.approx(mean + row.step)
        assert row.samples == weight
        assert row.norm == pytest.approx(math.sqrt(sum(range(world))))
        assert row.figures == pytest.approx(other.figures)


def test_a_step_waits_for_all_ranks():
    record = fed(starts(2))
    record.feed(event("step", 0, 0, loss=1.0))
    record.feed(event("step", 0, 1, loss=2.0))
    assert record.new_rows() == []
    record.feed(event("step", 1, 0, loss=3.0))
    assert [row.loss for row in record.new_rows()] == [2.0]
    assert record.new_rows() == []
    assert not record.ended


def test_the_loss_is_that_logged_else_the_closure_s_else_the_root():
    steps = [event("step", 0, 0, loss=None, root=4.0), event("step", 1, 0, loss=2.0, root=9.0)]
    record = fed([*starts(2), *steps])
    assert losses(record) == [(0, 2.0)]
    assert record.steps.loss_name == "loss"
    roots = [event("step", rank, 0, loss=None, root=rank, samples=1 + 2 * rank) for rank in range(2)]
    record = fed([*starts(2), *roots])
    assert losses(record) == [(0, 0.75)]
    assert (record.steps.loss_name, record.steps.losses()) == ("loss (as passed to backward)", ([0], [0.75]))
    record.feed(event("log", 0, 0, figures={"loss": 8.0}, n=4))
    assert losses(record) == [(0, 8.0)]
    assert record.steps.figure_names == []
    assert (record.steps.loss_name, record.steps.losses()) == ("loss", ([0], [8.0]))


def test_losses_that_were_told_now_and_then_are_not_mixed_with_roots():
    logs = [event("log", 0, step, figures={"loss": 1.0}, n=1) for step in (1, 3)]
    record = fed([*starts(1), *logs, *(event("step", 0, step, loss=None, root=0.25) for step in range(5))])
    assert record.steps.losses() == ([1, 3], [1.0, 1.0])


def test_a_logged_loss_is_weighed_by_its_own_n():
    logs = [event("log", rank, 0, figures={"loss": 1.0 + 2 * rank}, n=10 + 20 * rank) for rank in range(2)]
    steps = [event("step", rank, 0, loss=None, root=9.0, samples=4) for rank in range(2)]
    assert losses(fed([*starts(2), *logs, *steps])) == [(0, 2.5)]
    nothing = event("log", 0, 0, figures={"loss": math.nan}, n=0)
    assert losses(fed([*starts(2), *logs, nothing, *steps])) == [(0, 2.5)]


def test_losses_and_tokens_logged_after_a_step_are_counted_once_each():
    record = fed([*starts(1), event("log", 0, 0, figures={"loss": 1.0, "tokens": 10}, n=1)])
    record.feed(event("step", 0, 0, loss=None, root=9.0))
    record.feed(event("log", 0, 0, figures={"loss": 3.0, "tokens": 5}, n=1))
    assert (record.steps[0].loss, record.steps[0].tokens) == (2.0, 15)


def test_a_figure_with_the_name_of_a_column_is_not_that_column():
    record = fed([*starts(1), event("step", 0, 0, loss=1.0, seconds={"forward": 2.0})])
    record.feed(event("log", 0, 0, figures={"duration": 3.0}, n=1))
    assert record.steps.column("duration") == ([0], [2.0])
    assert record.steps.figure("duration") == ([0], [3.0])


def test_figures_logged_after_a_step_are_its_own():
    record = fed([*starts(2), *(event("step", rank, 0, loss=1.0) for rank in range(2))])
    record.feed(event("log", 0, 0, figures={"held_out": 1.0}, n=1))
    record.feed(event("log", 1, 0, figures={"held_out": 4.0}, n=2))
    assert record.steps[0].figures == {"held_out": 3.0}
    assert record.steps.figure("held_out") == ([0], [3.0])


def test_figures_of_a_step_that_was_not_finished_are_kept_apart():
    logs = [event("log", 0, step, figures={"accuracy": step + 0.5}, n=1) for step in range(2)]
    record = fed([*starts(1), logs[0], event("step", 0, 0, loss=1.0), logs[1]])
    record.finish()
    assert record.steps[0].figures == {"accuracy": 0.5}
    assert record.unfinished == {"accuracy": 1.5}


def test_a_text_that_reads_like_a_number_is_a_text(tmp_path):
    stream = EventStream(tmp_path, 0)
    stream.emit("run.start", world=1)
    stream.emit("sample", text="nan", title="inf")
    stream.close()
    assert [(sample.text, sample.title) for sample in load(tmp_path).samples] == [("nan", "inf")]


def test_an_integer_without_end_is_infinite(tmp_path):
    stream = EventStream(tmp_path, 0)
    stream.emit("run.start", world=1)
    stream.emit("log", 0, figures={"tokens": 10**400, "depth": -(10**400)}, n=1)
    stream.emit("step", 0, loss=1.0, samples=10**400, seconds={"forward": 1.0})
    stream.close()
    row = load(tmp_path).steps[0]
    assert (row.samples, row.tokens, row.figures["depth"]) == (math.inf, math.inf, -math.inf)


def test_rows_of_a_long_run_are_small():
    """Less than 1 KB for each rank, of which about half is what every row has once."""
    kinds = ("parameters", "gradients", "optimizer state", "buckets")
    fields = {
        "loss": None,
        "samples": 4,
        "bytes": {"payload": 10**6, "control": 100},
        "skipped": False,
        "lr": [0.1],
    }
    count = 2000

    def steps():
        yield from starts(2)
        for step in range(count):
            for rank in range(2):
                own = {"root": step / 3, "norm_squared": step / 7, "memory": dict.fromkeys(kinds, 10**6 + step)}
                own["seconds"] = dict.fromkeys(PHASES, step / 9)
                own["resident"] = {"private": 10**9 + step, "shared": 10**8}
                yield event("step", rank, step, t=step + 0.5, **fields, **own)

    tracemalloc.start()
    try:
        record = fed(steps())
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(record.steps) == count
    assert size / count / 2 < 1000


@given(st.lists(st.tuples(FINITE, st.integers(0, 100)), min_size=1))
def test_a_weighted_mean_is_that_of_the_samples(pairs):
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
    repeated = [value for value, weight in pairs for _ in range(weight)] or values
    mean = weighted_mean(values, weights)
    assert mean == pytest.approx(math.fsum(repeated) / len(repeated), abs=1e-6)
    assert weighted_mean(values, [*weights[:-1], None]) == pytest.approx(math.fsum(values) / len(values), abs=1e-6)


def test_what_is_not_a_number_stays_so_unless_it_weighs_nothing():
    assert math.isnan(weighted_mean([1.0, math.nan], [1, 1]))
    assert weighted_mean([1.0, math.nan], [1, 0]) == 1.0
    assert weighted_mean([1.0, math.inf], [1, 1]) == math.inf
    logs = [LogEntry({"a": 1.0}, 1), LogEntry({"a": 4.0, "tokens": 9}, 2), LogEntry({"tokens": 1}, 0)]
    assert averaged(logs) == {"a": 3.0}
    assert (tokens_of(logs), tokens_of(logs[:1])) == (10, None)


def test_memory_adds_up_by_host():
    hosts = [[0, 1], [2]]
    steps = [
        event("step", rank, 0, loss=1.0, memory={"parameters": 10 + rank}, resident={"private": 5, "shared": 7 + rank})
        for rank in range(3)
    ]
    named = [each for rank in range(3) for each in starts(3, hosts=hosts, host="ab"[rank // 2])[rank : rank + 1]]
    row = fed([*named, *steps]).steps[0]
    assert row.host_memory == {"a": {"parameters": 21}, "b": {"parameters": 12}}
    assert row.host_resident == {"a": 5 + 5 + 8, "b": 5 + 9}


def test_who_waits_is_who_communicates_longer_than_the_last_one():
    steps = [event("step", r, 0, loss=1.0, seconds={"forward": 3.0 - r, "communication": 1.0 + r}) for r in range(2)]
    row = fed([*starts(2), *steps]).steps[0]
    assert row.waiting == {0: 0.0, 1: 1.0}
    assert row.duration == 4.0
    assert row.seconds == {"forward": 2.5, "communication": 1.5}


# --------------------------------------------------------------------------------------- ranks that end, and restarts


def test_a_lost_rank_is_not_waited_for():
    record = fed([*starts(3), *(event("step", rank, 0, loss=1.0, norm_squared=1.0) for rank in range(2))])
    assert not record.steps
    record.feed(event("comm.lost", 0, ranks=[2], text="rank 2 died"))
    assert [row.ranks for row in record.steps] == [(0, 1)]
    assert record.steps[0].norm is None, "a share is missing"
    record.feed(event("step", 2, 0, loss=9.0))
    assert losses(record) == [(0, 1.0)], "too late"
    assert [message.text for message in record.messages] == ["rank 2 died"]


def test_a_run_ends_when_all_ranks_have():
    record = fed([*starts(2), event("step", 0, 0, loss=1.0), event("run.end", 0, ok=True)])
    assert not record.ended
    assert not record.steps
    record.feed(event("run.end", 1, ok=False))
    assert record.ended
    assert record.ok is False
    assert losses(record) == [(0, 1.0)]


def test_a_rank_that_skipped_a_line_is_not_waited_for():
    steps = [event("step", 0, step, loss=1.0) for step in range(3)]
    record = fed([*starts(2), *steps, event("step", 1, 2, loss=3.0)])
    assert losses(record) == [(0, 1.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_last_of_several_runs_is_taken(world):
    first = [*starts(2), *(event("step", rank, step, loss=1.0) for step in range(4) for rank in range(2))]
    again = starts(world, pid=50, t=9.0)
    # Rank 1 still tells of the run before when rank 0 has begun anew.
    late = [event("step", 1, 4, loss=7.0, t=8.0)]
    steps = [event("step", rank, 0, loss=2.0, t=10.0) for rank in range(world)]
    record = fed([*first, *again[:1], *late, *again[1:], *steps])
    assert record.world == world
    assert losses(record) == [(0, 2.0)]


def test_several_distributes_before_the_first_step_are_one_run():
    record = fed([*starts(1, strategy="zero3"), *starts(1, strategy="ddp"), event("step", 0, 0, loss=1.0)])
    assert record.start["strategy"] == "zero3"
    record.feed(event("step", 0, 0, loss=5.0, optimizer=1))
    record.feed(event("step", 0, 1, loss=2.0))
    assert losses(record) == [(0, 1.0), (1, 2.0)], "the table is that of the first optimizer"


def test_a_distribute_after_steps_begins_another_run():
    def fold(loss):
        for rank in range(2):
            yield event("run.start", rank, world=2, pid=rank)
        for step in range(3):
            for rank in range(2):
                yield event("log", rank, step, figures={"loss": loss + step}, n=1)
                yield event("step", rank, step, loss=None)

    record = fed([*fold(1.0), *fold(100.0)])
    assert losses(record) == [(0, 100.0), (1, 101.0), (2, 102.0)]


def test_events_of_unknown_kinds_are_ignored():
    record = fed([*starts(1), event("a.later.kind", 0, x=1), event("step", 0, 0, loss=1.0), event("span", 0)])
    assert losses(record) == [(0, 1.0)]


def test_one_machine_of_several_needs_only_its_own_ranks():
    record = fed([*starts(4)[:2], *(event("step", rank, 0, loss=rank) for rank in range(2))], ranks=[0, 1])
    assert losses(record) == [(0, 0.5)]


# ---------------------------------------------------------------------------------------------------------- files


def test_a_directory_is_loaded(tmp_path):
    record = load(write_run(tmp_path / "mine", FakeRun(world=3, steps=20, per_host=2)))
    assert (record.name, record.world, record.ok, len(record.steps)) == ("mine", 3, True, 20)
    assert [host.ranks for host in record.hosts] == [(0, 1), (2,)]
    assert record.total_steps == 20
    assert record.steps[7].skipped
    assert record.steps.figure_names == ["held_out_loss", "accuracy"]
    assert len(record.samples) == 2
    assert len(record.messages) == 3


def test_a_torn_last_line_is_left_out_and_a_wrong_one_is_named(tmp_path):
    write_run(tmp_path, FakeRun(world=2, steps=5, ends=False))
    file = tmp_path / "events-rank00001.jsonl"
    data = file.read_bytes()
    last_step = data.rindex(b'"kind":"step"')
    file.write_bytes(data[: last_step + 40])
    assert len(load(tmp_path).steps) == 4
    file.write_bytes(b"not an event\n" + data)
    with pytest.raises(ConfigError, match=r"rank00001.jsonl, line 1: not a sherd event"):
        load(tmp_path)


@pytest.mark.parametrize("made", [False, True])
def test_a_directory_without_events_is_refused(tmp_path, made):
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
        (folder / "events-rank00000.jsonl").touch()
    with pytest.raises(ConfigError, match="no events in"):
        load(folder)


def test_ranks_without_a_file_are_not_waited_for(tmp_path):
    write_run(tmp_path, FakeRun(world=4, steps=5, ends=False))
    (tmp_path / "events-rank00003.jsonl").unlink()
    assert [row.ranks for row in load(tmp_path).steps] == [(0, 1, 2)] * 5


def test_a_follower_sees_each_event_once_and_whole(tmp_path):
    chance = random.Random(4)
    whole = write_run(tmp_path / "whole", FakeRun(world=3, steps=30))
    growing = tmp_path / "growing"
    follower, record, seen = Follower(growing), RunRecord(), 0
    assert follower.poll() == []
    growing.mkdir()
    left = {file.name: file.read_bytes() for file in whole.glob("*.jsonl")}
    while any(left.values()):
        name = chance.choice([name for name, data in left.items() if data])
        size = chance.randrange(1, 3000)
        with (growing / name).open("ab") as file:
            file.write(left[name][:size])
        left[name] = left[name][size:]
        for each in follower.poll():
            seen += 1
            record.feed(each)
    assert seen == sum(len(file.read_bytes().splitlines()) for file in whole.glob("*.jsonl"))
    assert losses(record) == losses(load(whole))
    assert record.ended


def test_a_follower_of_what_is_new_leaves_out_runs_before(tmp_path):
    write_run(tmp_path, FakeRun(world=1, steps=3))
    with (tmp_path / "events-rank00000.jsonl").open("ab") as file:
        file.write(b'{"torn')
    follower = Follower(tmp_path, new=True)
    stream = EventStream(tmp_path, 0)
    stream.emit("warning", text="new")
    assert [each.kind for each in follower.poll()] == ["warning"]
    stream.close()


# -------------------------------------------------------------------------------------------------------- thinning


@given(
    st.lists(st.one_of(st.none(), st.just(math.nan), FINITE), max_size=300),
    st.integers(4, 60),
)
def test_thinned_curves_keep_extremes_and_ends(values, limit):
    kept = thinned(values, limit)
    assert len(kept) <= max(limit, 0)
    assert kept == sorted(set(kept))
    finite = [value for value in values if value is not None and math.isfinite(value)]
    shown = [values[index] for index in kept]
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    if finite:
        assert min(finite) in shown
        assert max(finite) in shown
    if len(values) <= limit:
        assert kept == list(range(len(values)))


@given(st.integers(0, 20_000), st.integers())
def test_never_more_than_2000_points_and_no_spike_lost(count, seed):
    values = [0.0] * count
    spike = seed % count if count else 0
    if count:
        values[spike] = 1.0
    kept = thinned(values)
    assert len(kept) <= LIMIT == 2000
    assert not count or spike in kept


@given(st.lists(FINITE, min_size=1, max_size=60), st.floats(1, 30))
def test_smoothing_stays_within_the_values(values, span):
    for each in smoothed(values, span):
        assert min(values) - 1e-6 <= each <= max(values) + 1e-6
    assert smoothed([None, 2.0, math.nan], span) == [None, 2.0, None]
