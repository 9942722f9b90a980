"""The handle behind a distributed model and its optimizers: a whole training step on one screen."""

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
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.engine import Engine
from sherd.engine.gradients.gradient import Gradient
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
    """Ties a model and its optimizers to the engine. It lives as long as any of them."""

    def __init__(self, engine: Engine, strategy: Strategy) -> None:
        self.engine = engine
        self.strategy = strategy
        self._gradients = {each.optimizer: each for each in engine.gradients}
        self.recorders: dict[Optimizer, Recorder] = {}
        """Record every step of each optimizer, while events are on."""

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
        recorder = self.recorders.get(optimizer)
        if recorder is None:
            return self._step(optimizer, closure)
        return recorder.record(closure, partial(self._step, optimizer))

    def _step(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        if closure is not None and self.shard(optimizer).takes_closure:
            return self._step_by_closure(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradient = self.gradient(optimizer)
        if not gradient.weights.weighed:
            self.engine.trained.count_samples(None)
        elif gradient.window.last:
            self.engine.trained.count_samples(gradient.weights.own)
        if self.engine.prepare_step(gradient):
            with torch.no_grad():
                _hooked_update(optimizer)
        return loss

    def update(self, optimizer: Optimizer) -> None:
        """The update of a real step."""
        # Inside the step's hooks: pre-hooks may edit parameters, and post-hooks see the updates of all ranks.
        gradient = self.gradient(optimizer)
        if optimizer._optimizer_step_pre_hooks:
            self.engine.settle(gradient)  # they may edit gradients too
        with self.engine.updating(gradient) as update:
            update.run()

    def _step_by_closure(self, optimizer: Optimizer, closure: Closure) -> Any:
        """A step that may evaluate the loss several times, each time with the loss and gradient of all ranks."""
        engine, gradient, name = self.engine, self.gradient(optimizer), type(optimizer).__name__
        if engine.trained.accumulate > 1:
            raise ConfigError(f"{name} evaluates the loss several times per step; use accumulate=1")
        weights = gradient.weights
        weight = weights.pending  # set before the step, it holds for every evaluation
        engine.trained.count_samples(weight)

        def search() -> Any:
            with engine.updating(gradient) as update:
                update.begun = False  # a first evaluation that fails leaves everything as it was

                def evaluate(*arguments: Any, **options: Any) -> Any:
                    update.begun |= engine.accept_edits()  # the parameters that its search has set so far
                    engine.trained.weigh(weight)
                    loss = closure(*arguments, **options)
                    if not engine.prepare_step(gradient):
                        raise SherdError(
                            f"rank {engine.comm.number}: the gradient is not finite, and {name} cannot skip a step "
                            f"half-way through"
                        )
                    if loss is not None or self.shard(optimizer).needs_closure:
                        with labelled(f"the loss of {gradient.label}"):
                            loss = loss_of_all(engine.path.together, weights, loss, name)
                    engine.trained.weigh(None)
                    update.begun = True
                    return loss

                return update.run(evaluate)

        # As torch runs a step: inside the registered hooks, and visible to the profiler.
        with torch.no_grad():
            return Optimizer.profile_hook_step(lambda _: search())(optimizer)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """What `optimizer.zero_grad()` does."""
        self.engine.forget(self.gradient(optimizer), keep_zeros=not set_to_none)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What `optimizer.state_dict()` returns."""
        self.engine.torn.refuse("optimizer.state_dict()")
        with self._together("optimizer.state_dict()", optimizer):
            return self.shard(optimizer).state_dict(self.engine.comm)

    def whole_state(self, optimizer: Optimizer) -> dict[Any, Any]:
        """The `state` of a copy of the optimizer."""
        self.engine.torn.refuse("a copy of the optimizer")
        with self._together("a copy or a pickle of the optimizer", optimizer):
            return self.shard(optimizer).whole_state(self.engine.comm)

    @contextmanager
    def _together(self, what: str, optimizer: Optimizer) -> Iterator[None]:
        """Inside, ranks gather what each has a part of. A rank that calls it alone gets an error instead of waiting."""
        note = f"Under {self.strategy.name} {what} is collective: call it on every rank, and save it on one"
        if name := self.gradient(optimizer).name:
            what = f"{what} of {name}"
        with labelled(f"{what} after step {self.engine.steps}", note):
            if self.shard(optimizer).gathers_state:
                with self.engine.comm.counters.agreeing():
                    # Or the call of a single rank might match another gather of the same form on the others.
                    self.engine.comm.agree(f"barrier({what})").wait()
            yield

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """What `optimizer.load_state_dict(state)` does."""
        self.shard(optimizer).load_state_dict(state)
        self.engine.loaded_optimizer(optimizer)

    def add_group(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Give an optimizer more parameters. Refuses those that are not the model's, or another optimizer's."""
        inventory = self.engine.inventory
        refuse_strangers(parameters, inventory.parameters, "the new parameter group")
        others = {each.optimizer: each.name for each in self.engine.gradients if each.optimizer is not None}
        refuse_shared(others, inventory, (optimizer, parameters))
        self.engine.give(optimizer, [inventory.by_parameter[parameter] for parameter in parameters])

    def shard(self, optimizer: Optimizer) -> Updater:
        """What this optimizer updates."""
        return self.engine.shards[optimizer]

    def gradient(self, optimizer: Optimizer) -> Gradient:
        """What it steps from."""
        return self._gradients[optimizer]

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return sum(shard.state_bytes() for shard in self.engine.shards.values())

    def coming_state_bytes(self) -> int:
        """Bytes of optimizer state that first steps will add on this rank; 0 after them, or if that is unknown."""
        found: list[int | None] = []
        for gradient in self.engine.gradients:
            if gradient.optimizer is not None and not gradient.steps:
                shard = self.shard(gradient.optimizer)
                forecast = Forecast(*shard.users)
                found += [forecast.bytes(group, tensors) for group, tensors in shard.coming()]
        return sum(each for each in found if each is not None)

    def state_entries(self) -> int:
        """How many tensors have state."""
        return sum(shard.state_entries() for shard in self.engine.shards.values())

    def memory(self) -> dict[str, int]:
        """Bytes that this rank allocated, by kind."""
        store = self.engine.store
        kinds = {"parameters": store.bytes(), **self.engine.gradient_bytes(), "optimizer state": self.state_bytes()}
        if masters := [values.master for values in self.engine.values() if values.master is not None]:
            kinds["masters"] = sum(master.nbytes for master in masters)
        kinds["buckets"] += store.gathered_bytes()
        return {**kinds, **self.engine.policy.bytes()}


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


def refuse_shared(
    optimizers: Mapping[Optimizer, str],
    inventory: Inventory,
    more: tuple[Optimizer, Sequence[nn.Parameter]] | None = None,
) -> None:
    """Refuse parameters that are in two of these optimizers, one of which may get `more`."""
    having: dict[nn.Parameter, Optimizer] = {}
    grouped = [(o, parameter) for o in optimizers for group in o.param_groups for parameter in group["params"]]
    if more is not None:
        grouped += [(more[0], parameter) for parameter in more[1]]
    for optimizer, parameter in grouped:
        other = having.setdefault(parameter, optimizer)
        if other is not optimizer:
            raise ConfigError(
                f"parameter {inventory.by_parameter[parameter].name!r} is in two optimizers, {optimizers[other]} and "
                f"{optimizers[optimizer]}; give each parameter to one of them"
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


@Optimizer.profile_hook_step
def _hooked_update(optimizer: Optimizer) -> None:
    """An update as torch runs a step: inside the registered hooks, and visible to the profiler."""
    training_of(optimizer).update(optimizer)
