"""An update that failed halfway: parameters and optimizer state must not be used before both are loaded again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from sherd.engine.buckets.inventory import Inventory
from sherd.errors import SherdError


class Torn:
    """Refuses to use parameters or optimizer state that were only partly updated."""

    def __init__(self, inventory: Inventory, rank: int, has_optimizer: bool) -> None:
        self._model = inventory.model
        self._parameters = inventory.parameters
        self._rank = rank
        self._has_optimizer = has_optimizer
        self._why = ""
        self._parameters_left: set[int] = set()
        self._optimizer_left = False
        self._hooks: list[Any] = []

    def tear(self, step: int, error: BaseException) -> None:
        """The update of this step failed after it had started."""
        self._why = f"the update of step {step} failed halfway ({type(error).__name__}: {error})"
        self._parameters_left = {id(parameter) for parameter in self._parameters}
        self._optimizer_left = self._has_optimizer
        if not self._hooks:
            myself = weakref.ref(self)

            def refuse(module: nn.Module, _: Any) -> None:
                torn = myself()
                if torn is not None:
                    torn.refuse(f"the forward of {type(module).__name__}")

            self._hooks = [module.register_forward_pre_hook(refuse) for module in self._model.modules()]

    def refuse(self, what: str) -> None:
        """Raise if there is torn state, which `what` would use."""
        if self._why:
            raise SherdError(
                f"rank {self._rank}: {what} is refused: {self._why}, so parameters and optimizer state are only partly "
                f"updated; load both, on every rank: model.load_state_dict(...) and optimizer.load_state_dict(...)"
            )

    def loaded(self, parameters: Iterable[nn.Parameter]) -> bool:
        """These parameters were loaded on all ranks; return whether nothing is torn any more."""
        self._parameters_left.difference_update(map(id, parameters))
        return self._mend()

    def loaded_optimizer(self) -> bool:
        """The optimizer's state was loaded; return whether nothing is torn any more."""
        self._optimizer_left = False
        return self._mend()

    def _mend(self) -> bool:
        if not self._why or self._parameters_left or self._optimizer_left:
            return False
        self._why = ""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return True
