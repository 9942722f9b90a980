"""The engine: the way of a gradient, from autograd's hook to the next forward.

    hook -> collector -> gradients (ring, communicator) -> sums -> optimizer shard -> parameter store

`rounds` has the way to the sums, `stores` where parameters live; here they meet in a step. The engine never asks which
strategy made its choices.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sherd import observe
from sherd.comm import Communicator, labelled
from sherd.config import StepOptions
from sherd.engine.choices import Choices, Parameters
from sherd.engine.editing import Editing
from sherd.engine.edits import EditGuard
from sherd.engine.gradients import RingGradients
from sherd.engine.inventory import Inventory
from sherd.engine.layout import ShardLayout
from sherd.engine.rounds import Rounds
from sherd.engine.stores import HostStore, ParameterStore, PrivateStore, ReplicaStore
from sherd.errors import SherdError

log = logging.getLogger("sherd")

_STORES: dict[Parameters, type[ParameterStore]] = {
    Parameters.REPLICAS: ReplicaStore,
    Parameters.PRIVATE: PrivateStore,
    Parameters.HOST: HostStore,
}


class Engine:
    """Training of one model on one rank."""

    def __init__(self, comm: Communicator, inventory: Inventory, choices: Choices, options: StepOptions) -> None:
        self.comm = comm
        self.inventory = inventory
        self.choices = choices
        self.skipped = 0
        self._options = options
        layout = inventory.layout(comm.world, comm.tree.group, options.bucket_bytes)
        self.store = _STORES[choices.parameters](comm, layout, inventory.trainable, inventory.frozen)
        self.store.from_leader(inventory.buffers)
        self._guard = EditGuard(inventory, self.store, comm.rank, checksums=options.check == "edits")
        self.rounds = Rounds(comm, inventory, layout, choices, options, check=self._guard.check)
        self.editing = Editing(comm, inventory, self.store, self._guard)

    @property
    def layout(self) -> ShardLayout:
        """The layout of the trainable parameters."""
        return self.rounds.layout

    @property
    def gradients(self) -> RingGradients:
        """Where gradients are kept."""
        return self.rounds.gradients

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self.rounds.number

    def prepare_step(self) -> bool:
        """Whether this `step()` is a real one and its gradient is fit for it. Collective if it is real."""
        if self.editing.under_way:
            raise SherdError(f"rank {self.comm.rank}: step() inside full_parameters; leave it first")
        if not self.rounds.window.advance():
            return False
        self.rounds.settle()
        if not self.rounds.finite and self._options.nonfinite != "allow":
            self._refuse_step()
            return False
        if self._options.clip_norm is not None:
            self.rounds.clip(self._options.clip_norm)
        return True

    @contextmanager
    def updating(self) -> Iterator[list[bool]]:
        """Parameters may be updated by their owners inside; gives which of them have a gradient."""
        self._guard.check()
        with labelled(f"step {self.steps}"):
            self.store.acquire()
            yield self.rounds.access.used
            self.store.publish()
        self._guard.accept()
        self.rounds.number += 1

    def _refuse_step(self) -> None:
        self.skipped += 1
        text = (
            f"step {self.steps}: the gradient is not finite on some rank, so no rank takes the step "
            f"({self.skipped} skipped so far)"
        )
        observe.emit("warning", text=text)
        if self._options.nonfinite == "raise":
            raise SherdError(f'rank {self.comm.rank}: {text}; nonfinite="skip" would go on, "allow" would apply it')
        if self.comm.rank == 0:
            log.warning("%s", text)
