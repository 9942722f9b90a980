"""An optimizer that raises in the middle of its step."""

from __future__ import annotations

import copy

import pytest
import torch

import sherd
from sherd import SherdError
from tests.helpers.training import STRATEGIES, all_same, batch, connected, distributed, loss_of, train, weights

REASON = r"refused: the update of step 2 failed halfway \(ValueError: half way\).*load both"


class Failing(torch.optim.SGD):
    """Updates half of its parameters, then raises, when it is told to."""

    fail = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.fail:
            return super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"][: len(group["params"]) // 2]:
                parameter.add_(1.0)
        raise ValueError("half way")


def failing(model):
    return Failing(model.parameters(), lr=0.1, momentum=0.9)


def _torn(c, strategy):
    """A model and an optimizer after a step that failed, and what they were before."""
    model, optimizer = distributed(c, strategy, optimizer=failing)
    train(model, optimizer, [batch(c.rank, step) for step in range(2)])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss = loss_of(model, batch(c.rank, 2))
    loss.backward()
    optimizer.fail = True
    with pytest.raises(ValueError, match="half way"):
        optimizer.step()
    optimizer.fail = False
    return model, optimizer, saved, loss


def refused():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer, _, _ = _torn(c, strategy)
            other = loss_of(torch.nn.Linear(15, 5), batch(c.rank))
            calls = {
                "forward": lambda model=model: loss_of(model, batch(c.rank)),
                "part": lambda model=model: model[0](torch.ones(15)),
                "step": optimizer.step,
                "state": model.state_dict,
                "optimizer": optimizer.state_dict,
                "full": lambda model=model: sherd.full_parameters(model).__enter__(),
            }
            for name, call in calls.items():
                with pytest.raises(SherdError, match=rf"rank {c.rank}: .*{REASON}"):
                    call()
                    pytest.fail(f"{name} under {strategy}")
            other.backward()  # other models go on


def test_everything_that_would_use_the_state_is_refused(ranks):
    ranks(2).run(refused)


def mended(order):
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            model, optimizer, (values, state), _ = _torn(c, strategy)
            loads = [lambda m=model, v=values: m.load_state_dict(v), lambda o=optimizer, s=state: o.load_state_dict(s)]
            for number, load in enumerate(loads if order == "model" else reversed(loads)):
                with pytest.raises(SherdError, match="load both"):
                    optimizer.step()
                if number == 0 and order == "model":  # a part will not do
                    model[0].load_state_dict({"weight": values["0.weight"]}, strict=False)
                    with pytest.raises(SherdError, match="load both"):
                        optimizer.step()
                load()
            train(model, optimizer, [batch(c.rank, step) for step in range(2, 4)])
            found[strategy] = weights(model)
            whole, whole_optimizer = distributed(c, strategy, optimizer=failing)
            train(whole, whole_optimizer, [batch(c.rank, step) for step in range(4)])
            found[f"{strategy} without a failure"] = weights(whole)
        all_same(found)


@pytest.mark.parametrize("order", ["model", "optimizer"])
def test_loading_model_and_optimizer_mends_it(ranks, order):
    ranks(2).run(mended, order)


def refused_by_a_hook():
    """Nothing has changed yet, so nothing is torn."""
    with connected() as c:
        model, optimizer = distributed(c, "zero2", optimizer=failing)
        train(model, optimizer, [batch(c.rank)])

        def hook(*_):
            raise KeyError("not now")

        handle = optimizer.register_step_pre_hook(hook)
        loss_of(model, batch(c.rank)).backward()
        with pytest.raises(KeyError, match="not now"):
            optimizer.step()
        handle.remove()
        optimizer.step()


def test_a_hook_that_refuses_a_step_tears_nothing(ranks):
    ranks(2).run(refused_by_a_hook)


def failing_closure(fail_at):
    """Before anything has changed a closure may fail, as in plain torch; later on it may not."""
    with connected() as c:
        model, optimizer = distributed(c, "ddp", optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(c.rank))
            calls.append(loss)
            if len(calls) == fail_at:
                raise ValueError("half way")
            loss.backward()
            return loss

        with pytest.raises(ValueError, match="half way"):
            optimizer.step(closure)
        if fail_at == 1:
            optimizer.step(closure)
            return
        with pytest.raises(SherdError, match="load both"):
            loss_of(model, batch(c.rank))


@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_closure_that_fails(ranks, fail_at):
    ranks(2).run(failing_closure, fail_at)


def on_one_rank():
    with connected(timeout=8.0) as c:
        model, optimizer = distributed(c, "zero2", optimizer=failing)
        loss_of(model, batch(c.rank)).backward()
        optimizer.fail = c.rank == 1
        with pytest.raises((ValueError, SherdError)) as caught:
            optimizer.step()
            c.barrier().wait()
        assert (caught.type is ValueError) == (c.rank == 1)
        with pytest.raises(SherdError):
            loss_of(model, batch(c.rank)).backward()


def test_where_one_rank_fails_none_goes_on(ranks):
    ranks(2).run(on_one_rank)
