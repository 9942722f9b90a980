"""A program that notes all attributes of torch's and Python's modules, trains, uninstalls every patch, and compares."""

from __future__ import annotations

import importlib
import os
import types
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader

MODULES = (
    *("torch", "torch.nn", "torch.nn.modules.module", "torch.nn.modules.batchnorm", "torch.nn.parameter"),
    *("torch.nn.parallel", "torch.nn.parallel.distributed", "torch.optim", "torch.optim.optimizer"),
    *("torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.autograd", "torch.autograd.graph", "torch.amp"),
    *("torch.amp.grad_scaler", "torch.utils.data", "torch.utils.data.dataloader", "torch._tensor", "torch.func"),
    *("torch._functorch.eager_transforms", "torch._functorch.vmap", "torch._functorch.apis"),
    *("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"),
    *("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard._fully_shard"),
    *("torch.distributed._composable.replicate_with_fsdp", "torch.multiprocessing", "torch.multiprocessing.reductions"),
    *("multiprocessing", "multiprocessing.reduction", "pickle", "copyreg", "copy", "builtins", "sys", "os", "gc"),
    *("signal", "atexit", "importlib", "threading"),
)
EVERYBODYS = (
    *("sys.modules", "sys.path_importer_cache", "RemovableHandle.next_id", "__warningregistry__", "_abc_impl"),
    *("threading._active", "threading._limbo"),
)
"""Every import, hook, warning or thread changes these."""
REPLACED = (
    *("torch.autograd.backward", "torch.nn.Module.load_state_dict", "torch.nn.Module.state_dict"),
    *("torch.nn.parallel.DistributedDataParallel.__init__", "torch.nn.parallel.DataParallel.__init__"),
    *("torch.distributed.fsdp.FullyShardedDataParallel.__init__", "torch.optim.lr_scheduler.LRScheduler.step"),
    *("torch.distributed.Backend.backend_list", "torch.optim.optimizer._global_optimizer_pre_hooks"),
    *("multiprocessing.reduction.ForkingPickler._extra_reducers", "torch.amp.GradScaler.scale"),
)
REPLACED_BETWEEN_RANKS = (
    *("torch.nn.Parameter.__new__", "torch._functorch.vmap._add_batch_dim"),
    "torch._functorch.eager_transforms._wrap_for_grad",
)

kept = []  # so that nothing new has the id of something old


def attributes():
    """What every attribute of these modules is, and of the classes that are in them; of containers, what is in them."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        owners = {name: module}
        for each in list(vars(module).values()):
            if isinstance(each, type) and each.__module__.split(".")[0] in ("torch", "multiprocessing", "pickle"):
                owners[f"{name}.{each.__qualname__}"] = each
        for path, owner in owners.items():
            for attribute, value in list(vars(owner).items()):
                where = f"{path}.{attribute}"
                if not where.endswith(EVERYBODYS) and not isinstance(value, types.ModuleType):
                    kept.append(value)
                    found[where] = id(value), contents(value)
    return found


def contents(value):
    if isinstance(value, dict):
        items = list(value.items())
        kept.append(items)
        return {id(key) if not isinstance(key, str) else key: id(each) for key, each in items}
    if isinstance(value, list):
        kept.append(list(value))
        return [id(each) for each in value]
    return None


def differences(before, after):
    return sorted(where for where in before.keys() | after.keys() if before.get(where) != after.get(where))


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 1), norm(4), nn.Flatten(), nn.Linear(20, 2))


def loop(model, optimizer, loader, scheduler):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for batch in loader:
        scaler.scale(model(batch).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    nn.Parameter(model[0].weight)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    torch.func.grad(lambda weight: weight.sum())(model[0].weight)


def train(distribute, norm, **options):
    model = network(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    things = distribute(model, optimizer, DataLoader(torch.randn(8, 3, 5), 2), **options)
    loop(*things, scheduler)
    return things


def main():
    warnings.simplefilter("ignore")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")  # or `distribute` does, which changes attributes too
    train(lambda *things: things, nn.BatchNorm1d)  # torch imports and caches things when it is first used
    torch.compiler.disable(network)(nn.BatchNorm1d)
    before = attributes()

    import sherd
    from sherd import patches

    assert differences(before, attributes()), "the backend is not registered"
    distributed = [
        train(sherd.distribute, nn.SyncBatchNorm, strategy=strategy, accumulate=2, comm=sherd.CommOptions(transport=by))
        for strategy in ("ddp", "zero2", "zero3")
        for by in (("auto", "c10d") if world > 1 else ("auto",))
    ]
    changed = differences(before, attributes())
    for place in REPLACED + (REPLACED_BETWEEN_RANKS if world > 1 else ()):
        assert place in changed, f"{place} is not replaced: {changed}"

    patches.uninstall_all()
    changed = differences(before, attributes())
    assert not changed, f"not as before: {changed}"
    assert "__init_subclass__" not in vars(LRScheduler)
    for model, optimizer, loader in distributed:
        assert "Distributed" in str(type(optimizer).__mro__) and "loader_object" in str(type(loader).__mro__)
        assert world == 1 or type(model[1]) is not nn.SyncBatchNorm
    train(lambda *things: things, nn.BatchNorm1d)
    assert not differences(before, attributes())

    train(sherd.distribute, nn.SyncBatchNorm, strategy="zero2", accumulate=2)
    assert "torch.autograd.backward" in differences(before, attributes())
    print("as before")


if __name__ == "__main__":
    main()
