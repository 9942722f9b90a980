"""The handle behind a distributed model and its optimizer: a whole training step on one screen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from sherd.comm import labelled
from sherd.engine.engine import Engine
from sherd.engine.gradients.loss import loss_of_all
from sherd.engine.optimizer.forecast import Forecast
from sherd.engine.optimizer.unsplit import Updater
from sherd.errors import ConfigError, SherdError
from sherd.strategies import Strategy

Closure = Callable[..., Any]
_ATTRIBUTE = "_sherd_training"


class Recorder(Protocol):
    """Records every step."""

    def record(self, closure: Closure | None, step: Callable[[Closure | None], Any]) -> Any:
        """Take the step `step(closure)`."""


class Training:
    """Ties a model and its optimizer to the engine. It lives as long as either of them."""

    def __init__(self, engine: Engine, strategy: Strategy) -> None:
        self.engine = engine
        self.strategy = strategy
        self.recorder: Recorder | None = None
        """Records every step, while events are on."""

    def own(self, thing: nn.Module | Optimizer) -> None:
        """Let `thing` find this handle, and keep it alive."""
        vars(thing)[_ATTRIBUTE] = self

    def disown(self, thing: nn.Module | Optimizer) -> None:
        """Undo `own`."""
        vars(thing).pop(_ATTRIBUTE, None)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a distributed model is a plain one."""

    def __reduce__(self) -> Any:
        """A pickled model has an empty dict in its place, which `weights_only=True` can read too."""
        return OrderedDict, ()

    def step(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        """What `optimizer.step(closure)` does."""
        if self.recorder is None:
            return self._step(optimizer, closure)
        return self.recorder.record(closure, partial(self._step, optimizer))

    def _step(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        engine, updater = self.engine, self.updater
        if closure is not None and updater.takes_closure:
            return self._step_by_closure(optimizer, closure, updater)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if engine.prepare_step():
            _hooked(optimizer, lambda: self._update(optimizer))
        return loss

    def _update(self, optimizer: Optimizer) -> None:
        # Inside the step's hooks: pre-hooks may edit parameters, and post-hooks see the updates of all ranks.
        if optimizer._optimizer_step_pre_hooks:
            self.engine.settle()  # they may edit gradients too
        with self.engine.updating() as update:
            update.run()

    def _step_by_closure(self, optimizer: Optimizer, closure: Closure, updater: Updater) -> Any:
        """A step that may evaluate the loss several times, each time with the loss and gradient of all ranks."""
        engine, name = self.engine, type(optimizer).__name__
        if engine.window.length > 1:
            raise ConfigError(f"{name} evaluates the loss several times per step; use accumulate=1")
        weights = engine.weights
        weight = weights.pending  # set before the step, it holds for every evaluation

        def search() -> Any:
            with engine.updating() as update:
                update.begun = False  # a first evaluation that fails leaves everything as it was

                def evaluate(*arguments: Any, **options: Any) -> Any:
                    update.begun |= engine.accept_edits()  # the parameters that its search has set so far
                    weights.pending = weight
                    loss = closure(*arguments, **options)
                    if not engine.prepare_step():
                        raise SherdError(
                            f"rank {engine.comm.rank}: the gradient is not finite, and {name} cannot skip a step "
                            f"half-way through"
                        )
                    if loss is not None or updater.needs_closure:
                        with labelled(f"the loss of step {engine.steps}"):
                            loss = loss_of_all(engine.together, weights, loss, name)
                    weights.pending = None
                    update.begun = True
                    return loss

                return update.run(evaluate)

        return _hooked(optimizer, search)

    def zero_grad(self, set_to_none: bool) -> None:
        """What `optimizer.zero_grad()` does."""
        self.engine.forget(keep_zeros=not set_to_none)

    def optimizer_state(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` returns."""
        self.engine.torn.refuse("optimizer.state_dict()")
        with self._together("optimizer.state_dict()"):
            return self.updater.state_dict(self.engine.comm)

    def whole_state(self) -> dict[Any, Any]:
        """The `state` of a copy of the optimizer."""
        self.engine.torn.refuse("a copy of the optimizer")
        with self._together("a copy or a pickle of the optimizer"):
            return self.updater.whole_state(self.engine.comm)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Inside, ranks gather what each has a part of. A rank that calls it alone gets an error instead of waiting."""
        note = f"Under {self.strategy.name} {what} is collective: call it on every rank, and save it on one"
        with labelled(f"{what} after step {self.engine.steps}", note):
            if self.updater.gathers_state:
                with self.engine.comm.counters.agreeing():
                    # Or the call of a single rank might match another gather of the same form on the others.
                    self.engine.comm.agree(f"barrier({what})").wait()
            yield

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """What `optimizer.load_state_dict(state)` does."""
        self.updater.load_state_dict(state)
        self.engine.loaded_optimizer()

    def check_group(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse a new group with parameters that are not the model's."""
        refuse_strangers(parameters, self.engine.inventory.parameters, "the new parameter group")

    @property
    def updater(self) -> Updater:
        """What updates the parameters."""
        if self.engine.updater is None:
            raise ConfigError("this model was distributed without an optimizer; pass it: distribute(model, optimizer)")
        return self.engine.updater

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return 0 if self.engine.updater is None else self.engine.updater.state_bytes()

    def coming_state_bytes(self) -> int:
        """Bytes of optimizer state that the first step will add on this rank; 0 after it, or if that is unknown."""
        if self.engine.updater is None or self.engine.steps:
            return 0
        forecast = Forecast(*self.updater.users)
        found = [forecast.bytes(group, tensors) for group, tensors in self.updater.coming()]
        return sum(each for each in found if each is not None)

    def state_entries(self) -> int:
        """How many tensors have state."""
        return 0 if self.engine.updater is None else self.engine.updater.state_entries()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank allocated, by kind."""
        store = self.engine.store
        kinds = {"parameters": store.bytes(), **self.engine.gradient_bytes(), "optimizer state": self.state_bytes()}
        kinds["buckets"] += store.gathered_bytes()
        return kinds


def refuse_strangers(parameters: Sequence[nn.Parameter], known: Sequence[nn.Parameter], where: str) -> None:
    """Refuse parameters that are not the distributed model's: ranks would never agree on them."""
    ours = {id(parameter) for parameter in known}
    for position, parameter in enumerate(parameters):
        if id(parameter) not in ours:
            raise ConfigError(
                f"{where} has a parameter of shape {tuple(parameter.shape)} at position {position} that does not "
                f"belong to the distributed model; build the optimizer from model.parameters(), or pass all the models "
                f"that it trains in one call: sherd.distribute(encoder, decoder, optimizer)"
            )


def training_of(thing: nn.Module | Optimizer) -> Training:
    """The handle of a distributed model or optimizer."""
    training = find_training(thing)
    if training is None:
        kind = type(thing).__name__
        raise ConfigError(f"this {kind} is not distributed; write model, ... = sherd.distribute(model, ...) first")
    return training


def find_training(thing: nn.Module | Optimizer) -> Training | None:
    """The same, or None."""
    training = vars(thing).get(_ATTRIBUTE)
    return training if isinstance(training, Training) else None  # an unpickled model has something else there


def _hooked(optimizer: Optimizer, update: Callable[[], Any]) -> Any:
    """Run `update` as torch runs a step: inside the registered hooks, and visible to the profiler."""
    run = Optimizer.profile_hook_step(lambda _: update())
    with torch.no_grad():
        return run(optimizer)
