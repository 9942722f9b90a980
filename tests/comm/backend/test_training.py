"""Torch's own DDP, FSDP2, ZeroRedundancyOptimizer and checkpoints, over the backend "sherd" and over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.backend import backend
from tests.helpers.training import adamw, batch, loss_of, network, sgd, weights

STEPS = 4


class Branches(nn.Module):
    """Uses one branch or the other, by step and rank; a third one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(15, 5) for _ in range(3))
        self.register_buffer("seen", torch.zeros(1))
        self.step = dist.get_rank()

    def forward(self, x):
        self.step += 1
        self.seen += 1
        return self.branches[self.step % 2 if self.step > 3 else 0](x)


def trained(forward, model, optimizer, rank):
    """The plain loop; losses and weights."""
    losses = []
    for step in range(STEPS):
        loss = loss_of(forward, batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **weights(model)}


def nearly(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- DDP


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ddp(group, make=network, hook=None, optimizer=sgd, **options):
    model = make()
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    if hook is not None:
        wrapped.register_comm_hook(*hook(group))
    return trained(wrapped, model, optimizer(model), dist.get_rank())


def fp16(group):
    return group, default_hooks.fp16_compress_hook


def power_sgd(group):
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


def words():
    """An embedding with sparse gradients, of which ranks use different rows."""
    torch.manual_seed(0)
    embedding = nn.Embedding(15, 5, sparse=True)
    return nn.Sequential(Rows(), embedding, Mean())


class Rows(nn.Module):
    def forward(self, x):
        return x.argsort(1)[:, :4]


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


DDP_CASES = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.0001},
    "unused parameters": {"make": Branches, "find_unused_parameters": True},
    "sparse": {"make": words, "optimizer": plain_sgd},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "fp16": {"hook": fp16},
    "PowerSGD": {"hook": power_sgd},
}


def ddp_cases(names):
    with backend() as gloo:
        for name in names:
            options = DDP_CASES[name]
            ours, theirs = ddp(None, **options), ddp(gloo, **options)
            nearly(ours, theirs, 1e-5 if "hook" not in options else 0.02)
            again = ddp(None, **options)
            assert all(torch.equal(ours[key], again[key]) for key in ours), name


@pytest.mark.parametrize(("world", "names"), [(2, [*DDP_CASES]), (4, ["many buckets", "unused parameters"])])
def test_ddp_trains_as_over_gloo_and_the_same_every_time(ranks, world, names):
    ranks(world).run(ddp_cases, names)


def no_sync():
    def accumulated(group):
        model = network()
        wrapped = DistributedDataParallel(model, process_group=group)
        rank = dist.get_rank()
        with wrapped.no_sync():
            loss_of(wrapped, batch(rank, 0)).backward()
        alone = model[0].weight.grad.clone()
        loss_of(wrapped, batch(rank, 1)).backward()
        return alone, {name: p.grad.clone() for name, p in model.named_parameters()}

    with backend() as gloo:
        (alone, ours), (_, theirs) = accumulated(None), accumulated(gloo)
        nearly(ours, theirs)
        return alone


def test_no_sync(ranks):
    first, second = ranks(2).run(no_sync)
    assert not torch.equal(first, second)


def uneven_inputs():
    def train(group):
        wrapped = DistributedDataParallel(network(), process_group=group, find_unused_parameters=True)
        optimizer = sgd(wrapped)
        rank = dist.get_rank()
        with wrapped.join():
            for step in range(2 + 3 * rank):
                loss_of(wrapped, batch(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(wrapped)

    with backend() as gloo:
        nearly(train(None), train(gloo))


def test_ranks_that_run_out_of_data_may_join(ranks):
    ranks(2).run(uneven_inputs)


def zero_redundancy():
    def train(group):
        model = network()
        wrapped = DistributedDataParallel(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group or dist.group.WORLD, lr=0.01
        )
        found = trained(wrapped, model, optimizer, dist.get_rank())
        optimizer.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            found["state"] = optimizer.state_dict()["state"][0]["exp_avg"]
        return found

    with backend() as gloo:
        nearly(train(None), train(gloo))


def test_zero_redundancy_optimizer(ranks):
    ranks(2).run(zero_redundancy)


# ---------------------------------------------------------------- FSDP2 and DTensor


def fsdp2(mesh, policy=None, reshard=True):
    model = network()
    options = {"mesh": mesh, "reshard_after_forward": reshard, **({"mp_policy": policy} if policy else {})}
    for layer in model:
        if not isinstance(layer, nn.Tanh):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = adamw(model)
    found = trained(model, model, optimizer, dist.get_rank())
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}
    return whole, model, optimizer


POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True),
    "bf16 throughout": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32),
    "fp16": MixedPrecisionPolicy(torch.float16, torch.float16, torch.float32),
}


def fsdp2_cases(names):
    with backend() as gloo:
        meshes = init_device_mesh("cpu", (dist.get_world_size(),)), DeviceMesh.from_group(gloo, "cpu")
        for name in names:
            policy = POLICIES[name]
            ours, theirs = (fsdp2(mesh, policy)[0] for mesh in meshes)
            nearly(ours, theirs, 1e-5 if policy is None else 0.03)
            again = fsdp2(meshes[0], policy)[0]
            assert all(torch.equal(ours[key], again[key]) for key in ours), name
        nearly(fsdp2(meshes[0], reshard=False)[0], fsdp2(meshes[1])[0])


@pytest.mark.parametrize(("world", "names"), [(2, [*POLICIES]), (4, ["bf16"])])
def test_fsdp2_trains_as_over_gloo_and_the_same_every_time(ranks, world, names):
    ranks(world).run(fsdp2_cases, names)


def hybrid():
    with backend() as gloo:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        nearly(fsdp2(mesh)[0], fsdp2(DeviceMesh.from_group(gloo, "cpu"))[0])
        whole = torch.arange(30.0).view(6, 5)
        rows = distribute_tensor(whole, mesh["shard"], [Shard(0)])
        columns = rows.redistribute(placements=[Shard(1)])
        assert columns.to_local().shape[1] in (2, 3)
        assert torch.equal(columns.full_tensor(), whole)


def test_fsdp2_on_a_mesh_of_two_dimensions_and_dtensors(ranks):
    ranks(4).run(hybrid)


def checkpoints(directory):
    with backend():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        _, model, optimizer = fsdp2(mesh)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
        saved = {name: tensor.full_tensor() for name, tensor in get_model_state_dict(model).items()}
        _, other, other_optimizer = fsdp2(mesh, reshard=False)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
        set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        for name, tensor in get_model_state_dict(other).items():
            assert torch.equal(tensor.full_tensor(), saved[name])
            assert saved[name].any()
        group = dist.new_group()  # a group of its own for the thread that saves
        state = {"model": get_model_state_dict(model)}
        future = dcp.async_save(state, checkpoint_id=f"{directory}/2", process_group=group)
        for step in range(20):
            loss_of(model, batch(dist.get_rank(), step)).backward()
        future.result()
        loaded = {name: torch.zeros_like(tensor) for name, tensor in get_model_state_dict(model).items()}
        dcp.load({"model": loaded}, checkpoint_id=f"{directory}/2")
        for name, tensor in loaded.items():
            assert torch.equal(tensor.full_tensor(), saved[name])


def test_distributed_checkpoints(ranks, tmp_path):
    ranks(2).run(checkpoints, str(tmp_path))
