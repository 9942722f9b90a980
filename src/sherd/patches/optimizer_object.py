"""Gives the user's optimizer object our methods: torch's step pre-hook cannot skip a step."""

from __future__ import annotations

import copyreg
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.patches.replacing import subclass, swap_class

RELIES_ON = {
    "torch.optim:Optimizer.step": "self closure",
    "torch.optim:Optimizer.zero_grad": "self set_to_none",
    "torch.optim:Optimizer.state_dict": "self",
    "torch.optim:Optimizer.load_state_dict": "self state_dict",
    "torch.optim:Optimizer.add_param_group": "self param_group",
    "torch.optim:Optimizer.profile_hook_step": "func",  # looks for `step.hooked`
    "torch.optim:Optimizer._patch_step_function": "self",
    "torch.amp:GradScaler.step": "self optimizer args kwargs",  # looks for `_step_supports_amp_scaling`
    "torch.optim.lr_scheduler:LRScheduler.__init__": "self optimizer last_epoch",  # looks for `_wrapped_by_lr_sched`
}

Closure = Callable[..., Any]

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


class Handle(Protocol):
    """Does the work of a distributed optimizer's methods."""

    def step(self, optimizer: Optimizer, closure: Closure | None) -> Any: ...

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None: ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]: ...

    def whole_state(self, optimizer: Optimizer) -> dict[Any, Any]: ...

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None: ...

    def add_group(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None: ...


_handle_of: Callable[[Optimizer], Handle]


class Distributed(_Base):
    """The methods of a distributed optimizer; they break the graph of a compiled function."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Closure | None = None) -> Any:
        """Update the parameters on every rank. Inside an accumulation window it does nothing."""
        self._opt_called = True  # what an LR scheduler looks for
        return _handle_of(self).step(self, closure)

    # A scheduler wraps step() to see that it was called, unless it finds this mark.
    step._wrapped_by_lr_sched = True
    # So does torch at the end of load_state_dict, for the hooks, which belong to real steps only.
    step.hooked = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradient. Inside an accumulation window it does nothing."""
        _handle_of(self).zero_grad(self, set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A fused optimizer tells a GradScaler that its own step unscales gradients; ours steps others than those."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value  # for copies, which are plain optimizers

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's own format, on every rank. Collective."""
        return _handle_of(self).optimizer_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state in torch's own format; every rank keeps its part."""
        _handle_of(self).load_optimizer_state(self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the distributed model."""
        parameters = param_group["params"]
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        if not isinstance(parameters, set):  # torch has its own error for a set
            parameters = param_group["params"] = list(parameters)
            named = (item[1] if isinstance(item, tuple) else item for item in parameters)
            _handle_of(self).add_group(self, list(named))
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain optimizer of its own class, with the whole state. Collective, as `state_dict` is."""
        state = self.__getstate__()
        whole = defaultdict(dict, _handle_of(self).whole_state(self))
        return copyreg.__newobj__, (self.__class__,), {**state, "state": whole}  # type: ignore[attr-defined]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The original class. A pickler asks for it, and would otherwise refuse to make an object of that class."""
        return type(self).__bases__[1]


def install(optimizer: Optimizer, handle_of: Callable[[Optimizer], Handle]) -> None:
    """Give `optimizer` the methods above, which call the handle that `handle_of` returns."""
    global _handle_of
    _handle_of = handle_of
    # A scheduler built earlier has left its wrapper of step() on the object.
    vars(optimizer).pop("step", None)
    swap_class(optimizer, Distributed)


uninstall = subclass.cache_clear
"""Forgets the classes that were made. Existing objects keep theirs."""
