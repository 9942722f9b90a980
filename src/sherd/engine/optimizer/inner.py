"""Inner optimizers: objects of the user's class that step other tensors than the user's."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def inner_optimizer(
    kind: type[Optimizer], attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: defaultdict[Any, Any]
) -> Optimizer:
    """An optimizer made without `__init__`, whose arguments are unknown."""
    inner = kind.__new__(kind)
    hooks: dict[str, Any] = {name: OrderedDict() for name in _STEP_HOOKS}
    vars(inner).update({**attributes, **hooks, "param_groups": groups, "state": state})
    return inner


def inherited(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an inner optimizer shares with the user's.

    Not the user's hooks, which belong to the user's step, nor methods replaced on the object, as a scheduler replaces
    `step`.
    """
    kind = type(optimizer)
    own = ("param_groups", "state", *_STEP_HOOKS)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in own and not callable(getattr(kind, name, None))
    }


def step_unhooked(optimizer: Optimizer, kind: type[Optimizer] | None = None, *arguments: Any) -> Any:
    """The `step` of `kind` on `optimizer`, without torch's wrapper, which would run hooks."""
    step: Any = (kind or type(optimizer)).step
    if getattr(step, "hooked", False):  # checked first, since other decorators leave a __wrapped__ too
        step = step.__wrapped__
    return step(optimizer, *arguments)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether its class is one of torch's own, of which it is known what they do."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def take_over_changes(optimizer: Optimizer, inner: Optimizer) -> None:
    """Give the user's optimizer what a step changed: those that adapt their rate or count their steps change groups and
    attributes."""
    _update(vars(optimizer), inherited(inner))
    for group, inner_group in zip(optimizer.param_groups, inner.param_groups, strict=True):
        _update(group, hyper_parameters(inner_group))


def _update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Copy the values that are not already the same object."""
    target.update({name: value for name, value in source.items() if target.get(name, target) is not value})
