"""What every script needs around its loop: who does what, what all ranks know, figures, seeds, bars."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import sys
import time

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import sherd
from sherd import CommOptions, ConfigError, observe
from sherd.api.helpers import bars, process
from sherd.testing import run_ranks
from tests.helpers.loaders import Numbers, Pairs
from tests.helpers.processes import python, run
from tests.helpers.training import STRATEGIES, batch, connected, loss_of, network, sgd, weights

pytestmark = pytest.mark.pure

# ---------------------------------------------------------------- who is who


def numbers_without_connecting():
    before = sherd.rank(), sherd.world(), sherd.is_main(), torch.distributed.is_initialized()
    sherd.barrier()
    after = sherd.rank(), sherd.world(), sherd.is_main(), torch.distributed.is_initialized()
    return before, after


def test_the_numbers_of_a_rank_need_no_connection(ranks):
    found = ranks(2).run(numbers_without_connecting)
    assert found == [((0, 2, True, False), (0, 2, True, True)), ((1, 2, False, False), (1, 2, False, True))]


def test_without_a_launcher_there_is_one_rank():
    assert (sherd.rank(), sherd.world(), sherd.is_main()) == (0, 1, True)
    sherd.barrier()
    assert sherd.broadcast({"a": (1, 2)}) == {"a": (1, 2)}
    assert sherd.gather("x") == ["x"]
    assert sherd.mean(3.0, n=2) == 3.0
    with sherd.main_first():
        pass


def test_variables_that_are_no_numbers_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two' must be a whole number"):
        sherd.world()


@pytest.mark.ranks
def test_everything_is_found_by_dir_without_importing_torch():
    code = (
        "import sys, sherd; assert dir(sherd) == sorted(sherd.__all__) and 'torch' not in sys.modules;"
        "assert {'rank', 'distribute', 'launch', 'progress', 'print', 'comm'} <= set(dir(sherd));"
        "assert all(hasattr(sherd, name) for name in dir(sherd))"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- what all ranks know


def broadcasts():
    mine = {"rank": sherd.rank(), "rows": torch.arange(3) + sherd.rank(), "pair": (1.5, None)}
    found = [sherd.broadcast(mine), sherd.broadcast(mine, root=1)]
    with pytest.raises(ConfigError, match=r"sherd\.broadcast got root=2; write a rank from 0 to 1"):
        sherd.broadcast(1, root=2)
    return [(each["rank"], each["rows"].tolist(), each["pair"]) for each in found]


def test_a_value_of_one_rank_reaches_all(ranks):
    assert ranks(2).run(broadcasts) == [[(0, [0, 1, 2], (1.5, None)), (1, [1, 2, 3], (1.5, None))]] * 2


def one_communicator():
    """Helpers before, during and after training: no more than one communicator, and not a byte of payload."""
    sherd.barrier()
    first = process.communicator()
    model, optimizer = network(), None
    optimizer = sgd(model)
    sherd.distribute(model, optimizer, strategy="zero2")
    assert process.communicator() is first and sherd.api.training.training_of(model).engine.comm is first
    payload = first.counters.total().payload
    sherd.gather(torch.ones(3))
    sherd.mean(1.0, n=1)
    sherd.broadcast("x" * 1000)
    with sherd.main_first():
        pass
    assert first.counters.total().payload == payload
    other = network()
    sherd.distribute(other, strategy="ddp", comm=CommOptions(timeout=100.0))
    second = process.communicator()
    assert second is not first and sherd.api.training.training_of(other).engine.comm is second
    with connected() as third:
        sherd.distribute(network(), strategy="ddp", comm=third)
        assert process.communicator() is second
    second.close()
    sherd.barrier()
    assert process.communicator() not in (first, second)
    return process.communicator().world


def test_helpers_share_a_communicator_with_distribute(ranks):
    assert ranks(2).run(one_communicator) == [2, 2]


def refused_first():
    """What `distribute` refuses closes the communicator; helpers and the next call find another."""
    sherd.barrier()
    with pytest.raises(ConfigError):
        sherd.distribute(network(), strategy="zero9")
    sherd.barrier()
    sherd.distribute(network(), strategy="zero2")
    return sherd.gather(sherd.rank())


def test_helpers_go_on_after_a_refusal(ranks):
    assert ranks(2).run(refused_first) == [[0, 1]] * 2


def in_a_fork():
    sherd.barrier()
    child = os.fork()
    if not child:
        try:
            sherd.barrier()
        except ConfigError as error:
            os._exit(3 if "is no rank" in str(error) else 4)
        os._exit(5)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sherd.barrier()
    return code


def test_a_forked_process_takes_no_part(ranks):
    assert ranks(2).run(in_a_fork) == [3, 3]


def alone():
    if sherd.rank() == 0:
        sherd.mean(1.0, n=1)
    else:
        sherd.gather(1.0)


@pytest.mark.ranks
def test_helpers_that_differ_between_ranks_are_found_out():
    with pytest.raises(sherd.RankFailed) as caught:
        run_ranks(alone, 2, env={"SHERD_TIMEOUT": "60"})
    assert "sherd.mean" in str(caught.value) and "sherd.gather" in str(caught.value)
    assert "in alone" in str(caught.value)  # the line of the script, not one of ours


# ---------------------------------------------------------------- main_first


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
    assert other == f"rank 1: sherd.main_first failed on rank 0, so on all ranks: FileNotFoundError: {own}"


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
        assert text.startswith(f"rank {number}: sherd.main_first failed on rank 0, so on all ranks: FileNotFoundError")
        assert text.endswith("corpus.txt")


# ---------------------------------------------------------------- figures


def model_and(loader):
    model = network()
    return sherd.distribute(model, sgd(model), loader, strategy="ddp")[2]


def figures(count, size):
    """Means and gathered rows of every batch, and after the loop."""
    loader = model_and(DataLoader(Numbers(count), size))
    found = []
    for rows in loader:
        x = rows.double()
        right = (rows % 3 == 0).double().mean()
        found.append((sherd.mean(x.mean()).item(), sherd.mean(right.item()), sherd.gather(rows).tolist()))
    kept = torch.cat(list(loader))
    last = sherd.mean(1.0, n=len(kept))
    return found, sorted(sherd.gather(kept).tolist()), last


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_counts_once(ranks, world):
    for count in (5, 7, 13):
        by_rank = ranks(world).run(figures, count, 6 // world)
        assert all(each == by_rank[0] for each in by_rank)
        found, after, last = by_rank[0]
        rows = list(range(count))
        expected = [rows[start : start + 6] for start in range(0, count, 6)]
        assert [gathered for *_, gathered in found] == expected
        assert after == rows and last == 1.0
        for (mean, right, _), batch_rows in zip(found, expected, strict=True):
            assert math.isclose(mean, sum(batch_rows) / len(batch_rows), rel_tol=1e-12)
            assert math.isclose(right, sum(row % 3 == 0 for row in batch_rows) / len(batch_rows), rel_tol=1e-12)


def means():
    r = sherd.rank()
    found = [
        sherd.mean(float(r), n=1 + r),
        sherd.mean(math.nan if r else 7.0, n=0 if r else 3),
        sherd.mean(torch.tensor([r, 1.0]), n=torch.tensor(2)).tolist(),
        sherd.mean(torch.tensor(r + 1), n=1),
        sherd.mean(numpy.float32(0.5), n=numpy.int64(3)),
        sherd.mean(torch.full((2,), math.nan), n=0).isnan().tolist(),
        sherd.mean(10**20 + r, n=1),
        sherd.mean(1e308, n=1e300),
        sherd.mean(-math.inf if r else math.inf, n=1),
        sherd.mean(torch.tensor([math.inf, 1e308]), n=3).tolist(),
        sherd.mean("nothing" if r else torch.tensor([2.0, 4.0]), n=1 - r).tolist(),
        sherd.mean(torch.ones(5) if r else 3.0, n=1 - r),
    ]
    assert math.isnan(found.pop(8)) and found[-1] == 3.0
    assert isinstance(found.pop(), torch.Tensor if r else float)
    assert sherd.mean(torch.ones(1), n=1).dtype == torch.float32 and found[3].dtype == torch.float64
    return [*found[:3], found[3].item(), *found[4:]]


def test_means_are_weighted(ranks):
    assert (
        ranks(2).run(means)
        == [[2 / 3, 7.0, [0.5, 1.0], 1.5, 0.5, [True, True], 1e20, 1e308, [math.inf, math.inf], [2.0, 4.0]]] * 2
    )


def refused_means():
    r, words = sherd.rank(), []
    for value, n in (
        (1.0, -1 if r else 1),
        ("a" if r else 1.0, 1),
        (torch.ones(1 + r), 1),
        (1.0, math.nan if r else 1),
        (10**400 if r else 1, 1),
    ):
        with pytest.raises(ConfigError) as caught:
            sherd.mean(value, n=n)
        words.append(str(caught.value))
    for mine in (torch.ones(1, 2 + r), torch.ones(2) if r else 1.0, (torch.ones(1),) * (1 + r)):
        with pytest.raises(ConfigError) as caught:
            sherd.gather(mine)
        words.append(str(caught.value))
    return words, sherd.gather(1)


def test_what_one_rank_refuses_all_do(ranks):
    for words, after in ranks(2).run(refused_means):
        assert after == [1, 1]
        assert "rank 1: sherd.mean got n=-1" in words[0] and "rank 1: sherd.mean got a str" in words[1]
        assert "shape (1,) on rank 0 and (2,) on rank 1" in words[2] and "n=nan" in words[3]
        assert "rank 1: sherd.mean int too large" in words.pop(4)
        assert "float32[*, 2] on rank 0 and float32[*, 3] on rank 1" in words[4]
        assert "no rows on rank 0 and float32[*] on rank 1" in words[5]
        assert "tuple(float32[*]) on rank 0 and tuple(float32[*], float32[*]) on rank 1" in words[6]


def without_a_loader():
    with pytest.raises(ConfigError, match=r"no batch of a distributed loader is at hand.*write sherd\.mean\(value, n="):
        sherd.mean(1.0)


@pytest.mark.ranks
def test_without_a_loader_n_has_to_be_said():
    run_ranks(without_a_loader, 1)


def gathered():
    r = sherd.rank()
    nested = sherd.gather({"x": torch.full((1 + r, 2), r), "pair": (torch.tensor([r]), [torch.tensor([True])])})
    return (
        nested["x"].tolist(),
        nested["pair"][0].tolist(),
        nested["pair"][1][0].tolist(),
        sherd.gather(torch.tensor(r)),
    )


def test_tensors_are_put_together_and_other_things_listed(ranks):
    for rows, numbers, truths, scalars in ranks(2).run(gathered):
        assert rows == [[0, 0], [1, 1], [1, 1]] and numbers == [0, 1] and truths == [True, True]
        assert [each.item() for each in scalars] == [0, 1]


def per_rank_figures_at_an_uneven_end():
    loader = model_and(DataLoader(Numbers(3), 1))
    found = []
    for rows in loader:
        found.append(len(sherd.gather((rows, torch.zeros(3)))[1]))  # as long as nothing that the loader gave
        found.append(len(sherd.gather(torch.zeros(len(rows)), rows=False)))
    return found, sherd.gather(torch.zeros(1)).shape[0]


def test_rows_that_are_not_of_the_batch_are_all_kept(ranks):
    assert ranks(2).run(per_rank_figures_at_an_uneven_end) == [([6, 2, 6, 2], 2)] * 2


def by_its_own_sampler():
    data = Numbers(6)
    loader = model_and(
        DataLoader(data, 2, sampler=DistributedSampler(data, sherd.world(), sherd.rank(), shuffle=False))
    )
    return [sherd.mean(float(rows.sum()) / len(rows)) for rows in loader]


def evaluated_in_the_middle():
    """An evaluation inside a training loop: rows of all its batches, and then those of the training batch again."""
    model, evaluated = network(), DataLoader(Numbers(5), 2)
    *_, loader, evaluated = sherd.distribute(model, sgd(model), DataLoader(Numbers(7), 1), evaluated, strategy="ddp")
    found = []
    for rows in loader:
        kept = torch.cat(list(evaluated))
        everything = sherd.gather(kept, loader=evaluated).tolist()
        found.append((sorted(everything), sherd.mean(float(rows.item()))))
        for _ in evaluated:
            break
        assert sherd.mean(1.0 if len(rows) else 2.0) == 1.0
    return found, sherd.gather(rows).tolist()


def test_an_evaluation_inside_a_training_loop(ranks):
    for found, _ in ranks(3).run(evaluated_in_the_middle):
        assert found == [(list(range(5)), 1.0), (list(range(5)), 4.0), (list(range(5)), 6.0)]


def test_a_distributed_sampler_is_counted_too(ranks):
    assert ranks(2).run(by_its_own_sampler) == [[1.5, 4.5]] * 2


def trained(strategy, help_along):
    """Helpers wherever a script may call them: between backward and step, inside an accumulation window, ..."""
    model = network()
    optimizer = sgd(model)
    sherd.distribute(model, optimizer, strategy=strategy, accumulate=2)
    for step in range(4):
        loss = loss_of(model, batch(sherd.rank(), step))
        if help_along:
            sherd.mean(loss, n=1)
        loss.backward()
        if help_along:
            sherd.gather(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if help_along:
            sherd.barrier()
    return weights(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_helpers_do_not_disturb_training(ranks, strategy):
    plain, helped = (ranks(2).run(trained, strategy, each) for each in (False, True))
    for one, other in zip(plain, helped, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- seeds


def drawn():
    return torch.rand(1).item(), random.random(), float(numpy.random.random())


def seeds():
    model, other, third = network(), network(), network()
    sherd.seed(5)
    alike = drawn()
    loader = DataLoader(Numbers(8), 2, shuffle=True)
    sherd.distribute(model, sgd(model), loader, strategy="ddp")
    after = drawn()
    rows = sherd.gather(torch.cat(list(loader))).tolist()
    torch.manual_seed(1)
    sherd.distribute(other, strategy="ddp")  # a second time nothing is seeded
    same = torch.rand(1).item()
    sherd.seed(5)  # another trial
    again = drawn()
    sherd.distribute(third, strategy="ddp")
    return alike, after, rows, same, again, drawn()


def test_ranks_are_seeded_alike_until_distribute_then_by_rank(ranks):
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    first, second = drawn(), drawn()
    (alike, after, rows, same, again, after_again), *others = ranks(3).run(seeds)
    assert again == alike == first and after_again == after == second  # rank 0 goes on as one process would
    assert sorted(rows) == list(range(8))
    for other in others:
        assert other[0] == other[4] == alike and other[2] == rows and other[3] == same
        assert other[1] == other[5] and not set(other[1]) & set(after)
    assert others[0][1] != others[1][1]


def not_seeded():
    model = network()
    torch.manual_seed(3)
    sherd.distribute(model, strategy="ddp")
    return torch.rand(1).item()


def test_without_a_seed_distribute_seeds_nothing(ranks):
    one, two = ranks(2).run(not_seeded)
    assert one == two


@pytest.mark.parametrize("n", [-1, 1.0, True, "1", 1 << 63])
def test_seeds_that_are_none_are_refused(n):
    with pytest.raises(ConfigError, match=r"write a whole number from 0 to 2\*\*63 - 1"):
        sherd.seed(n)


# ---------------------------------------------------------------- print and progress


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes as the test says."""
    now = [0.0]
    monkeypatch.setattr(bars, "clock", lambda: now[0])
    monkeypatch.setattr(bars, "_line_at", -math.inf)
    return now


def test_a_line_every_ten_seconds_where_there_is_no_terminal(clock, capsys):
    loader = DataLoader([(torch.tensor(n), n) for n in range(100)], batch_size=2)
    assert len(sherd.progress(loader)) == 50
    for x, y in sherd.progress(loader, desc="epoch 1"):
        assert len(x) == len(y) == 2
        clock[0] += 4.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "epoch 1: 3 of 50, 6%, 4.0 s each, 3 min 08 s left" and len(lines) == 16
    for _ in sherd.progress(iter(range(300))):
        for _ in sherd.progress(range(10), total=20):
            clock[0] += 0.01
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) in (2, 3)  # 30 s, whichever loop is asked
    with pytest.raises(TypeError, match="has no length"):
        len(sherd.progress(iter(range(3))))


@pytest.mark.parametrize("leave", ["end", "break", "error"])
def test_a_bar_on_a_terminal(monkeypatch, leave):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with contextlib.suppress(ZeroDivisionError):
        for outer in sherd.progress(range(2), desc="epochs"):
            for inner in sherd.progress(range(3), desc="steps"):
                if leave == "error" and inner:
                    raise ZeroDivisionError
                if leave == "break" and inner:
                    break
            if leave == "break" and outer:
                break
    assert bars._Bar._display is None and bars._Bar._open == 0 and bars._loops == []
    shown = terminal.getvalue()
    assert "epochs" in shown and "steps" in shown
    if leave == "end":
        assert "2/2" in shown


def silent():
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        total = sum(sherd.progress([1, 2, 3]))
    return total, err.getvalue()


def test_other_ranks_are_silent(ranks):
    assert ranks(2).run(silent) == [(6, "")] * 2


def recorded(folder):
    os.environ["SHERD_EVENTS"] = str(folder)
    model = network()
    optimizer, loader = sgd(model), DataLoader(Pairs(12), 2)
    sherd.distribute(model, optimizer, loader, strategy="ddp", accumulate=2)
    for _ in sherd.progress(range(2)):
        for x, y in sherd.progress(loader):
            nn.functional.mse_loss(model(x.float()), y.float()).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks
def test_events_hear_how_many_steps_there_will_be(tmp_path):
    run_ranks(recorded, 1, tmp_path)
    lengths = [event.fields["steps"] for event in observe.read(tmp_path) if event.kind == "run.length"]
    steps = sum(event.kind == "step" for event in observe.read(tmp_path))
    assert lengths == [6, 6] and steps == 6


def test_a_description_is_text_and_no_markup(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert sum(sherd.progress([1, 2], desc="[train] [/x]")) == 3
    assert "[train] [/x]" in terminal.getvalue()


class Forks:
    """It would fork workers when it is asked for an iterator."""

    def __iter__(self):
        assert bars._Bar._display is None
        return iter(range(3))


def test_workers_start_before_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = sherd.progress(Forks(), total=numpy.int64(3))
    assert len(bar) == 3 and list(bar) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((3,), "something to loop over"), (([1], -1), "how many items"), (([1], 1.0), "how many items")],
)
def test_what_cannot_be_shown_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        sherd.progress(*arguments)


# ---------------------------------------------------------------- everywhere


EVERYWHERE = """
import json, sherd
sherd.seed(1)
with sherd.main_first():
    pass
mean = sherd.mean(float(sherd.rank()), n=1)
sherd.print(json.dumps([sherd.world(), mean, sherd.gather(sherd.rank()), sherd.broadcast("x")]))
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "world"),
    [([], 1), (["-m", "sherd.cli", "run", "-n", "2"], 2), (["-m", "torch.distributed.run", "--nproc-per-node=2"], 2)],
)
def test_helpers_need_no_distribute_and_no_launcher(tmp_path, launcher, world):
    (tmp_path / "script.py").write_text(EVERYWHERE)
    done = run(sys.executable, *launcher, tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "[" in line]
    assert json.loads(line[line.index("[") :]) == [world, (world - 1) / 2, list(range(world)), "x"]


@pytest.mark.ranks
def test_inside_launch():
    def inside():
        return sherd.rank(), sherd.world(), sherd.mean(1.0, n=sherd.rank())

    assert sherd.launch(inside, 2) == [(0, 2, 1.0), (1, 2, 1.0)]
