"""main_first, and printing on behalf of all ranks."""

from __future__ import annotations

import io
import os
import time

import pytest

import sherd
from sherd import CommOptions
from sherd.api.helpers import process
from tests.helpers.training import network

pytestmark = pytest.mark.pure


def in_turns(folder, label):
    with sherd.main_first():
        there = (folder / label(sherd.rank())).exists()
        (folder / label(sherd.rank())).write_text("")
    sherd.barrier()
    return there


def one_host(rank):
    return "host"


def two_hosts(rank):
    return f"host-{rank // 2}"


def labelled_by_host(folder):
    os.environ["SHERD_HOST"] = two_hosts(int(os.environ["RANK"]))
    return in_turns(folder, two_hosts)


def test_the_first_rank_of_each_host_goes_first(ranks, tmp_path):
    assert ranks(3).run(in_turns, tmp_path, one_host) == [False, True, True]
    assert ranks(4).run(labelled_by_host, tmp_path) == [False, True, False, True]


def longer_than_the_timeout(transport):
    """Others wait, though the options would have given up on the first long ago."""
    sherd.distribute(network(), strategy="ddp", comm=CommOptions(timeout=4.0, warn_after=0.3, transport=transport))
    with sherd.main_first():
        if sherd.rank() == 0:
            time.sleep(6.0)
    return sherd.gather(sherd.rank())


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_others_wait_longer_than_the_timeout(ranks, transport):
    assert ranks(2).run(longer_than_the_timeout, transport) == [[0, 1]] * 2


def nested(folder):
    """A function that has a `main_first` of its own, called inside one."""
    with sherd.main_first():
        there = (folder / "outer").exists()
        with sherd.main_first():
            inner_there = (folder / "inner").exists()
            (folder / "inner").write_text("")
        time.sleep(0.0 if sherd.rank() else 0.3)  # the first rank is still inside the outer one
        (folder / "outer").write_text("")
    with pytest.raises(Exception) as caught, sherd.main_first(), sherd.main_first():
        raise ZeroDivisionError
    in_turn = sherd.gather((there, inner_there))
    return in_turn, type(caught.value).__name__


def test_main_first_may_be_nested(ranks, tmp_path):
    turns = [(False, False), (True, True), (True, True)]
    assert ranks(3).run(nested, tmp_path) == [(turns, "ZeroDivisionError")] + [(turns, "SherdError")] * 2


def slow_on_another_host():
    os.environ |= {"SHERD_HOST": f"host-{os.environ['RANK']}", "SHERD_TIMEOUT": "3"}
    assert process.communicator().hosts == [[0], [1]]
    with pytest.raises(Exception) as caught, sherd.main_first():
        if sherd.rank() == 0:
            raise FileNotFoundError("no such file: corpus.txt")
        time.sleep(5.0)
    return str(caught.value), sherd.gather(1)


def test_a_first_rank_that_failed_waits_for_those_of_other_hosts(ranks):
    (own, after), (other, still) = ranks(2).run(slow_on_another_host)
    assert own == "no such file: corpus.txt" and after == still == [1, 1]
    assert other == f"rank 1: sherd.main_first failed on rank 0, and therefore on all ranks: FileNotFoundError: {own}"


def fails(who):
    with pytest.raises(Exception) as caught, sherd.main_first():
        if sherd.rank() == who:
            raise FileNotFoundError("no such file: corpus.txt")
    return type(caught.value).__name__, str(caught.value), sherd.gather(1)


def test_what_the_first_raises_all_raise(ranks):
    (own, words, after), *others = ranks(3).run(fails, 0)
    assert (own, words, after) == ("FileNotFoundError", "no such file: corpus.txt", [1, 1, 1])
    for number, (kind, text, still) in enumerate(others, 1):
        assert kind == "SherdError" and still == [1, 1, 1]
        assert text.startswith(
            f"rank {number}: sherd.main_first failed on rank 0, and therefore on all ranks: FileNotFoundError"
        )
        assert text.endswith("corpus.txt")


def printed():
    out = io.StringIO()
    sherd.print("one", 2, sep="-", file=out)
    sherd.print("two\nlines", all=True, file=out, flush=True)
    sherd.print("no end", end="", all=True, file=out)
    return out.getvalue()


def test_the_main_rank_prints_for_all(ranks):
    zero, one = ranks(2).run(printed)
    assert zero == "one-2\n[rank 0] two\n[rank 0] lines\n[rank 0] no end"
    assert one == "[rank 1] two\n[rank 1] lines\n[rank 1] no end"
