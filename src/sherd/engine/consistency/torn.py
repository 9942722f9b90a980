"""An update that failed halfway: parameters and optimizer state must not be used before both are loaded again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sherd.engine.buckets.inventory import Inventory
from sherd.errors import SherdError


class Torn:
    """Refuses to use parameters or optimizer state that were only partly updated."""

    def __init__(self, inventory: Inventory, rank: int, optimizers: Iterable[Optimizer]) -> None:
        self._model = inventory.model
        self._parameters = inventory.parameters
        self._rank = rank
        self._optimizers = tuple(optimizers)
        self.why = ""
        self._parameters_left: set[int] = set()
        self._optimizers_left: set[Optimizer] = set()
        self._hooks: list[Any] = []

    def tear(self, step: str, error: BaseException) -> None:
        """The update of this step failed after it had started."""
        self.why = f"the update of {step} failed halfway ({type(error).__name__}: {error})"
        self._parameters_left = {id(parameter) for parameter in self._parameters}
        self._optimizers_left = set(self._optimizers)
        if not self._hooks:
            myself = weakref.ref(self)

            def refuse(module: nn.Module, _: Any) -> None:
                torn = myself()
                if torn is not None:
                    torn.refuse(f"the forward of {type(module).__name__}")

            self._hooks = [module.register_forward_pre_hook(refuse) for module in self._model.modules()]

    def refuse(self, what: str) -> None:
        """Raise if there is torn state, which `what` would use."""
        if self.why:
            raise SherdError(
                f"rank {self._rank}: {what} is refused: {self.why}, so parameters and optimizer state are only partly "
                f"updated; load both, on every rank: model.load_state_dict(...) and optimizer.load_state_dict(...)"
                f"{' of every optimizer' if len(self._optimizers) > 1 else ''}"
            )

    def loaded(self, parameters: Iterable[nn.Parameter]) -> bool:
        """These parameters were loaded on all ranks; return whether nothing is torn any more."""
        self._parameters_left.difference_update(map(id, parameters))
        return self._mend()

    def loaded_optimizer(self, optimizer: Optimizer) -> bool:
        """An optimizer's state was loaded; return whether nothing is torn any more."""
        self._optimizers_left.discard(optimizer)
        return self._mend()

    def _mend(self) -> bool:
        if not self.why or self._parameters_left or self._optimizers_left:
            return False
        self.why = ""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return True
