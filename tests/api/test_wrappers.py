"""Torch's wrappers are told about distributed models, and left alone with all others."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.nn.parallel import DistributedDataParallel

import sherd
from sherd import ConfigError
from tests.helpers.training import STRATEGIES, batch, connected, distributed, network, sgd, train

BUILT = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "FullyShardedDataParallel": fsdp.FullyShardedDataParallel,
    "fully_shard": fsdp.fully_shard,
    "replicate": replicate,
}


class Around(DistributedDataParallel):
    """As frameworks have it: a class of their own."""

    def __init__(self, model, **options):
        super().__init__(module=model, **options)


def sharing(model):
    """A module of somebody else's that has a parameter of the model."""
    other = nn.Linear(15, 7)
    other.weight = model[0].weight
    return other


def refused():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            for name, wrap in (*BUILT.items(), ("DistributedDataParallel", Around)):
                for part in (model, model[0], nn.Sequential(model), sharing(model)):
                    with pytest.raises(ConfigError, match=f"^rank {c.rank}: torch's {name} was applied to.*drop the"):
                        wrap(part)
            with pytest.raises(ConfigError, match="fully_shard was applied to"):
                fsdp.fully_shard([nn.Linear(2, 2), model[2]])
            train(model, optimizer, [batch(c.rank)])  # nothing was done to it


def test_a_wrapper_around_a_distributed_model_is_refused(ranks):
    ranks(2).run(refused)


def left_alone():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with connected() as c:
        model, _ = distributed(c, "ddp")
        for _ in range(2):
            distributed(c, "zero2")
        for name, wrap in BUILT.items():
            if name == "FullyShardedDataParallel":  # it wants an accelerator
                continue
            plain = network()
            wrapped = wrap(plain)
            if name == "fully_shard":
                with pytest.raises(
                    ConfigError, match=r"already sharded by torch's FSDP \(FSDPModule\); pass the model without it"
                ):
                    sherd.distribute(plain, comm=c)
            train(wrapped, sgd(plain), [batch(c.rank)])
        own = DistributedDataParallel.__init__
        assert hasattr(own, "__sherd__")
        assert not hasattr(own.__wrapped__, "__sherd__")  # wrapped once
        del model
        with pytest.raises(TypeError):
            DistributedDataParallel()  # torch's own words


def test_wrappers_of_other_models_are_left_alone(ranks):
    ranks(2).run(left_alone)
