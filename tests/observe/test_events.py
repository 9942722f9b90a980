"""The event stream: one schema, whole lines whatever happens to the process, and a reader that merges ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time

import pytest

from sherd import observe
from sherd.errors import ConfigError, Unsupported
from sherd.observe import EventStream, NullStream, read
from sherd.observe.events import COMMON, FLUSH_BYTES, SCHEMA, register_kind
from tests.helpers.processes import python

pytestmark = pytest.mark.pure

LINE = {"v": SCHEMA, "t": 1.0, "mono": 5, "rank": 0, "kind": "warning", "step": None, "text": "x"}


@pytest.fixture
def opened(tmp_path):
    """Opens streams of this test's directory and closes them after it."""
    streams = []

    def open_one(rank=0):
        streams.append(EventStream(tmp_path, rank))
        return streams[-1]

    yield open_one
    for stream in streams:
        stream.close()


def lines_of(stream):
    return stream.path.read_bytes().splitlines(keepends=True)


def test_a_line_has_the_common_fields_first_and_the_kinds_own_after(opened):
    stream = opened(rank=3)
    before = (time.time(), time.monotonic_ns())
    stream.emit("step", step=7, loss=0.5, tokens=1024)
    stream.flush()
    assert stream.path.name == "events-rank00003.jsonl"
    (line,) = lines_of(stream)
    event = json.loads(line)
    assert list(event) == [*COMMON, "loss", "tokens"]
    assert (event["v"], event["rank"], event["kind"], event["step"]) == (SCHEMA, 3, "step", 7)
    assert (event["loss"], event["tokens"]) == (0.5, 1024)
    assert before[0] <= event["t"] <= time.time()
    assert before[1] <= event["mono"] <= time.monotonic_ns()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("run.start", {"world": 2}),
        ("run.end", {"ok": True}),
        ("comm.connect", {"transport": "host", "world": 4, "hosts": 1}),
        ("comm.late", {"ranks": [1], "call": "all_reduce", "seconds": 30.0}),
        ("comm.lost", {"ranks": [2], "text": "killed by SIGKILL"}),
        ("comm.diverged", {"ranks": [0, 1], "text": "two calls"}),
        ("warning", {"text": "careful"}),
        ("error", {"text": "broken"}),
        ("step", {"loss": 1.0}),
        ("span", {"name": "backward", "begin_ns": 1, "end_ns": 2}),
    ],
)
def test_every_kind_goes_through_and_needs_each_of_its_fields(opened, kind, fields):
    stream = opened()
    stream.emit(kind, **fields)
    stream.close()
    (event,) = read(stream.path)
    assert (event.kind, event.fields) == (kind, fields)
    for absent in fields:
        with pytest.raises(ConfigError, match=f"event '{kind}' lacks \\['{absent}'\\]"):
            NullStream().emit(kind, **{name: value for name, value in fields.items() if name != absent})


@pytest.mark.parametrize("make", [NullStream, None], ids=["null", "file"])
def test_what_is_not_in_the_schema_is_refused_by_every_stream(opened, make):
    stream = make() if make else opened()
    with pytest.raises(ConfigError, match="unknown event kind 'warnin'; did you mean 'warning'"):
        stream.emit("warnin", text="x")
    with pytest.raises(ConfigError, match=r"'comm.late' cannot take the field 'second'; did you mean 'seconds'"):
        stream.emit("comm.late", ranks=[1], call="barrier", seconds=1.0, second=2)
    with pytest.raises(ConfigError, match="'step' cannot take the field 'rank'"):
        stream.emit("step", loss=1.0, rank=5)
    with pytest.raises(ConfigError, match=r"step=1\.5 must be an int or None"):
        stream.emit("step", step=1.5, loss=1.0)


def test_a_kind_is_registered_once_and_leaves_the_common_fields_alone():
    with pytest.raises(ConfigError, match="'step' is already registered"):
        register_kind("step", "loss")
    with pytest.raises(ConfigError, match=r"cannot have its own \['rank'\]"):
        register_kind("test.bad", "rank", "text")
    with pytest.raises(ConfigError, match=r"unknown event kind 'test.bad'"):
        NullStream().emit("test.bad", text="x")


def test_numbers_that_json_does_not_know_survive_in_valid_json(opened):
    stream = opened()
    stream.emit("step", loss=math.nan, norms=[1.0, math.inf, {"low": -math.inf}])
    stream.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(stream.path.read_text(), parse_constant=refuse)
    (event,) = read(stream.path)
    assert math.isnan(event.fields["loss"])
    assert event.fields["norms"] == [1.0, math.inf, {"low": -math.inf}]


def test_a_value_that_is_not_plain_is_refused_with_advice(opened):
    with pytest.raises(ConfigError, match=r"event 'step': .*object.*not JSON serializable; give plain numbers"):
        opened().emit("step", loss=object())


def test_events_wait_in_the_buffer_until_one_is_urgent(opened, monkeypatch):
    stream = opened()
    monkeypatch.setattr(stream, "_due", math.inf)
    stream.emit("step", loss=1.0)
    assert lines_of(stream) == []
    stream.emit("warning", text="now")
    assert [json.loads(line)["kind"] for line in lines_of(stream)] == ["step", "warning"]


def test_the_buffer_is_written_when_full_and_when_old(opened, monkeypatch):
    stream = opened()
    monkeypatch.setattr(stream, "_due", math.inf)
    stream.emit("step", loss=1.0, note="x" * FLUSH_BYTES)
    assert len(lines_of(stream)) == 1
    monkeypatch.setattr(stream, "_due", 0)
    stream.emit("step", loss=1.0)
    assert len(lines_of(stream)) == 2


def test_threads_share_a_stream_without_breaking_lines_or_order(opened):
    stream = opened()

    def work(thread):
        for number in range(200):
            stream.emit("step", step=number, loss=0.0, thread=thread, pad="p" * 300)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.close()
    events = list(read(stream.path))
    assert len(events) == 8 * 200
    assert [event.mono for event in events] == sorted(event.mono for event in events)
    for thread in range(8):
        assert [event.step for event in events if event.fields["thread"] == thread] == list(range(200))


KILLED = """
import os, signal, sys
from sherd.observe import EventStream
stream = EventStream(sys.argv[1], 0)
for number in range(500):
    stream.emit("step", step=number, loss=0.0)
stream.flush()
stream.emit("step", step=500, loss=0.0)
os.kill(os.getpid(), signal.SIGKILL)
"""

EXITS = """
import atexit, sys
from sherd import observe
atexit.register(lambda: observe.emit("step", step=2, loss=0.0))
observe.use(observe.from_env(1))
observe.emit("step", step=1, loss=0.0)
"""


@pytest.mark.ranks
def test_what_was_flushed_survives_kill_9(tmp_path):
    assert python(KILLED, str(tmp_path)).returncode == -signal.SIGKILL
    steps = [event.step for event in read(tmp_path)]
    assert steps[:500] == list(range(500))


@pytest.mark.ranks
def test_a_process_that_just_ends_loses_nothing_not_even_from_exit_handlers(tmp_path):
    assert python(EXITS, SHERD_EVENTS=str(tmp_path / "new" / "events")).returncode == 0
    assert [(event.rank, event.step) for event in read(tmp_path / "new" / "events")] == [(1, 1), (1, 2)]


@pytest.mark.ranks
def test_a_forked_child_writes_nothing(opened):
    stream = opened()
    stream.emit("step", step=0, loss=0.0)
    child = os.fork()
    if child == 0:
        stream.emit("warning", text="from the child")
        stream.flush()
        stream.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stream.close()
    assert [event.kind for event in read(stream.path)] == ["step"]


def test_streams_append_and_the_torn_line_of_a_killed_run_is_dropped_first(opened):
    first = opened()
    first.emit("warning", text="first")
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"v":1,"t":17')
    second = opened()
    second.emit("warning", text="second")
    second.close()
    assert [event.fields["text"] for event in read(first.path)] == ["first", "second"]


def test_a_closed_stream_refuses_events_and_closes_twice(opened):
    stream = opened()
    stream.close()
    stream.close()
    stream.flush()
    with pytest.raises(ConfigError, match=r"was called after events-rank00000.jsonl was closed"):
        stream.emit("warning", text="x")


def test_a_disk_that_cannot_be_written_warns_and_does_not_stop_the_run(opened, monkeypatch):
    stream = opened()

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(UserWarning, match="events of rank 0 are being lost.*No space left"):
        stream.emit("warning", text="x")
    monkeypatch.undo()
    stream.emit("warning", text="y")
    assert [event.fields["text"] for event in read(stream.path)] == ["y"]


def test_a_bad_directory_or_rank_is_refused_when_opened(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write events to .*name a directory you can write"):
        EventStream(tmp_path / "file", 0)
    with pytest.raises(ConfigError, match="rank=-1"):
        EventStream(tmp_path, -1)


def test_read_merges_ranks_by_time(tmp_path, opened):
    streams = [opened(rank) for rank in range(3)]
    order = [2, 0, 1, 1, 0, 2, 2]
    for number, rank in enumerate(order):
        streams[rank].emit("step", step=number, loss=0.0)
    for stream in streams:
        stream.close()
    assert [(event.step, event.rank) for event in read(tmp_path)] == list(enumerate(order))


@pytest.mark.parametrize("torn", [b"{", b'{"v":1,"t":1', b'{"v":1}', b"\xff\xfe", b"17"])
def test_read_leaves_out_a_torn_last_line_only(tmp_path, torn):
    whole = json.dumps(LINE).encode() + b"\n"
    path = tmp_path / "events-rank00000.jsonl"
    path.write_bytes(whole + torn)
    assert [event.fields for event in read(path)] == [{"text": "x"}]
    path.write_bytes(whole + torn + b"\n" + whole)
    with pytest.raises(ConfigError, match="line 2: not a sherd event"):
        list(read(path))


def test_read_refuses_a_newer_schema(tmp_path):
    (tmp_path / "events-rank00000.jsonl").write_text(json.dumps({**LINE, "v": SCHEMA + 1}) + "\n")
    with pytest.raises(Unsupported, match=rf"event schema {SCHEMA + 1} is newer than {SCHEMA}.*upgrade sherd"):
        list(read(tmp_path))


def test_read_says_at_once_what_it_expected(tmp_path):
    for nothing in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"expected a directory with events-rank00000.jsonl"):
            read(nothing)


def test_the_current_stream_is_null_until_another_is_used(opened):
    assert type(observe.stream()) is NullStream
    observe.emit("warning", text="nobody hears")
    stream = opened()
    before = observe.use(stream)
    try:
        observe.emit("warning", text="heard")
        assert observe.stream() is stream
    finally:
        assert observe.use(before) is stream
    assert [event.fields["text"] for event in read(stream.path)] == ["heard"]


def test_from_env_is_null_unless_the_variable_names_a_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("SHERD_EVENTS", raising=False)
    assert type(observe.from_env(0)) is NullStream
    monkeypatch.setenv("SHERD_EVENTS", "")
    assert type(observe.from_env(0)) is NullStream
    monkeypatch.setenv("SHERD_EVENTS", str(tmp_path))
    stream = observe.from_env(4)
    stream.close()
    assert isinstance(stream, EventStream)
    assert stream.path == tmp_path / "events-rank00004.jsonl"
