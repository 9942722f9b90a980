"""Which modules are distributed, and what that changes about loading into them and saving them.

`load_state_dict` of a module that is, contains or is a part of a distributed model takes rank 0's values, wherever the
parameters live. `state_dict` gives copies of parameters that no rank has whole; all ranks must call it then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from sherd.api.training import find_training
from sherd.comm import labelled
from sherd.engine.engine import Engine
from sherd.engine.parameters.gathered.on_use import plain_copies
from sherd.errors import ConfigError
from sherd.patches import foreign, module_state, pickling

_engines: MutableMapping[nn.Module | nn.Parameter, weakref.ref[Engine]] = WeakIdKeyDictionary()

_ALONE = (
    "Where parameters are gathered on use, model.state_dict() is collective: call it on every rank, and save it on one"
)


def enrol(model: nn.Module, engine: Engine, undo: ExitStack) -> None:
    """Make `engine` the one of `model`, its modules and its parameters."""
    members: list[nn.Module | nn.Parameter] = [*model.modules(), *model.parameters()]
    for member in members:
        undo.callback(_engines.pop, member, None)
        _engines[member] = weakref.ref(engine)
    module_state.install(_load, _save)
    pickling.install(_lives_in_ours)


def engine_of(module: nn.Module) -> Engine:
    """The engine of a distributed model, or of the model that `module` is a part of."""
    engine = find_engine(module)
    if engine is None:
        raise ConfigError(
            f"this {type(module).__name__} is not part of a distributed model; call sherd.distribute first"
        )
    return engine


def is_distributed(member: nn.Module | nn.Parameter) -> bool:
    """Whether it is a distributed model or a part of one."""
    return find_engine(member) is not None


def find_engine(member: nn.Module | nn.Parameter) -> Engine | None:
    """The engine of a distributed model, a part of one or one of its parameters, or None."""
    reference = _engines.get(member)
    return None if reference is None else reference()


def _engines_of(module: nn.Module) -> list[Engine]:
    """The engines of all distributed models that it is, contains or is a part of."""
    return list({id(engine): engine for engine in map(find_engine, module.modules()) if engine is not None}.values())


def _lives_in_ours(parameter: nn.Parameter) -> bool:
    """Whether its memory is the engine's."""
    engine = find_engine(parameter)
    return engine is not None and engine.store.owns_memory


def _load(module: nn.Module, assign: bool, original: Callable[[], Any]) -> Any:
    """What `module.load_state_dict(...)` does."""
    engines = _engines_of(module)
    if engines and assign:
        raise ConfigError(
            "load_state_dict(assign=True) would put other tensors in the place of those that the ranks train; "
            "write load_state_dict(state)"
        )
    with ExitStack() as edits:
        for engine in engines:
            edits.enter_context(engine.unchanged.editing(module, compare=False))
        found = original()
    if engines:
        missing = set(found.missing_keys)
        named = module.named_parameters(remove_duplicate=False)
        loaded = [parameter for name, parameter in named if name not in missing]
        for engine in engines:
            engine.loaded(loaded)
    return found


def _save(module: nn.Module, original: Callable[[], Any]) -> Any:
    """What `module.state_dict()` does."""
    engines = _engines_of(module)
    for engine in engines:
        engine.torn.refuse("model.state_dict()")
    state = original()
    for engine in engines:
        if not engine.store.whole:
            with labelled(f"state_dict() after step {engine.steps}", _ALONE):
                # Or a rank alone might find the others where they gather the same, or in a barrier.
                with engine.comm.counters.agreeing():
                    engine.comm.all_gather(torch.zeros(1), what="state_dict()").wait()
                plain_copies(state)
    return state


# ---------------------------------------------------------------- optimizers and wrappers that were not passed


def refuse_foreign() -> None:
    """Look at every `step()` of this process, and at what wrappers are put around, from now on."""
    foreign.install(_check_wrapped, _check_step)


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that was not passed, but steps parameters of a distributed model."""
    if find_training(optimizer) is not None:
        return
    engines = (find_engine(parameter) for group in optimizer.param_groups for parameter in group["params"])
    engine = next((engine for engine in engines if engine is not None), None)
    if engine is None:
        return
    why = None
    if engine.store.updates_slices:
        why = "every rank would step all parameters, with state for all of them, where each is to step its own part"
    elif engine.window.length > 1:
        why = "it knows nothing of accumulate=, and would find no gradient where a window is not complete"
    if why is not None:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"rank {engine.comm.rank}: this {kind} steps a distributed model and was not passed to sherd.distribute: "
            f"{why}; write model, optimizer = sherd.distribute(model, optimizer) (a model has one optimizer, with a "
            f"group for each kind of parameter)"
        )


def _check_wrapped(modules: Any, wrapper: str) -> None:
    for module in (modules,) if isinstance(modules, nn.Module) else modules or ():
        engine = next(filter(None, map(find_engine, (*module.modules(), *module.parameters()))), None)
        if engine is not None:
            raise ConfigError(
                f"rank {engine.comm.rank}: torch's {wrapper} was put around a model that sherd.distribute has made "
                f"ready already, so gradients would be exchanged twice; drop the wrapper and use `model` as it is. "
                f"Accelerate and the Hugging Face Trainer put it there by themselves: leave the model and the "
                f"optimizer out of accelerator.prepare(), and write the training loop in place of the Trainer"
            )
