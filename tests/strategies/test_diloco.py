"""DiLoCo: an outer optimizer steps what teams have made, all at once or in fragments."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import sherd
from tests.helpers.averaging import STEPS, Worlds, by_case, close_to, exactly, trained
from tests.helpers.training import batch, connected, distributed, double, same, train, weights

pytestmark = pytest.mark.ranks
EVERY = 3


def outer(worlds, lr=0.7, momentum=0.9, every=EVERY, warmup=0, fragments=1, delay=0, mix=0.5, spoilt=(), steps=STEPS):
    """DiLoCo with torch's own SGD as the outer optimizer, of parameters that it has to itself."""
    rows = cut(worlds, fragments)
    anchors = {name: worlds.values(name)[0].clone() for name in worlds.names}
    sgds = [torch.optim.SGD([anchors[name] for name in row], lr, momentum, nesterov=momentum > 0) for row in rows]
    means, new = {}, {}

    def exchange(step):
        after = step + 1 - warmup
        if after == 0:
            for name, anchor in anchors.items():
                anchor.copy_(worlds.values(name)[0])
        for number, row in enumerate(rows):
            offset = (number + 1) * every // fragments % every
            due = [after - lag > 0 and (after - lag) % every == offset for lag in (0, (delay + 1) // 2, delay)]
            if due[0] and not delay:
                means.update({name: worlds.mean(name) for name in row})
            if due[1]:
                for name in row:
                    anchors[name].grad = anchors[name] - means[name]
                sgds[number].step()
                new.update({name: anchors[name].clone() for name in row})
            if delay and due[2]:
                for name in row:
                    for value in worlds.values(name):
                        value.copy_(torch.lerp(value, new[name], mix))
            if due[0] and delay:
                means.update({name: worlds.mean(name) for name in row})
            if due[0] and not delay:
                for name in row:
                    for value in worlds.values(name):
                        value.copy_(new[name])

    return worlds.run(exchange, warmup, spoilt, steps)


def cut(worlds, fragments):
    sizes = {name: worlds.values(name)[0].numel() for name in worlds.names}
    if fragments == 1:
        return [worlds.names]
    assert fragments in (2, 4) and list(sizes.values()) == [105, 7, 35, 5]
    return [worlds.names[:1], worlds.names[1:]] if fragments == 2 else [[name] for name in worlds.names]


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_what_it_computes(ranks, transport):
    spoilt = ((1, 3), (2, 1), (5, 0), (6, 0))
    cases = [
        (sherd.DiLoCo(every=EVERY), {}, {}),
        (sherd.DiLoCo(every=EVERY, warmup=2), {"spoilt": spoilt}, {"warmup": 2}),
        (sherd.DiLoCo(every=EVERY, over=2), {}, {}),
        (sherd.DiLoCo(every=EVERY, over=2, inner="zero3"), {"spoilt": spoilt}, {}),
        (sherd.DiLoCo(every=EVERY, over=2, inner="ddp", warmup=1), {"spoilt": spoilt}, {"warmup": 1}),
        (sherd.DiLoCo(every=4, over=2, fragments=2, delay=1), {}, {"every": 4, "fragments": 2, "delay": 1}),
    ]
    for found, (strategy, options, more) in zip(
        by_case(ranks(4).run(trained, [c[:2] for c in cases], transport)), cases, strict=True
    ):
        size = 1 if strategy.over == "ranks" else 2
        close_to(found, outer(Worlds(4 // size, size), **{**options, **more}), size)


def test_without_momentum_at_rate_1_it_is_averaging(ranks):
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    cases = [
        (sherd.LocalSGD(every=EVERY), {}),
        (sherd.DiLoCo(every=EVERY, **plain), {}),
        (sherd.LocalSGD(every=EVERY, over=2), {}),
        (sherd.DiLoCo(every=EVERY, over=2, **plain), {}),
    ]
    found = by_case(ranks(4).run(trained, cases))
    for averaged, stepped in (found[:2], found[2:]):
        close_to(stepped, [list(by_rank) for by_rank in zip(*averaged, strict=True)])
    assert not all(torch.equal(found[0][0][-1][n], found[2][0][-1][n]) for n in found[0][0][-1])


def test_fragments_have_the_bits_of_a_plain_reference(ranks):
    cases = []
    for fragments, every, delay, mix in (
        (1, 4, 0, 0.5),
        (1, 4, 3, 0.5),
        (2, 4, 1, 0.5),
        (2, 6, 2, 0.25),
        (4, 8, 1, 1.0),
        (4, 4, 0, 0.5),
    ):
        cases.append({"fragments": fragments, "every": every, "delay": delay, "mix": mix})
    found = by_case(ranks(2).run(trained, [(sherd.DiLoCo(**case), {"steps": 20}) for case in cases]))
    for by_rank, case in zip(found, cases, strict=True):
        exactly(by_rank, outer(Worlds(2), steps=20, **case))


def ahead(transport, folder):
    """In the steps in which an exchange starts, and its new values set out, one rank is through before the other."""
    with connected(transport) as c:
        model, optimizer = distributed(c, sherd.DiLoCo(every=6, delay=4), double)
        for step in range(12):
            leader = {5: 0, 7: 1}.get(step)  # 6 starts an exchange, 8 sends what is new
            through = Path(folder) / f"{transport}-{step}"
            end = time.monotonic() + 30
            while leader not in (None, c.rank) and not through.exists():
                assert time.monotonic() < end, f"step {step} waits for the other rank"
                time.sleep(0.01)
            train(model, optimizer, [batch(c.rank, step, dtype=torch.float64)])
            if leader == c.rank:
                through.touch()
        return weights(model)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_nobody_waits_before_values_are_merged(ranks, tmp_path, transport):
    found = ranks(2).run(ahead, transport, str(tmp_path))
    expected = outer(Worlds(2), every=6, delay=4, steps=12)[-1]
    for rank in range(2):
        same(found[rank], expected[rank])
