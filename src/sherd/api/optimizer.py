"""The user's optimizer object, with methods of ours.

Its class is exchanged for a subclass of its own class with the same name, so that it stays the object that schedulers,
loggers and the user hold, and `isinstance` still says what it is.
"""

from __future__ import annotations

import copyreg
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.api.training import Closure, training_of
from sherd.data.restore import as_it_is as attributes_as_they_are

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


class Distributed(_Base):
    """The methods that a distributed optimizer has instead of its own; a compiled function is cut at them."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Closure | None = None) -> Any:
        """Update the parameters, on every rank alike. Inside an accumulation window it does nothing."""
        self._opt_called = True  # what an LR scheduler looks for
        return training_of(self).step(self, closure)

    # A scheduler wraps step() to see that it was called, unless it finds this mark.
    step._wrapped_by_lr_sched = True
    # So does torch at the end of load_state_dict, for the hooks, which belong to real steps only.
    step.hooked = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradient. Inside an accumulation window it does nothing."""
        training_of(self).zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's own format, on every rank. Collective."""
        return training_of(self).optimizer_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state in torch's own format; every rank keeps its part."""
        training_of(self).load_optimizer_state(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the distributed model."""
        parameters = param_group["params"]
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        if not isinstance(parameters, set):  # torch has its own words for a set
            parameters = param_group["params"] = list(parameters)
            named = (item[1] if isinstance(item, tuple) else item for item in parameters)
            training_of(self).check_group(list(named))
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain optimizer of its own class, with the whole state. Collective, as `state_dict` is."""
        state = self.__getstate__()
        whole = defaultdict(dict, training_of(self).whole_state())
        return copyreg.__newobj__, (self.__class__,), {**state, "state": whole}  # type: ignore[attr-defined]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class that it had. A pickler asks for it, and would have no object of it made otherwise."""
        return type(self).__bases__[1]


def as_it_is(optimizer: Optimizer) -> Callable[[], None]:
    """Gives `optimizer` back the class, the attributes, the groups and the state that it has now."""
    own, state = attributes_as_they_are(optimizer), dict(optimizer.state)
    groups = [dict(group) for group in optimizer.param_groups]

    def restore() -> None:
        own()
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)

    return restore


def adopt(optimizer: Optimizer) -> None:
    """Give `optimizer` the methods above."""
    # A scheduler that was built before leaves its wrapper of step() on the object.
    vars(optimizer).pop("step", None)
    kind: Any = type(optimizer)
    optimizer.__class__ = _distributed(kind)


@functools.cache
def _distributed(kind: Any) -> Any:
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Distributed, kind), own)
