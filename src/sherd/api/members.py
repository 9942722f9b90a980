"""Which modules are distributed, and how loading, saving, wrapping and stepping them changes.

`load_state_dict` of a module that is, contains or is part of a distributed model takes rank 0's values, wherever the
parameters live. `state_dict` returns copies of parameters that no rank has whole; then all ranks must call it.

torch's own wrappers are refused when they are built. They would exchange gradients a second time, or replace the
parameters that are trained, and that would show only later, as a hang or an unrelated error. The check is there because
wrappers are often not the user's own: Accelerate, and the trainers built on it, wrap every model. An FSDP that is first
imported after the last `distribute` is not seen here; the next backward finds that it has replaced the parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from sherd.api.training import find_training
from sherd.comm import labelled
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.engine import Engine
from sherd.engine.parameters.gathered.on_use import plain_copies
from sherd.engine.parameters.masters import with_masters
from sherd.errors import ConfigError
from sherd.patches import foreign, module_state, pickling

log = logging.getLogger("sherd")

_engines: MutableMapping[nn.Module | nn.Parameter, weakref.ref[Engine]] = WeakIdKeyDictionary()

_said: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines of which it was said that teams differ

_ALONE = (
    "Where parameters are gathered on use, model.state_dict() is collective: call it on every rank, and save it on one"
)


def enrol(model: nn.Module, engine: Engine, undo: ExitStack) -> None:
    """Register `engine` for `model`, its modules and its parameters."""
    members: list[nn.Module | nn.Parameter] = [*model.modules(), *model.parameters()]
    for member in members:
        undo.callback(_engines.pop, member, None)
        _engines[member] = weakref.ref(engine)
    module_state.install(_load, _save)
    pickling.install(_lives_in_ours)


def engine_of(module: nn.Module) -> Engine:
    """The engine of a distributed model, or of the model that `module` is part of."""
    engine = find_engine(module)
    if engine is None:
        raise ConfigError(
            f"this {type(module).__name__} is not part of a distributed model; call sherd.distribute first"
        )
    return engine


def is_distributed(member: nn.Module | nn.Parameter) -> bool:
    """Whether it is a distributed model or part of one."""
    return find_engine(member) is not None


def find_engine(member: nn.Module | nn.Parameter) -> Engine | None:
    """The engine of a distributed model, of one of its modules or of one of its parameters; else None."""
    reference = _engines.get(member)
    return None if reference is None else reference()


def engines_of(module: nn.Module) -> list[Engine]:
    """The engines of all distributed models that it is, contains or is part of."""
    return list({id(engine): engine for engine in map(find_engine, module.modules()) if engine is not None}.values())


def _lives_in_ours(parameter: nn.Parameter) -> bool:
    """Whether the engine owns its memory."""
    engine = find_engine(parameter)
    return engine is not None and engine.store.owns_memory


def _load(module: nn.Module, state: Any, assign: bool, original: Callable[[], Any]) -> Any:
    """What `module.load_state_dict(...)` does."""
    engines = engines_of(module)
    if engines and assign:
        raise ConfigError(
            "load_state_dict(assign=True) would replace the tensors that the ranks train; write load_state_dict(state)"
        )
    with ExitStack() as edits:
        for engine in engines:
            engine.refuse_at_consensus("load_state_dict")
            # Teams differ in what is not loaded, too: all of it becomes that of the first.
            changed = engine.inventory.model if engine.teams.count > 1 else module
            masters = _not_rounded(module, state, engine)
            edits.enter_context(engine.unchanged.editing(changed, compare=False, masters=masters))
        found = original()
        for engine in engines:
            engine.take_from_first_team()
    if engines:
        missing = set(found.missing_keys)
        named = module.named_parameters(remove_duplicate=False)
        loaded = [parameter for name, parameter in named if name not in missing]
        for engine in engines:
            engine.loaded(loaded)
    return found


def _not_rounded(module: nn.Module, state: Any, engine: Engine) -> set[TrackedParameter]:
    """The parameters with masters to which `state` gives values of more bits than they have: all these bits count. Of
    others only those values count that differ from the rounded masters. Collective, if there are masters."""
    found = with_masters(engine.inventory.of_module(module))
    if not found:
        return set()
    rounded = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(name) if isinstance(state, Mapping) else None
        if isinstance(value, torch.Tensor) and value.dtype.itemsize <= parameter.dtype.itemsize:
            rounded.add(parameter)
    by_ranks: dict[Ranks, list[TrackedParameter]] = {}
    for member in found:
        by_ranks.setdefault(member.ranks, []).append(member)
    chosen: set[TrackedParameter] = set()
    for its in sorted(by_ranks.values(), key=lambda its: its[0].ranks or ()):  # in one order on all ranks
        comm, mine = its[0].bucket.comm, [member.parameter in rounded for member in its]
        with labelled("load_state_dict"), comm.counters.agreeing():
            agreed = comm.broadcast_object(mine)  # the values of its first rank are taken
        chosen.update(member for member, is_rounded in zip(its, agreed, strict=True) if not is_rounded)
    return chosen


def _save(module: nn.Module, original: Callable[[], Any]) -> Any:
    """What `module.state_dict()` does."""
    engines = engines_of(module)
    for engine in engines:
        engine.torn.refuse("model.state_dict()")
    state = original()
    for engine in engines:
        _say_whose(engine)
        if not engine.store.whole:
            with labelled(f"state_dict() after step {engine.steps}", _ALONE):
                # Or the call of a single rank might match another gather or a barrier on the others.
                with engine.comm.counters.agreeing():
                    engine.comm.all_gather(torch.zeros(1), what="state_dict()").wait()
                plain_copies(state)
    return state


def _say_whose(engine: Engine) -> None:
    """Say once that teams differ, if they do: `state_dict` is then one team's."""
    drift = engine.policy.drift
    if drift is None or not (drift.since or drift.partial) or engine.at_consensus or engine in _said:
        return
    _said.add(engine)
    whose = "this rank's weights" if engine.comm.world == 1 else "the weights of this rank's group"
    log.warning(
        "rank %d: state_dict() has %s, %d step%s after the last exchange of parameters; save inside "
        "`with sherd.consensus(model):` to have those of all ranks together",
        engine.comm.number,
        whose,
        drift.since,
        "s" * (drift.since > 1),
    )


# ---------------------------------------------------------------- optimizers and wrappers that were not passed


def refuse_foreign() -> None:
    """From now on, check every `step()` of this process, and every model that one of torch's wrappers is given."""
    foreign.install(_check_wrapped, _check_step)


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps a distributed model but was not passed to `distribute`."""
    if find_training(optimizer) is not None:
        return
    engines = (find_engine(parameter) for group in optimizer.param_groups for parameter in group["params"])
    engine = next((engine for engine in engines if engine is not None), None)
    if engine is None:
        return
    why = None
    if engine.store.updates_slices:
        why = "every rank would update all parameters and keep state for all of them, instead of for its own part"
    elif engine.teams.count > 1:
        why = "parameters are exchanged after its step, so this rank would train alone for ever"
    elif engine.trained.accumulate > 1:
        why = "it ignores accumulate=, and would find no gradient inside an incomplete window"
    if why is not None:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"rank {engine.comm.number}: this {kind} steps a distributed model, but was not passed to "
            f"sherd.distribute: {why}; write model, optimizer = sherd.distribute(model, optimizer), with all the "
            f"optimizers of a model in one call"
        )


def _check_wrapped(modules: Any, wrapper: str) -> None:
    for module in (modules,) if isinstance(modules, nn.Module) else modules or ():
        engine = next(filter(None, map(find_engine, (*module.modules(), *module.parameters()))), None)
        if engine is not None:
            raise ConfigError(
                f"rank {engine.comm.number}: torch's {wrapper} was applied to a model that is already distributed by "
                f"sherd.distribute, so gradients would be exchanged twice; drop the wrapper and use `model` as it is. "
                f"Accelerate and the Hugging Face Trainer apply it by themselves: leave the model and the optimizer "
                f"out of accelerator.prepare(), and write a training loop instead of using the Trainer"
            )
