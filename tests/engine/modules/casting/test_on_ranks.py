"""Hooks of casting beside those that gather parameters on use: the bits of ddp, whichever was first."""

from __future__ import annotations

import pytest
import torch

import sherd
from sherd.engine.modules.casting import Autocasting, Casting, kept_modules
from tests.engine.modules.casting.models import BF16
from tests.engine.modules.casting.test_checkpointing import Checkpointed
from tests.helpers.training import all_same, connected, sgd, weights

pytestmark = pytest.mark.ranks
GATHERED = sherd.ZeRO(stage=3, share_host_memory=False)


def trained(c, strategy, kind, reentrant, first):
    """Weights and losses; `first`: the hooks were installed before `distribute`."""
    model = Checkpointed(reentrant)
    if kind == "casting":
        kept = kept_modules([model], None)
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter in kept.parameters else parameter.data.to(BF16)
        casting = Casting([model], BF16, kept)
    else:
        casting = Autocasting([model], BF16)
    if first:
        casting.install()
    model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c, bucket_bytes=1024)
    if not first:
        casting.install()
    torch.manual_seed(c.rank)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(2, 5, 8)).square().mean()
        assert loss.dtype is torch.float32
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {**weights(model), "losses": torch.stack(losses)}


def both_kinds():
    with connected("host") as c:
        for kind, reentrant in {"casting": True, "autocasting": False}.items():
            ways = {"ddp": ("ddp", True), "hooks first": (GATHERED, True), "hooks last": (GATHERED, False)}
            all_same({name: trained(c, way, kind, reentrant, first) for name, (way, first) in ways.items()})


def test_gathered_on_use_trains_the_bits_of_ddp(ranks):
    ranks(2).run(both_kinds)
