"""What a user does to the optimizer object, and what its shards make of it."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from sherd.comm.solo import SoloCommunicator
from sherd.engine.optimizer.shard import OptimizerShard
from sherd.errors import ConfigError
from tests.engine.optimizer.owners import (
    ADAMW,
    SGD_ALL,
    Owners,
    Plain,
    assert_same,
    build,
    load,
    new_parameters,
    run,
    tensors,
)

pytestmark = pytest.mark.pure


def pair(case=ADAMW, shapes=((7, 150), (3,)), world=2):
    parameters = new_parameters(shapes)
    return Plain(case, parameters), Owners(case, parameters, world)


def step_all(steppers, seed=0, used=(True, True)):
    for stepper in steppers:
        stepper.step(tensors([value.shape for value in stepper.values()], seed), used)
    for stepper in steppers[1:]:
        assert_same(stepper.values(), steppers[0].values())


def test_hyper_parameters_are_read_at_each_step():
    plain, owners = pair()
    optimizers = plain.optimizers() + owners.optimizers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the owners' optimizers are not stepped through their own method here
        schedulers = [optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=9) for each in optimizers]
        for seed in range(4):
            step_all([plain, owners], seed)
            for scheduler in schedulers:
                scheduler.step()
    for optimizer in optimizers:
        assert "step" in vars(optimizer)  # left there by the scheduler
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        optimizer.param_groups[1]["lr"] = torch.tensor(0.3)
    step_all([plain, owners], 4)
    assert "step" not in vars(owners.shards[0]._inner([]))
    assert_same(owners.state_dict(), plain.state_dict())


def test_a_rate_in_a_tensor_stays_that_tensor():
    plain, owners = pair((optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in owners.optimizers()]
    step_all([plain, owners])
    for optimizer in plain.optimizers() + owners.optimizers():
        optimizer.param_groups[0]["lr"].fill_(0.2)
    step_all([plain, owners], 1)
    assert all(o.param_groups[0]["lr"] is rate for o, rate in zip(owners.optimizers(), rates, strict=True))


class Counting(optim.Optimizer):
    """Changes its groups, its attributes and a state of its own as it goes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0, "decay": 0.5})
        self.calls, self.log = 0, []

    def step(self):
        self.calls += 1
        self.log.append(self.calls)
        self.state["all"] = {"calls": self.calls}
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("half", torch.zeros_like(parameter, dtype=torch.float64)).add_(1)
                    state["steps"] = state.get("steps", 0) + 1
                    parameter.data.sub_(parameter.grad * group["lr"] * group["decay"] ** (group["count"] + self.calls))


def test_what_the_step_changes_comes_back():
    plain, owners = pair((Counting, {}))
    for seed, used in enumerate([(True, True), (True, False), (True, True)]):
        step_all([plain, owners], seed, used)
    for optimizer in owners.optimizers():
        assert (optimizer.calls, optimizer.log) == (3, [1, 2, 3])
        assert [group["count"] for group in optimizer.param_groups] == [3, 3]
    found, expected = owners.state_dict(), plain.state_dict()
    assert found["state"][0]["half"].dtype == torch.float64
    assert found["state"]["all"] == {"calls": 3}
    assert_same(found, expected)
    load(owners, expected)  # torch casts to the parameter's dtype
    assert owners.state_dict()["state"][0]["half"].dtype == torch.float32
    assert owners.state_dict()["state"]["all"] == {"calls": 3}


class Inheriting(optim.SGD):
    def step(self):
        super().step()  # which torch wrapped too, when a plain SGD was built


@pytest.mark.fake
def test_hooks_of_the_user_see_whole_parameters_and_never_the_inner_optimizer():
    pair((optim.SGD, {}))
    _, owners = pair((Inheriting, SGD_ALL), world=1)
    (shard,), (optimizer,) = owners.shards, owners.optimizers()
    seen = []
    everyones = register_optimizer_step_post_hook(lambda inner, *_: seen.append(type(inner)))
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: seen.append(state["state"][0]["momentum_buffer"].shape)
    )
    owners.step(tensors([(7, 150), (3,)], 0), [True, True])
    everyones.remove()
    assert seen == [Inheriting]  # from SGD.step, as in torch, and not once more
    seen.clear()
    state = shard.state_dict(SoloCommunicator())
    assert state["extra"] == 1
    shard.load_state_dict(state)
    assert seen == [(7, 150)]
    assert_same(shard.state_dict(SoloCommunicator()), state)


def test_groups_that_are_added_later():
    parameters = new_parameters([(7, 150), (300,)])
    plain = Plain(ADAMW, parameters[:1])
    plain.parameters.append(nn.Parameter(parameters[1].detach().clone()))
    owners = Owners((lambda groups, **options: optim.AdamW(groups[:1], **options), ADAMW[1]), parameters, 2)
    step_all([plain, owners])
    assert torch.equal(owners.values()[1], parameters[1].detach())  # in no group: not stepped
    for stepper in (plain, owners):
        for optimizer in stepper.optimizers():
            optimizer.add_param_group({"params": stepper.parameters[1:], "lr": 0.5})
    step_all([plain, owners], 1)
    assert_same(owners.state_dict(), plain.state_dict())
    for optimizer in owners.optimizers():
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})
    with pytest.raises(
        ConfigError, match=r"group 2 has at position 0 .*\(2, 3\).* must belong to the distributed model"
    ):
        owners.shards[0].step()


@pytest.mark.parametrize("trained_before", [False, True])
def test_frozen_parameters_are_left_alone_until_they_are_not(trained_before):
    parameters = new_parameters([(7, 150), (300,), (5,)])
    plain = Plain(ADAMW, parameters)
    if trained_before:
        run([plain], [(7, 150), (300,), (5,)], 0, 1)
    frozen = plain.parameters.pop()
    trained = [nn.Parameter(value.clone()) for value in plain.values()]
    frozen.requires_grad_(False).grad = None
    case = (lambda groups, **_: optim.AdamW([{"params": [*trained[::2], frozen]}, groups[1]], lr=0.01), {})
    owners = Owners(case, trained, 2, state=pickle.loads(pickle.dumps(plain.state_dict())))
    run([plain, owners], [(7, 150), (300,)], 1, 3)
    assert_same(owners.state_dict(), plain.state_dict())
    load(owners, plain.state_dict())
    assert_same(owners.state_dict(), plain.state_dict())
    frozen.requires_grad_()
    with pytest.raises(ConfigError, match=r"group 0 has at position 1 .* that was not distributed"):
        owners.shards[0].step()


class Naming(optim.SGD):
    def step(self):
        super().step()
        self.found = list(self.param_groups[0]["param_names"])


def test_names_follow_their_chunks():
    named = [("weight", nn.Parameter(torch.ones(700))), ("bias", nn.Parameter(torch.ones(3)))]
    owners = Owners((lambda groups, **options: Naming(named, **options), {}), [each for _, each in named], 1)
    owners.step(tensors([(700,), (3,)], 0), [True, True])
    assert owners.optimizers()[0].found == ["weight"] * 3 + ["bias"]
    assert owners.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_loading_keeps_nothing_of_the_caller_and_checks_groups_first():
    plain, owners = pair()
    step_all([plain, owners])
    state = plain.state_dict()
    short = {**state, "param_groups": state["param_groups"][:1]}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        owners.shards[0].load_state_dict(short)
    assert_same(owners.state_dict(), state)
    copy = pickle.loads(pickle.dumps(state))
    copy["state"][0]["step"] = 1  # as torch wrote it once
    load(owners, copy)
    for kept in copy["state"].values():
        for value in kept.values():
            if isinstance(value, torch.Tensor):
                value.fill_(77)
    copy["param_groups"][0]["lr"] = 77
    assert_same(owners.state_dict(), state)
    step_all([plain, owners], 1)


@pytest.mark.fake
def test_state_has_the_precision_of_the_store_not_of_the_parameters():
    plain, owners = pair(world=1)
    step_all([plain, owners])
    low = [nn.Parameter(parameter.detach().bfloat16()) for parameter in plain.parameters]
    for member, parameter in zip(owners.lists[0].parameters, low, strict=True):
        member.parameter = parameter
    shard = OptimizerShard(build(ADAMW, low), owners.lists[0], 0)
    shard.load_state_dict(plain.state_dict())
    assert_same(shard.state_dict(SoloCommunicator()), plain.state_dict())


def test_state_in_containers_is_refused():
    plain, owners = pair()
    step_all([plain, owners])
    state = plain.state_dict()
    state["state"][0]["both"] = [torch.ones(7, 150)]
    with pytest.raises(ConfigError, match="inside a list in its state 'both'"):
        owners.shards[0].load_state_dict(state)


def test_wrong_arguments_are_refused():
    parameters = new_parameters([(700,)])
    owners = Owners(ADAMW, parameters, 2)
    with pytest.raises(ConfigError, match=r"chunk_numel=100 .* write 256"):
        OptimizerShard(build(ADAMW, parameters), owners.lists[0], 0, chunk_numel=100)
