"""Ranks that do different things: an error on every rank that names them, at once."""

from __future__ import annotations

import torch

from tests.helpers.training import SHARDED, adamw, double, loss_of, sgd, train, weights
from tests.what_works.cases import case, refused

SECTION = "Ranks that disagree"
BOTH = r"(?=.*rank 0\b)(?=.*rank 1\b)"  # in any order
STEP = r"(?=.*step \d)"
BIAS = BOTH + r"(?=.*0\.bias)"


def _distributed(run, **options):
    model = double()
    return run.distribute(model, sgd(model), **options)


def _step(model, optimizer, data, backward=True, step=True, zero=True):
    """One turn of the loop, or a part of it."""
    if backward:
        loss_of(model, data).backward()
    if step:
        optimizer.step()
    if zero:
        optimizer.zero_grad()


@case(SECTION, "Batches of different sizes", "each rank's mean counts the same; `sherd.weigh` counts rows instead")
def batch_sizes(run):
    model, optimizer = _distributed(run)
    for x, y in type(run)().batches():
        parts = [(x[:2], y[:2]), (x[2:], y[2:])]
        mine = parts if run.plain else [parts[run.rank]]
        torch.stack([loss_of(model, part) for part in mine]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case(SECTION, "A different number of evaluations or logged losses", "nothing of it is collective")
def evaluations(run):
    model, optimizer = _distributed(run)
    for data in run.batches():
        _step(model, optimizer, data)
        with torch.no_grad():
            for _ in range(run.rank * 3):
                loss_of(model, data).item()
    return weights(model)


@refused(
    SECTION,
    "A rank that runs out of batches earlier",
    "the others are told that it left: give every rank the same number of batches",
    match=r"^rank 1\b.* left.*step \d.*give each the same number of batches, and have them decide together",
    on=(0,),
)
def leaves_early(run):
    model, optimizer = _distributed(run)
    train(model, optimizer, run.batches(3 - run.rank))


def _skips(run, when, **skipped):
    model, optimizer = _distributed(run)
    for step, data in enumerate(run.batches(4)):
        _step(model, optimizer, data, **(skipped if run.rank == 1 and step == when else {}))


@refused(
    SECTION,
    "A rank that skips the `backward()` of the first step",
    "call `backward()` on every rank; multiply the loss by 0 where there is nothing to learn",
    match=BOTH + STEP,
)
def skips_first_backward(run):
    _skips(run, 0, backward=False)


@refused(SECTION, "A rank that skips a later `backward()`", "the same", match=BOTH + STEP)
def skips_backward(run):
    _skips(run, 2, backward=False)


@refused(SECTION, "A rank that skips the last `backward()`", "the same", match=BOTH + STEP)
def skips_last_backward(run):
    _skips(run, 3, backward=False)


@refused(SECTION, "A rank that skips a `step()`", "call `step()` on every rank", match=BOTH + STEP)
def skips_step(run):
    _skips(run, 1, step=False)


@refused(SECTION, "A rank that skips a whole turn of the loop", "give every rank as many batches", match=BOTH + STEP)
def skips_turn(run):
    model, optimizer = _distributed(run)
    for step, data in enumerate(run.batches(4)):
        if not (run.rank == 1 and step == 2):
            _step(model, optimizer, data)
    run.barrier()


@refused(SECTION, "A rank that skips a `zero_grad()`", "call it on every rank", match=BOTH + STEP)
def skips_zero_grad(run):
    _skips(run, 1, zero=False)


@refused(SECTION, "A rank that throws a gradient away and makes another", "do so on every rank", match=BOTH + STEP)
def begins_again(run):
    model, optimizer = _distributed(run)
    for step, data in enumerate(run.batches(3)):
        if run.rank == 1 and step == 1:
            _step(model, optimizer, data, step=False)
        _step(model, optimizer, data)


@refused(SECTION, "A rank that calls `backward()` once more", "call it as often on every rank", match=BOTH + STEP)
def one_backward_more(run):
    model, optimizer = _distributed(run)
    for step, data in enumerate(run.batches(3)):
        if run.rank == 1 and step == 1:
            loss_of(model, data).backward()
        _step(model, optimizer, data)


@refused(
    SECTION,
    "Parameters that are trainable on some ranks only, at `distribute`",
    "build the same model on every rank",
    match=r"the ranks' models differ: rank 0 has '0\.bias' .* where rank 1 has '0\.bias' .* frozen",
)
def frozen_on_one_rank(run):
    model = double()
    model[0].bias.requires_grad_(run.rank == 0)
    run.distribute(model, sgd(model))


def _changes(run, before, after):
    """Rank 1 changes what is trainable between two steps."""
    model = double()
    model[0].bias.requires_grad_(before)
    model, optimizer = run.distribute(model, sgd(model))
    train(model, optimizer, run.batches(2))
    if run.rank == 1:
        model[0].bias.requires_grad_(after)
    train(model, optimizer, run.batches(2))


@refused(SECTION, "A parameter frozen later on one rank", "do it on every rank", match=BIAS)
def frozen_later_on_one_rank(run):
    _changes(run, True, False)


@refused(SECTION, "A parameter unfrozen later on one rank", "do it on every rank", match=BIAS)
def unfrozen_later_on_one_rank(run):
    _changes(run, False, True)


@refused(
    SECTION,
    "Different options of `distribute`",
    "call it with the same options on every rank",
    match=r"the ranks' options differ: rank 0 has .*accumulate=1.* where rank 1 has .*accumulate=2",
)
def other_options(run):
    _distributed(run, accumulate=1 + run.rank)


OPTIMIZERS = BOTH + r"(?=.*optimizer)"
RATES = BOTH + r"(?=.*lr)"


@refused(SECTION, "Optimizers of different classes", "build the same one on every rank", match=OPTIMIZERS)
def other_optimizers(run):
    model = double()
    run.distribute(model, (sgd, adamw)[run.rank](model))


@refused(SECTION, "Optimizers with different options", "build the same one on every rank", match=RATES)
def other_rates(run):
    model = double()
    run.distribute(model, sgd(model, lr=0.1 * (1 + run.rank)))


@refused(
    SECTION,
    "A learning rate that differs later",
    "as when each rank gives a plateau scheduler its own loss: give it the mean over the ranks",
    match=RATES + STEP,
)
def other_rates_later(run):
    model, optimizer = _distributed(run)
    for step, data in enumerate(run.batches()):
        optimizer.param_groups[0]["lr"] *= 1 - 0.5 * run.rank * (step == 1)
        _step(model, optimizer, data)


@refused(
    SECTION,
    "A plateau scheduler that follows each rank's own loss",
    "give it the mean over the ranks",
    match=RATES + STEP + r"(?=.*ReduceLROnPlateau of each rank follows its own metric; give all of them the mean)",
)
def other_plateaus(run):
    model, optimizer = _distributed(run)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step, data in enumerate(run.batches(4)):
        _step(model, optimizer, data)
        scheduler.step(1.0 if run.rank else 1.0 / (1 + step))


def _early(run, scheduled):
    """As in PPO: several passes over a batch, that a rank leaves by itself; then the next batch, and its rate."""
    model, optimizer = _distributed(run)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1) if scheduled else None
    for update, data in enumerate(run.batches(4)):
        for epoch in range(3):
            _step(model, optimizer, data)
            if run.rank == 1 and update == 1 and epoch == 0:
                break  # its KL is above the target
        if scheduler is not None:
            scheduler.step()
        else:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - 0.1 * update)


EARLY = r"(?=.*leaves a loop early.*let all ranks decide together)"


@refused(
    SECTION,
    "A rank that leaves a loop early, as PPO does by `target_kl`, and is ahead in its schedule",
    "let all ranks decide together: average what decides over them first",
    match=r"in step 4 rank 1 is ahead of rank 0 in its schedule: its LinearLR has taken 2 steps, that of rank 0 1"
    + EARLY,
)
def leaves_a_loop_early(run):
    _early(run, scheduled=True)


@refused(
    SECTION,
    "The same where the rate is set by hand",
    "the same",
    match=r"in step 4 the ranks' optimizers differ: group 0 has lr=0\.\d+ on rank 0 and 0\.\d+ on rank 1" + EARLY,
)
def leaves_a_loop_early_by_hand(run):
    _early(run, scheduled=False)


@refused(
    SECTION,
    "The same where nothing else differs",
    "the others are told when it leaves; the same",
    match=r"^rank 1\b.* left.*have them decide together when to leave a loop",
    on=(0,),
)
def leaves_a_loop_early_for_good(run):
    model, optimizer = _distributed(run)
    for update, data in enumerate(run.batches(2)):
        for epoch in range(3):
            _step(model, optimizer, data)
            if run.rank == 1 and update == epoch == 0:
                break


@refused(
    SECTION, "`add_param_group` on one rank", "call it on every rank", match=BOTH + r"(?=.*group)(?=.*use the same)"
)
def group_on_one_rank(run):
    model = double()
    model, optimizer = run.distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    train(model, optimizer, run.batches(2))
    if run.rank == 1:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, run.batches(2))


@refused(
    SECTION,
    "Weights edited differently",
    "make the same edits on every rank, random ones from the same seed",
    match=BOTH + STEP + r"(?=.*'0\.weight' was edited differently)",
)
def other_edits(run):
    model, optimizer = _distributed(run)
    torch.manual_seed(run.rank)
    torch.nn.init.normal_(model[0].weight)
    train(model, optimizer, run.batches())


EDITED = r"(?=before step \d p\.grad was edited in place differently on rank 0 and rank 1; make the same)(?=.*to clip)"


@refused(SECTION, "`p.grad` edited differently", "make the same edits on every rank", match=EDITED)
def other_gradients(run):
    model, optimizer = _distributed(run)
    for data in run.batches():
        loss_of(model, data).backward()
        model[0].weight.grad.mul_(1 + run.rank)
        optimizer.step()
        optimizer.zero_grad()


def _per_sample(run, model):
    """This rank's mean of clipped gradients of single rows, as in training with differential privacy."""
    totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
    x, y = next(run.batches(1))
    for row in zip(x, y, strict=True):
        found = torch.autograd.grad(loss_of(model, row), list(model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        for total, gradient in zip(totals, found, strict=True):
            total += gradient / max(1.0, norm.item()) / len(x)
    return totals


def _set(run, mean, backward=False):
    model, optimizer = _distributed(run)
    for _ in range(2):
        totals = _per_sample(run, model)
        if backward:
            loss_of(model, next(run.batches(1))).backward()
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = mean(total)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


SET = r"before step \d p\.grad of '0\.weight' and 3 more was set to different values on rank 0 and rank 1; (?!.*clip).*"
SET += r"average it over the ranks first"


@case(SECTION, "`p.grad = ...`, averaged over the ranks first", "as with gradients of single rows that are clipped")
def same_gradients_set(run):
    return _set(run, run.mean)


@refused(
    SECTION,
    "`p.grad = ...`, different on each rank",
    "set the same everywhere: average it over the ranks first",
    match=SET,
)
def other_gradients_set(run):
    _set(run, lambda total: total)


@refused(SECTION, "The same after a `backward()`", "the same", match=SET)
def other_gradients_set_after_backward(run):
    _set(run, lambda total: total, backward=True)


@refused(
    SECTION,
    "Models of different shapes",
    "build the same model on every rank",
    match=r"the ranks' models differ: rank 0 has '0\.weight' .*\[7, 15\] where rank 1 has '0\.weight' .*\[8, 15\]",
)
def other_shapes(run):
    model = torch.nn.Sequential(torch.nn.Linear(15, 7 + run.rank))
    run.distribute(model, sgd(model))


@refused(
    SECTION,
    "`p.grad` read on one rank under ZeRO",
    "read it on every rank",
    match=r"^Under ZeRO p\.grad is gathered from all ranks: read or set it on every rank\. Here ranks " + BOTH,
    strategies=SHARDED,
)
def reads_alone(run):
    model, optimizer = _distributed(run)
    for data in run.batches():
        loss_of(model, data).backward()
        if run.rank == 1:
            model[0].weight.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
