"""The user's optimizer: any elementwise one, with its state, groups, hooks and torch's own format."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import optim

import sherd
from sherd import ConfigError
from tests.helpers.training import (
    SHARDED,
    STRATEGIES,
    adamw,
    all_same,
    batch,
    close,
    connected,
    differ,
    distributed,
    double,
    loss_of,
    network,
    same,
    sgd,
    train,
    weights,
    whole_batch,
)

KINDS = {
    optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    optim.Adam: {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01},
    optim.AdamW: {"lr": 0.01, "weight_decay": 0.1},
    optim.RMSprop: {"lr": 0.01, "centered": True, "momentum": 0.5},
    optim.Adagrad: {"lr": 0.1, "lr_decay": 0.01},
    optim.NAdam: {"lr": 0.01},
}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def kinds():
    with connected() as c:
        for kind, options in KINDS.items():
            for way in ("loop", "foreach", "fused") if kind in FUSED else ("loop", "foreach"):
                chosen = {**options, "foreach": way == "foreach", **({"fused": True} if way == "fused" else {})}
                found = {}
                for strategy in ("ddp", "zero2"):
                    model = network()
                    head = {"params": list(model[2].parameters()), "lr": 0.003}
                    optimizer = kind([head, {"params": model[0].parameters()}], **chosen)
                    sherd.distribute(model, optimizer, strategy=strategy, comm=c)
                    assert isinstance(optimizer, kind)
                    train(model, optimizer, [batch(c.rank, step) for step in range(4)])
                    found[strategy] = weights(model)
                assert differ(found["ddp"], weights(network()))
                all_same(found)


def test_every_kind_and_implementation_has_the_bits_of_ddp(ranks):
    ranks(2).run(kinds)


def with_state():
    with connected() as c:
        for strategy in STRATEGIES:
            plain = double()
            reference = adamw(plain)
            model = double()
            optimizer = adamw(model)
            steps = [whole_batch(step, dtype=torch.float64) for step in range(6)]
            train(plain, reference, steps)
            train(model, optimizer, steps[:2])
            sherd.distribute(model, optimizer, strategy=strategy, comm=c)
            train(model, optimizer, [batch(c.rank, step, dtype=torch.float64) for step in (2, 3, 4, 5)])
            close(weights(model), weights(plain), strategy)
            assert all(s["step"] == 6 for s in optimizer.state_dict()["state"].values())


def test_state_from_before_distribute_goes_on(ranks):
    ranks(2).run(with_state)


def state_travels():
    with connected() as c:
        expected = double()
        reference = adamw(expected)
        steps = [whole_batch(step, dtype=torch.float64) for step in range(6)]
        train(expected, reference, steps[:3])
        for strategy in STRATEGIES:
            here, plain = double(), double()
            model, optimizer = distributed(c, strategy, double, adamw)
            train(model, optimizer, [batch(c.rank, step, dtype=torch.float64) for step in range(3)])
            state = optimizer.state_dict()
            assert state["param_groups"] == reference.state_dict()["param_groups"]
            for index, values in reference.state_dict()["state"].items():
                close(state["state"][index], values, (strategy, index))
                assert {k: v.dtype for k, v in state["state"][index].items()} == {k: v.dtype for k, v in values.items()}
            # Out of the ranks into one process,
            plain_optimizer = adamw(plain, lr=0.5)
            plain.load_state_dict(model.state_dict())
            plain_optimizer.load_state_dict(copy.deepcopy(state))  # torch's own would share its tensors
            # and from there into ranks that have another state.
            again, again_optimizer = distributed(c, strategy, double, adamw)
            train(again, again_optimizer, [batch(c.rank, 9, dtype=torch.float64)])
            again.load_state_dict(plain.state_dict())
            again_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
            here.load_state_dict(expected.state_dict())
            here_optimizer = adamw(here)
            here_optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
            train(plain, plain_optimizer, steps[3:])
            train(here, here_optimizer, steps[3:])
            for each in ((model, optimizer), (again, again_optimizer)):
                train(*each, [batch(c.rank, step, dtype=torch.float64) for step in (3, 4, 5)])
            close(weights(plain), weights(here), strategy)
            close(weights(model), weights(here), strategy)
            same(weights(again), weights(model), strategy)


def test_state_dicts_are_torchs_own_in_both_directions(ranks):
    ranks(2).run(state_travels)


def groups_hooks_and_rates():
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            model = network()
            optimizer = optim.AdamW(model[0].parameters(), lr=0.01)
            calls = []
            optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
            sherd.distribute(model, optimizer, strategy=strategy, accumulate=2, accumulate_at="owner", comm=c)
            optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
            optimizer.load_state_dict(optimizer.state_dict())  # torch wraps step() again at its end
            start = weights(model)
            train(model, optimizer, [batch(c.rank, step) for step in (0, 1)])
            assert calls == ["pre", "post"], strategy
            assert torch.equal(model[2].weight, start["2.weight"])
            with pytest.raises(
                ConfigError, match=r"new parameter group.*shape \(7, 15\).*not belong to the distributed model"
            ):
                optimizer.add_param_group({"params": network()[0].weight})
            with pytest.raises(
                ConfigError, match=r"new parameter group.*shape \(7, 15\).*not belong to the distributed model"
            ):
                optimizer.add_param_group({"params": network().parameters()})
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group({"params": model[0].parameters()})
            optimizer.add_param_group({"params": model[2].weight, "lr": 0.02})
            optimizer.add_param_group({"params": [model[2].bias]})
            train(model, optimizer, [batch(c.rank, step) for step in (2, 3)])
            assert not torch.equal(model[2].weight, start["2.weight"])
            assert len(optimizer.state_dict()["param_groups"]) == 3
            before = weights(model)
            optimizer.param_groups[1]["lr"] = 0.0
            train(model, optimizer, [batch(c.rank, step) for step in (4, 5)])
            assert torch.equal(model[2].weight, before["2.weight"]), strategy
            assert not torch.equal(model[2].bias, before["2.bias"])
            assert calls == ["pre", "post"] * 3, strategy
            found[strategy] = weights(model)
        all_same(found)


def test_groups_added_later_hooks_and_rates_changed_by_hand(ranks):
    ranks(2).run(groups_hooks_and_rates)


class Together(optim.SGD):
    """Gradients are divided by the norm of all of them."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad = parameter.grad / norm
        return super().step(closure)


def not_elementwise():
    makers = {
        "LBFGS": lambda m: optim.LBFGS(m.parameters()),
        "Together": lambda m: Together(m.parameters(), lr=0.1),
        "SparseAdam": lambda m: optim.SparseAdam(m.parameters()),
    }
    causes = {"LBFGS": "needs a closure", "Together": "depends on the others", "SparseAdam": "dense gradients"}
    with connected() as c:
        for name, make in makers.items():
            for strategy in SHARDED:
                model = network()
                before, optimizer = weights(model), make(model)
                fix = 'write strategy="ddp", which keeps parameters whole'
                with pytest.raises(ConfigError, match=f"^{name} cannot be sharded: .*{causes[name]}.*; {fix}"):
                    sherd.distribute(model, optimizer, strategy=strategy, comm=c)
                train_alone(model, before)
        model = network()
        before, optimizer = weights(model), makers["Together"](model)
        sherd.distribute(model, optimizer, strategy="ddp", comm=c)
        train(model, optimizer, [batch(c.rank, step) for step in range(3)])
        assert differ(weights(model), before)
        everybody = c.all_gather_object(weights(model))
        same(everybody[0], everybody[1])


def train_alone(model, before):
    """A refusal left the model as it was."""
    same(weights(model), before)
    optimizer = sgd(model)
    train(model, optimizer, [batch(0)])
    assert differ(weights(model), before)


def test_optimizers_that_need_all_parameters_at_once_are_refused_under_zero_and_work_under_ddp(ranks):
    ranks(2).run(not_elementwise)


def lbfgs():
    def run(model, optimizer, data):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    with connected() as c:
        plain = double()
        run(plain, optim.LBFGS(plain.parameters(), lr=0.1), whole_batch(dtype=torch.float64))
        model, optimizer = distributed(c, "ddp", double, lambda m: optim.LBFGS(m.parameters(), lr=0.1))
        run(model, optimizer, batch(c.rank, dtype=torch.float64))
        close(weights(model), weights(plain), rtol=1e-7)
        with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times per step; use accumulate=1"):
            run(*distributed(c, "ddp", double, lambda m: optim.LBFGS(m.parameters()), accumulate=2), batch(c.rank))


def test_lbfgs_with_a_closure_under_ddp(ranks):
    ranks(2).run(lbfgs)
