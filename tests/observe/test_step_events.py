"""Step events: every rank tells its part of every real step, and the parts add up."""

from __future__ import annotations

import math
import re
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sherd
from sherd import comm, observe
from sherd.api.recording.layers import HISTORY, Layer, LayerWatch
from sherd.api.training import training_of
from sherd.errors import ConfigError
from sherd.observe import monitor
from sherd.observe.monitor import RunMonitor
from sherd.observe.phases import BACKWARD, COMMUNICATION, FORWARD, PHASES, REST, PhaseClock
from sherd.observe.process import command
from sherd.observe.runs import load
from tests.helpers.processes import python
from tests.helpers.training import batch, close, double, loss_of

pytestmark = pytest.mark.pure

STRATEGIES = ("ddp", "zero2", "zero3")
ROWS, GLOBAL = 10, 4  # in two steps of 4 rows and one of 2
CLIP = 0.05
PAUSE = 0.004  # seconds


# ---------------------------------------------------------------- the clock


class Hands:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


def test_phases_exclude_each_other_and_add_up():
    hands = Hands()
    clock = PhaseClock(hands)
    hands.now = 5
    before = clock.enter(BACKWARD)
    hands.now = 8
    inner = clock.enter(COMMUNICATION)
    hands.now = 18
    clock.enter(inner)
    hands.now = 20
    clock.enter(before)
    hands.now = 21
    spent = dict(zip(PHASES, clock.spent(), strict=True))
    assert spent == {"data": 0, "forward": 0, "backward": 5, "communication": 10, "update": 0, "rest": 6}


def test_other_threads_count_nothing():
    hands = Hands()
    clock = PhaseClock(hands)

    def elsewhere():
        hands.now = 3
        clock.enter(clock.enter(FORWARD))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert clock.phase == REST
    assert clock.spent()[FORWARD] == 0


def test_without_a_training_loader_what_follows_a_step_is_forward():
    run = RunMonitor()
    run.begin_batch(trains=False)
    run.end_batch(trains=False, samples=3)
    assert run.clock.phase == REST  # a loader to evaluate with
    run.begin_step()
    run.end_step()
    assert run.clock.phase == FORWARD
    run.loads = True
    run.begin_batch(trains=True)
    run.end_batch(trains=True, samples=3)
    assert run.clock.phase == FORWARD
    run.begin_backward([1.0])
    assert run.clock.phase == BACKWARD
    run.end_backward()
    run.begin_step()
    run.end_step()
    assert run.clock.phase == REST


# ---------------------------------------------------------------- runs


class Slow(Dataset):
    """Rows that take a while."""

    def __init__(self):
        self.x, self.y = batch(0, rows=ROWS, dtype=torch.float64)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        time.sleep(PAUSE)
        return self.x[index], self.y[index]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], lr=0.1)


def shown_memory(model):
    """The column of `describe` that is this rank's."""
    text, _, _ = sherd.describe(model).partition("of these, what each rank owns")
    rows = re.findall(r"^  (\S.*?\S)\s+([\d,]+)\s+[\d,]+\s+[\d.]+$", text, re.MULTILINE)
    return {kind: int(own.replace(",", "")) for kind, own in rows}


def trained(strategy, optimizer=adamw, weight=None, **options):
    """Train an epoch; what this rank knows itself of each step."""
    model = double()
    loader = DataLoader(Slow(), batch_size=2)
    with comm.connect() as c:
        model, stepper, loader = sherd.distribute(
            model, optimizer(model), loader, strategy=strategy, comm=c, global_batch=GLOBAL, **options
        )
        begin, sent, found = time.monotonic_ns(), [c.counters.total()], []
        for x, y in loader:
            if weight is not None:
                sherd.weigh(model, weight)
            loss = loss_of(model, (x, y))
            loss.backward()
            norm = float(sherd.clip_grad_norm_(model, CLIP)) if options.get("clip_norm") is None else None
            end = time.monotonic_ns()
            stepper.step()
            sent.append(c.counters.total())
            stepper.zero_grad()
            now, before = sent[-1], sent[-2]
            found.append(
                {
                    "loss": loss.item(),
                    "rows": len(x),
                    "norm": norm,
                    "bytes": {"payload": now.payload - before.payload, "control": now.control - before.control},
                    "memory": shown_memory(model),
                    "at_least": end - begin,
                }
            )
        assert observe.recording()
    return found


def recorded(directory, kind="step"):
    """The events of a kind, by rank."""
    found = {}
    for event in observe.read(directory):
        if event.kind == kind:
            found.setdefault(event.rank, []).append(event)
    return [found[rank] for rank in sorted(found)]


def run(pool, directory, function, *args, **env):
    """Run it with events on; what it returns on each rank."""
    return pool.run(function, *args, env={"SHERD_EVENTS": str(directory), **env})


def norms(by_rank):
    """The gradient's norm in each step, from the ranks' shares."""
    return [math.sqrt(sum(event.fields["norm_squared"] for event in step)) for step in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_tells_its_part_of_every_step(ranks, tmp_path, strategy):
    by_world = {}
    for world in (1, 2):
        directory = tmp_path / str(world)
        known = run(ranks(world), directory, trained, strategy)
        by_rank = recorded(directory)
        by_world[world] = by_rank, known
        assert len(by_rank) == world
        starts = recorded(directory, "run.start")
        for mine, events, (start,) in zip(known, by_rank, starts, strict=True):
            check_start(start.fields, world, strategy)
            assert [event.step for event in events] == list(range(len(mine)))
            passed = 0.0
            for event, own in zip(events, mine, strict=True):
                check_step(event.fields, own, world)
                passed += sum(event.fields["seconds"].values())
                assert own["at_least"] <= 1e9 * passed + 1 <= event.mono - start.mono + 2
        for found, step in zip(norms(by_rank), known[0], strict=True):
            assert found == pytest.approx(step["norm"], rel=1e-6)  # which comes as a float32
            assert found > CLIP  # before it was clipped
        assert [event.fields["ok"] for (event,) in recorded(directory, "run.end")] == [True] * world
    (one, two) = (by_world[world][0] for world in (1, 2))
    assert norms(two) == pytest.approx(norms(one), rel=1e-9)
    assert weighted(two, "root") == pytest.approx(weighted(one, "root"), rel=1e-9)


def weighted(by_rank, name):
    """A figure of each step, averaged over ranks by samples."""
    steps = [[(event.fields[name], event.fields["samples"]) for event in step] for step in zip(*by_rank, strict=True)]
    return [sum(value * n for value, n in step) / sum(n for _, n in step) for step in steps]


def check_start(fields, world, strategy):
    assert (fields["world"], fields["strategy"], fields["options"]) == (world, strategy, {"global_batch": GLOBAL})
    assert fields["hosts"] == [list(range(world))]
    assert fields["transport"] == ("solo" if world == 1 else "host")
    assert fields["model"] == {"elements": 15 * 7 + 7 + 7 * 5 + 5, "parameters": 4, "frozen": 0}
    assert (fields["batch"], fields["accumulate"], fields["total_steps"]) == (GLOBAL, 1, None)
    assert fields["machine"]["torch"] == torch.__version__
    assert {"host", "pid", "command", "threads"} < fields.keys()


def check_step(fields, own, world):
    assert (fields["loss"], fields["root"], fields["samples"]) == (None, own["loss"], own["rows"])
    assert (fields["skipped"], fields["lr"]) == (False, [0.01])
    assert fields["bytes"] == own["bytes"]
    assert fields["memory"] == own["memory"]
    assert fields["memory"]["optimizer state"] > 0
    assert set(fields["resident"]) == {"private", "shared"}
    assert list(fields["seconds"]) == list(PHASES)
    assert fields["seconds"]["data"] >= PAUSE * own["rows"]
    for phase in ("forward", "backward", "update", "rest"):
        assert fields["seconds"][phase] > 0
    assert (fields["seconds"]["communication"] > 0) == (world > 1)
    assert "optimizer" not in fields


def test_the_norm_is_that_of_the_gradient_of_the_step(ranks, tmp_path):
    """Not clipped, and divided by what it was weighed with."""
    options = {"plain": {}, "clipped": {"clip_norm": CLIP}, "weighed": {"weight": 3.0, "clip_norm": 1e9}}
    run(ranks(2), tmp_path / "weighed without a clip", weighed_twice, "zero2")
    for name, chosen in options.items():
        run(ranks(2), tmp_path / name, first_step, "zero2", chosen)
    expected, *others = (norms(recorded(path)) for path in sorted(tmp_path.iterdir()))
    assert len(others) == len(options)
    for found in others:
        assert found[0] == pytest.approx(expected[0], rel=1e-12)


def first_step(strategy, options):
    trained(strategy, sgd, **options)


def weighed_twice(strategy):
    """A step of two weighed backwards with the same rows: the mean of both."""
    model = double()
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c)
        x, y = batch(0, rows=ROWS, dtype=torch.float64)
        rows = slice(2 * c.rank, 2 * c.rank + 2)
        for weight in (1.0, 5.0):
            sherd.weigh(model, weight)
            loss_of(model, (x[rows], y[rows])).backward()
        optimizer.step()


def kept(strategy):
    """Steps without zero_grad(): each adds to a gradient that was clipped."""
    model = double()
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c)
        found = []
        for number in range(3):
            loss_of(model, batch(c.rank, number, dtype=torch.float64)).backward()
            found.append(float(sherd.clip_grad_norm_(model, CLIP)))
            optimizer.step()
        return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_added_to_a_clipped_gradient_adds_to_what_is_left(ranks, tmp_path, strategy):
    known, _ = run(ranks(2), tmp_path, kept, strategy)
    assert norms(recorded(tmp_path)) == pytest.approx(known, rel=1e-6)


def unusual(strategy):
    """Steps of windows, steps that are skipped, and steps with a closure."""
    model = double()
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c, accumulate=3)
        losses = []
        for number in range(9):
            loss = loss_of(model, batch(c.rank, number, dtype=torch.float64))
            losses.append(loss.item())
            if number == 4:
                loss = loss * math.nan
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_window_is_one_step_and_a_skipped_one_counts(ranks, tmp_path, strategy):
    known = run(ranks(2), tmp_path, unusual, strategy)
    for losses, events in zip(known, recorded(tmp_path), strict=True):
        assert [event.step for event in events] == [0, 1, 2]
        assert [event.fields["skipped"] for event in events] == [False, True, False]
        assert [event.fields["samples"] for event in events] == [None] * 3
        assert [event.fields["lr"] for event in events] == [[0.1, 0.5]] * 3
        for number in (0, 2):
            mean = sum(losses[3 * number : 3 * number + 3]) / 3
            assert events[number].fields["root"] == pytest.approx(mean, rel=1e-12)
        assert math.isnan(events[1].fields["root"])
    found = norms(recorded(tmp_path))
    assert not math.isfinite(found[1])
    assert all(map(math.isfinite, (found[0], found[2])))


def with_closures(kind):
    model = double()
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, kind(model.parameters(), lr=0.1), strategy="ddp", comm=c)
        data = batch(c.rank, dtype=torch.float64)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_the_loss_of_a_closure_is_that_of_the_step(ranks, tmp_path, kind):
    known = run(ranks(2), tmp_path, with_closures, kind)
    for losses, events in zip(known, recorded(tmp_path), strict=True):
        assert [event.fields["loss"] for event in events] == losses
        assert all(event.fields["seconds"]["forward"] > 0 for event in events)


# ---------------------------------------------------------------- sherd.log


def logged():
    sherd.log(early=1)  # before anything, in a child process: it is not known as a rank yet
    model = double()
    loader = DataLoader(TensorDataset(*batch(0, rows=ROWS, dtype=torch.float64)), batch_size=3)
    with comm.connect() as c:
        model, optimizer, loader = sherd.distribute(model, sgd(model), loader, comm=c)
        sherd.log(begun=True)
        for number, (x, y) in enumerate(loader):
            loss = loss_of(model, (x, y))
            if c.rank == 0 and number == 0:
                sherd.log(loss=loss, tokens=7)
                sherd.log(loss=2 * loss.item(), tokens=torch.tensor(8), n=1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if c.rank == 0:
                sherd.log(accuracy=torch.tensor([0.5]), n=2)
        observe.emit("sample", text="Once upon a time", title="after training")
        observe.expect(100)


def test_figures_of_a_user_belong_to_their_step_and_need_no_other_rank(ranks, tmp_path):
    run(ranks(2), tmp_path, logged)
    first, second = recorded(tmp_path, "log")
    (begun,) = second
    assert (begun.step, begun.fields) == (0, {"figures": {"begun": 1}, "n": 1})
    steps = recorded(tmp_path)
    assert [event.fields["loss"] for events in steps for event in events] == [None] * 4
    row, other = load(tmp_path).steps
    assert row.loss == pytest.approx(steps[0][0].fields["root"] * (3 + 2) / (3 + 1), rel=1e-12)
    assert (row.tokens, other.tokens) == (15, None)
    rest = [(event.step, list(event.fields["figures"]), event.fields["n"]) for event in first[1:]]
    assert rest == [
        (0, ["loss", "tokens"], 3),
        (0, ["loss", "tokens"], 1),
        (0, ["accuracy"], 2),
        (1, ["accuracy"], 2),
    ]
    assert [events[0].fields["text"] for events in recorded(tmp_path, "sample")] == ["Once upon a time"] * 2
    assert [events[0].fields for events in recorded(tmp_path, "run.length")] == [{"steps": 100}] * 2


def evaluated():
    """Two ranks have 5 samples: three batches each of one, the last of which is only repeated on rank 1."""
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(8.0).view(-1, 1))
    held_out = TensorDataset(torch.arange(5.0).view(-1, 1))
    with comm.connect() as c:
        model, optimizer, loader, held_out = sherd.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            DataLoader(data, batch_size=2),
            DataLoader(held_out, batch_size=1),
            comm=c,
        )
        for number, (x,) in enumerate(loader):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                with torch.no_grad():
                    for (x,) in held_out:
                        sherd.log(held_out=x.pow(2).mean())
        with torch.no_grad():
            for _ in loader:
                sherd.log(seen=1.0)
        sherd.log(over=1.0)


def test_figures_weigh_what_the_batch_at_hand_has_of_its_own(ranks, tmp_path):
    run(ranks(2), tmp_path, evaluated)
    for rank, events in enumerate(recorded(tmp_path, "log")):
        weights = [(name, event.fields["n"]) for event in events for name in event.fields["figures"]]
        assert weights == [
            *zip(["held_out"] * 3, (1, 1, 1 - rank), strict=True),
            ("seen", 2),
            ("seen", 2),
            ("over", 1),
        ]
    first, last = load(tmp_path).steps
    assert first.figures["held_out"] == pytest.approx((0 + 1 + 4 + 9 + 16) / 5)
    # Batches of the training loader that were fetched without gradients are none of a step.
    assert [row.samples for row in (first, last)] == [4, 4]
    assert last.figures == {"seen": 1.0, "over": 1.0}


def scaled(divided):
    """A loss of 1 through a GradScaler, and perhaps a part of that."""
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=c)
        for _ in range(2):
            loss = scaler.scale(model(torch.ones(1, 2)).sum() * 0 + 1)
            (loss / 2 if divided else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize(("divided", "root"), [(False, 1.0), (True, None)])
def test_the_root_of_a_scaled_loss_is_not_the_scaled_one(ranks, tmp_path, divided, root):
    run(ranks(1), tmp_path, scaled, divided)
    ((*events,),) = recorded(tmp_path)
    assert [event.fields["root"] for event in events] == [root, root]


def folds():
    """Two runs in one process."""
    with comm.connect() as c:
        for number in range(2):
            model = double()
            model, optimizer = sherd.distribute(model, sgd(model), comm=c)
            for step in range(2 + number):
                loss_of(model, batch(c.rank, step, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()
                sherd.log(loss=100.0 * number + step)
            sherd.distribute(double(), comm=c)  # a model that only looks on begins no run


def test_a_distribute_after_steps_is_another_run(ranks, tmp_path):
    run(ranks(2), tmp_path, folds)
    for starts, events, logs in zip(*(recorded(tmp_path, kind) for kind in ("run.start", "step", "log")), strict=True):
        assert ["optimizer" in start.fields for start in starts] == [False, False]
        assert [event.step for event in events] == [event.step for event in logs] == [0, 1, 0, 1, 2]
        assert not any("optimizer" in event.fields for event in events)
    assert load(tmp_path).steps.losses() == ([0, 1, 2], [100.0, 101.0, 102.0])


def accumulated():
    """Windows of two, logged after `step()`."""
    model = double()
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, sgd(model), comm=c, accumulate=2)
        for number in range(4):
            loss_of(model, batch(c.rank, number, dtype=torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sherd.log(loss=float(number), tokens=10)


def test_what_is_logged_after_every_part_of_a_window_is_of_its_step(ranks, tmp_path):
    run(ranks(2), tmp_path, accumulated)
    steps = load(tmp_path).steps
    assert [(row.loss, row.tokens) for row in steps] == [(0.5, 40), (2.5, 40)]


def test_secrets_of_the_command_are_not_written(monkeypatch):
    words = ["train.py", "--api-key", "K1", "--hfToken=K2", "wandb.api_key=K3", "-password", "K4", "--secret"]
    monkeypatch.setattr(sys, "argv", [*words, "--tokens", "512", "--max-tokens=5", "--keyframes", "3", "key.txt"])
    told = command()
    assert not any(secret in word for word in told for secret in ("K1", "K2", "K3", "K4"))
    assert told == [
        *("train.py", "--api-key", "***", "--hfToken=***", "wandb.api_key=***", "-password", "***", "--secret"),
        *("--tokens", "512", "--max-tokens=5", "--keyframes", "3", "key.txt"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "sherd.log got no figures"),
        (
            {"loss": "low"},
            r"sherd.log got loss='low', expected a number .* sherd.observe.emit\(\"sample\", text=loss\)",
        ),
        ({"loss": torch.ones(2)}, r"sherd.log got loss=a tensor of shape \(2,\).*loss.mean\(\)"),
        ({"loss": None}, "sherd.log got loss=None"),
        ({"loss": 1.0, "n": -1}, "sherd.log got n=-1; write the number of samples"),
    ],
)
def test_figures_are_checked_while_events_are_off_too(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sherd.log(**arguments)


def test_the_length_of_a_run_is_a_number_of_steps():
    with pytest.raises(ConfigError, match=r"observe.expect got 0; write the number of steps"):
        observe.expect(0)


# ---------------------------------------------------------------- off


def quiet():
    model = double()
    loader = DataLoader(TensorDataset(*batch(0, rows=ROWS, dtype=torch.float64)), batch_size=2)
    with comm.connect() as c:
        model, optimizer, loader = sherd.distribute(model, sgd(model), loader, comm=c)
        sherd.log(loss=1.0)
        for x, y in loader:
            loss_of(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert monitor.current is None
        assert not training_of(model).recorders
        return dict(model.state_dict())


def quiet_values():
    """The weights after an epoch with a loader that shuffles and has a worker that draws random numbers."""
    torch.manual_seed(0)
    model = double()
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=1)
    with comm.connect() as c:
        model, optimizer, loader = sherd.distribute(model, sgd(model), loader, comm=c)
        for x, y in loader:
            loss_of(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())


class Noisy(Dataset):
    """Rows with noise, whose worker tries to tell of it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        sherd.log(row=index)
        observe.emit("sample", text="from a worker")
        generator = torch.Generator().manual_seed(index)
        x, y = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (15, 5))
        return x + torch.randn(15, dtype=torch.float64), y


@pytest.mark.parametrize("world", [1, 2])
def test_without_events_nothing_is_watched(ranks, world):
    ranks(world).run(quiet, env={"SHERD_EVENTS": ""})  # which asserts it


def test_events_change_no_bit_and_workers_do_not_write(ranks, tmp_path):
    (off,) = ranks(1).run(quiet_values, env={"SHERD_EVENTS": ""})
    (on,) = run(ranks(1), tmp_path, quiet_values)
    close(on, off, rtol=0)
    assert [len(events) for events in recorded(tmp_path)] == [2]
    assert recorded(tmp_path, "sample") == recorded(tmp_path, "log") == []


# ---------------------------------------------------------------- several optimizers, ends


def adversaries():
    first, second = double(), double()
    with comm.connect() as c:
        first, one = sherd.distribute(first, sgd(first), comm=c)
        second, other = sherd.distribute(second, sgd(second), comm=c, strategy="ddp")
        for number in range(2):
            for _ in range(2):
                loss_of(second, batch(c.rank, number, dtype=torch.float64)).backward()
                other.step()
                other.zero_grad()
            loss_of(first, batch(c.rank, number, dtype=torch.float64)).backward()
            one.step()
            one.zero_grad()
            sherd.log(done=1)


def test_every_optimizer_has_steps_of_its_own(ranks, tmp_path):
    run(ranks(2), tmp_path, adversaries)
    for events, starts in zip(recorded(tmp_path), recorded(tmp_path, "run.start"), strict=True):
        assert [start.fields.get("optimizer", 0) for start in starts] == [0, 1]
        one = [event for event in events if "optimizer" not in event.fields]
        other = [event for event in events if event.fields.get("optimizer") == 1]
        assert [event.step for event in one] == [0, 1]
        assert [event.step for event in other] == [0, 1, 2, 3]
        # The first one's add up to the whole run, whatever happens in between.
        passed = sum(sum(event.fields["seconds"].values()) for event in one)
        assert other[-1].mono - starts[1].mono <= 1e9 * passed + 2
    # What is logged belongs to the steps of the one that took the first, of which a reader has its rows.
    assert [[event.step for event in events] for events in recorded(tmp_path, "log")] == [[1, 3]] * 2
    rows = load(tmp_path).steps
    assert [(row.step, row.figures) for row in rows] == [(0, {}), (1, {"done": 1}), (2, {}), (3, {"done": 1})]
    assert [row.root for row in rows] == [None] * 4, "of two optimizers nobody knows whose it is"


def two_of_one_model():
    model = double()
    with comm.connect() as c:
        one, other = (torch.optim.SGD(model[layer].parameters(), lr=0.1 * (1 + layer)) for layer in (0, 2))
        model, one, other = sherd.distribute(model, one, other, comm=c, clip_norm=1e-3)
        for number in range(4):
            loss_of(model, batch(c.rank, number, dtype=torch.float64)).backward()
            squares = [float(model[layer].weight.grad.norm()) ** 2 for layer in (0, 2)]
            squares = [a + float(model[layer].bias.grad.norm()) ** 2 for a, layer in zip(squares, (0, 2), strict=True)]
            one.step()
            one.zero_grad()
            if number % 2:
                other.step()
            other.zero_grad()
        return [math.sqrt(each) for each in squares]


def test_optimizers_of_one_model_have_steps_and_norms_of_their_own(ranks, tmp_path):
    expected, _ = run(ranks(2), tmp_path, two_of_one_model)
    by_rank = recorded(tmp_path)
    for number, steps in ((0, 4), (1, 2)):
        own = [[event for event in events if event.fields.get("optimizer", 0) == number] for events in by_rank]
        assert [[event.step for event in events] for events in own] == [list(range(steps))] * 2
        assert {tuple(event.fields["lr"]) for events in own for event in events} == {(0.1 * (1 + 2 * number),)}
        assert norms(own)[-1] == pytest.approx(expected[number], rel=1e-9)  # before clipping


SCRIPT = """
import sys, torch, sherd
sherd.log(early=1)
sherd.observe.emit("sample", text="early")
model = torch.nn.Linear(3, 2)
model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
if sys.argv[1:]:
    raise RuntimeError(sys.argv[1])
"""


@pytest.mark.ranks
@pytest.mark.parametrize("error", [None, "on purpose"])
def test_a_plain_script_tells_how_it_ended(tmp_path, error):
    ended = python(SCRIPT, *([error] if error else []), SHERD_EVENTS=str(tmp_path))
    assert (ended.returncode, error is not None and error in ended.stderr) == (
        int(error is not None),
        error is not None,
    )
    events = list(observe.read(tmp_path))
    assert [event.kind for event in events] == ["log", "sample", "run.start", "step", "run.end"]
    assert events[2].fields["command"][1:] == ([error] if error else [])
    assert load(tmp_path).steps[0].figures == {"early": 1}
    assert events[-1].fields == {"ok": error is None}


def fails():
    with comm.connect() as c:
        model = double()
        sherd.distribute(model, sgd(model), comm=c)
        raise RuntimeError("on purpose")


def test_a_rank_that_fails_says_so(ranks, tmp_path):
    with pytest.raises(sherd.RankFailed, match="on purpose"):
        run(ranks(2), tmp_path, fails)
    assert [events[0].fields["ok"] for events in recorded(tmp_path, "run.end")] == [False, False]


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_have_the_figures_of_one_process(ranks, tmp_path, strategy):
    by_world = []
    for world in (1, 2):
        run(ranks(world), tmp_path / str(world), trained, strategy, SHERD_LAYERS="1")
        by_world.append([layers_of(step) for step in zip(*recorded(tmp_path / str(world)), strict=True)])
    for one, two in zip(*by_world, strict=True):
        assert one.keys() == two.keys() == {"0", "2"}
        for name in one:
            assert two[name] == pytest.approx(one[name], rel=1e-9)
            assert all(value > 0 for value in one[name].values())


def layers_of(step):
    """The sums of the ranks' shares, by layer."""
    found = {}
    for event in step:
        layers = event.fields["layers"]
        total = sum(layer["norm_squared"] for layer in layers.values())
        assert total == pytest.approx(event.fields["norm_squared"], rel=1e-12)
        for name, layer in layers.items():
            sums = found.setdefault(name, dict.fromkeys(layer, 0.0))
            for what, value in layer.items():
                sums[what] += value
    return found


def test_the_update_of_a_layer_is_what_changed(ranks, tmp_path):
    run(ranks(1), tmp_path, one_update, SHERD_LAYERS="1")
    ((event,),) = recorded(tmp_path)
    layer = event.fields["layers"]["(model)"]
    # Of a weight of [3, 4] with a gradient of [1, 1] and a rate of 0.5.
    assert layer == pytest.approx({"norm_squared": 2.0, "update_squared": 0.5, "value_squared": 2.5**2 + 3.5**2})


def one_update():
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), comm=c)
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()


def layer(gradient, ratio=0.01):
    return Layer(numel=1, norm_squared=gradient**2, update_squared=ratio**2, value_squared=1.0, leads=True)


@pytest.mark.parametrize(
    ("past", "now", "words"),
    [
        (layer(1.0), layer(1e-5), "vanishing gradient"),
        (layer(1e-7), layer(1e-7), "vanishing gradient"),
        (layer(1.0), layer(200.0), "exploding gradient"),
        (layer(1.0), layer(1.0, ratio=1e-9), "hardly moves"),
        (layer(1.0), layer(1.0, ratio=2.0), "is overwritten"),
        (layer(1.0), layer(0.01), None),
        (layer(1e-4), layer(1e-5), None),
        (layer(1e-4), layer(0.5), None),
        (layer(1.0), layer(50.0), None),
        (layer(1.0, ratio=0.5), layer(1.0, ratio=1.5), None),
        (layer(1.0), layer(math.nan), None),
    ],
)
def test_a_layer_that_goes_astray_is_told_of_once(past, now, words):
    others = {str(number): layer(1.0) for number in range(4)}
    watch = LayerWatch()
    for _ in range(HISTORY):
        assert watch.look({**others, "odd": past}, moving=True) == []
    found = watch.look({**others, "odd": now}, moving=True)
    assert [name for name, _ in found] == (["odd"] if words else [])
    assert all(words in text for _, text in found)
    assert watch.look({**others, "odd": now}, moving=True) == []


def astray():
    """A layer whose gradient explodes after a while."""
    model = double()
    with comm.connect() as c:
        model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-12), comm=c)
        for number in range(HISTORY + 1):
            loss = loss_of(model, batch(c.rank, number, dtype=torch.float64))
            (loss * (1e6 if number == HISTORY else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_warning_names_the_layer_and_the_step(ranks, tmp_path):
    run(ranks(2), tmp_path, astray, SHERD_LAYERS="1")
    warnings = [event for events in recorded(tmp_path, "warning") for event in events]
    found = {event.fields["layer"] for event in warnings if "exploding" in event.fields["text"]}
    assert found and found <= {"0", "2"}
    assert {event.step for event in warnings if "exploding" in event.fields["text"]} == {HISTORY}
