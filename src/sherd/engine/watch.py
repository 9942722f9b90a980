"""What must be the same on all ranks besides gradients, and must be as the engine left it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from sherd.comm import Communicator, labelled
from sherd.engine.agreement import Agreement
from sherd.engine.apart import bypass_torch_function
from sherd.engine.edits import EditGuard
from sherd.engine.inventory import Inventory
from sherd.engine.settings import compare_optimizers, hash_of, settings_of
from sherd.engine.torn import Torn
from sherd.errors import SherdError


class Watch:
    """Looks at parameters before a round, and at what ranks told each other after it."""

    def __init__(
        self,
        comm: Communicator,
        inventory: Inventory,
        guard: EditGuard,
        torn: Torn,
        optimizer: Optimizer | None,
    ) -> None:
        self._comm = comm
        self._inventory = inventory
        self._guard = guard
        self._torn = torn
        self._optimizer = optimizer

    def check(self) -> None:
        """Raise if something was done to the model on this rank that cannot be right."""
        self._torn.refuse("this backward")
        self._guard.check()
        with bypass_torch_function():
            hooks: list[Any] = [parameter._post_accumulate_grad_hooks for parameter in self._inventory.parameters]
        for name, its in zip(self._inventory.names, hooks, strict=True):
            if its and len(its) > 1:  # one is the engine's
                raise SherdError(
                    f"rank {self._comm.rank}: parameter {name!r} has a hook of register_post_accumulate_grad_hook, "
                    f"which would find no gradient: it is on its way to the other ranks; use p.grad after backward(), "
                    f"or p.register_hook for this rank's own gradient"
                )

    @property
    def edited(self) -> bool:
        """Whether this rank has edited a parameter that the ranks shall compare.

        Where each has a copy of its own, a model that was distributed without its optimizer is edited by it in every
        step, and nothing has to be compared.
        """
        return bool(self._guard.edits) and (self._optimizer is not None or self._guard.compares)

    def settings(self) -> int:
        """A hash of the optimizer's hyper-parameters."""
        return 0 if self._optimizer is None else hash_of(settings_of(self._optimizer))

    def agreed(self, agreement: Agreement, step: int) -> None:
        """Ranks have told each other: look closer where they differ, or may. Collective if there is reason to."""
        if not agreement.same_settings and self._optimizer is not None:
            names = {id(p): name for name, p in zip(self._inventory.names, self._inventory.parameters, strict=True)}
            compare_optimizers(self._comm, self._optimizer, names, step)
        if agreement.edited:
            with labelled(f"what was done to parameters before step {step}"):
                self._guard.compare(f"before step {step}")
