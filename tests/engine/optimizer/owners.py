"""Optimizer shards beside the plain optimizers that they must equal: owners played in one process."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import strategies as st
from torch import nn, optim

from sherd.comm.handle import Done
from sherd.engine.buckets.bucket import Values
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.shard import OptimizerShard

LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
SGD_ALL = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
CLASSES = [
    (optim.SGD, {**SGD_ALL, "nesterov": True}, (LOOP, FOREACH, FUSED)),
    (optim.SGD, {**SGD_ALL, "dampening": 0.1, "maximize": True}, (LOOP, FOREACH, FUSED)),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}, (LOOP, FOREACH, FUSED)),
    (optim.AdamW, {"lr": 0.01}, (LOOP, FOREACH, FUSED)),
    (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01}, (LOOP, FOREACH, FUSED)),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}, (LOOP, FOREACH)),
    (optim.Adadelta, {"weight_decay": 0.01}, (LOOP, FOREACH)),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.01}, (LOOP, FOREACH)),
    (optim.RAdam, {"weight_decay": 0.01}, (LOOP, FOREACH)),
    (optim.Adamax, {"weight_decay": 0.01}, (LOOP, FOREACH)),
    (optim.ASGD, {"t0": 2, "lambd": 0.1}, (LOOP, FOREACH)),
    (optim.Rprop, {}, (LOOP, FOREACH)),
]
CASES = [(kind, {**options, **how}) for kind, options, hows in CLASSES for how in hows]
ADAMW = (optim.AdamW, {"lr": 0.01})
NAMES = [f"{kind.__name__}-{'-'.join(options)}" for kind, options in CASES]

SHAPES = st.lists(
    st.lists(st.integers(0, 12), max_size=3).map(tuple) | st.sampled_from(((7, 150), (2501,))), min_size=1, max_size=6
)
CUTS = st.sampled_from((256, 512, 1024, 1 << 18))


def tensors(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def build(case, parameters):
    """The optimizer over two groups that differ, the second with every other parameter."""
    kind, options = case
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
    return kind([group for group in groups if group["params"]], **options)


def new_parameters(shapes, dtype=torch.float32):
    return [nn.Parameter(value) for value in tensors(shapes, 0, dtype)]


class Plain:
    """What torch does with whole parameters."""

    def __init__(self, case, parameters):
        self.parameters = [nn.Parameter(each.detach().clone()) for each in parameters]
        self.optimizer = build(case, self.parameters)

    def step(self, gradients, used):
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient.clone() if is_used else None
        self.optimizer.step()

    def optimizers(self):
        return [self.optimizer]

    def state_dict(self):
        return self.optimizer.state_dict()

    def values(self):
        return [parameter.detach() for parameter in self.parameters]


def buckets_of(parameters, world, bucket_numel=600):
    members = [TrackedParameter(str(index), parameter) for index, parameter in enumerate(parameters)]
    return BucketList.pack(members, world, world, bucket_numel)


class Owners:
    """All owners of a layout in one process, over one store. Each has an optimizer object of its own, as ranks do."""

    def __init__(self, case, parameters, world, chunk_numel=256, bucket_numel=600, state=None):
        self.parameters = parameters
        self.lists = [buckets_of(parameters, world, bucket_numel) for _ in range(world)]
        self.stores, self.sums = (
            [torch.zeros(bucket.described.numel, dtype=bucket.dtype) for bucket in self.lists[0].buckets]
            for _ in range(2)
        )
        for owner, buckets in enumerate(self.lists):
            for bucket, store, sum in zip(buckets.buckets, self.stores, self.sums, strict=True):
                bucket.values = Values(store, store.chunk(world)[owner])
                bucket.owned_sum = sum.chunk(world)[owner]
        for value, there in zip(parameters, self._places(self.stores), strict=True):
            there.copy_(value.detach())
        self.shards = [self._shard(build(case, parameters), owner, chunk_numel, state) for owner in range(world)]

    def _shard(self, optimizer, owner, chunk_numel, state):
        if state is not None:
            optimizer.load_state_dict(state)
        return OptimizerShard(optimizer, self.lists[owner], owner, chunk_numel=chunk_numel)

    def _places(self, flats):
        buckets = dict(zip(self.lists[0].buckets, flats, strict=True))
        return [member.shaped_in(buckets[member.bucket]) for member in self.lists[0].parameters]

    def step(self, gradients, used):
        for gradient, there in zip(gradients, self._places(self.sums), strict=True):
            there.copy_(gradient)  # also where unused: nobody may look
        for shard, buckets in zip(self.shards, self.lists, strict=True):
            for member, is_used in zip(buckets.parameters, used, strict=True):
                member.used = is_used
            shard.step()

    def optimizers(self):
        return [shard._optimizer for shard in self.shards]

    def state_dict(self):
        """Of the last owner, after comparing it with everyone's."""
        comms = ThreadRank.all(len(self.shards))
        with ThreadPoolExecutor(len(self.shards)) as pool:
            found = list(pool.map(lambda pair: pair[0].state_dict(pair[1]), zip(self.shards, comms, strict=True)))
        for each in found:
            assert_same(each, found[-1])
        return found[-1]

    def values(self):
        return self._places(self.stores)


class ThreadRank:
    """The two gathers of a communicator, between threads."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.world, self.slots, self.barrier = rank, len(slots), slots, barrier

    @classmethod
    def all(cls, world):
        slots, barrier = [None] * world, threading.Barrier(world, timeout=30)
        return [cls(rank, slots, barrier) for rank in range(world)]

    def all_gather_object(self, obj):
        self.slots[self.rank] = pickle.dumps(obj)
        self.barrier.wait()
        found = [pickle.loads(each) for each in self.slots]
        self.barrier.wait()
        return found

    def all_gather(self, tensor, output=None, what=""):
        assert output is None
        return Done(torch.cat(self.all_gather_object(tensor)))


def assert_same(found, expected, what=""):
    assert type(found) is type(expected), (what, found, expected)
    if isinstance(expected, dict):
        assert set(found) == set(expected), what
        for key in expected:
            assert_same(found[key], expected[key], f"{what}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), what
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{what}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
        assert torch.equal(found, expected), (what, found, expected)
    else:
        assert found == expected, what


def run(steppers, shapes, first, last, unused=()):
    """Steps `first` to `last` on all of `steppers`, with rates that fall and parameters that are unused at times."""
    for step in range(first, last):
        gradients = tensors(shapes, 100 + step, steppers[0].values()[0].dtype)
        used = [(index, step) not in unused for index in range(len(shapes))]
        for stepper in steppers:
            for optimizer in stepper.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
            stepper.step(gradients, used)
        for stepper in steppers[1:]:
            assert_same(stepper.values(), steppers[0].values(), f"step {step}")


def bearable(case, unused):
    """torch's own fused SGD fails when some parameters of a group have momentum and others do not yet."""
    return set() if case[0] is optim.SGD and "fused" in case[1] else unused


def load(owners, state):
    for shard in owners.shards:
        shard.load_state_dict(state)
