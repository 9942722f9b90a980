"""Parameters that are sent to another process: by value where their memory is sherd's, else as torch does it."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from sherd import patches
from tests.helpers.training import connected, distributed


def sent(thing):
    return pickle.loads(bytes(ForkingPickler.dumps(thing)))


def parameters():
    with connected() as c:
        for strategy, ours in (("ddp", False), ("zero1", True), ("zero2", True), ("zero3", True)):
            model, _ = distributed(c, strategy)
            parameter = next(model.parameters())
            value = parameter.detach().clone()
            with torch.no_grad():
                assert type(sent(parameter)) is nn.Parameter and torch.equal(sent(parameter), value), strategy
            data = bytes(ForkingPickler.dumps(parameter))
            assert (b"rebuild_storage" not in data) is ours, strategy
        plain = nn.Parameter(torch.ones(3))
        assert b"rebuild_storage" in bytes(ForkingPickler.dumps(plain))
        patches.uninstall_all()
        assert ForkingPickler._extra_reducers[nn.Parameter] is reduce_tensor
        assert not any(kind.__module__.startswith("sherd") for kind in ForkingPickler._extra_reducers)


def test_what_is_sent(ranks):
    ranks(2).run(parameters)
