"""The engine: the way of a gradient, from autograd's hook to the next forward.

    hook -> collector -> gradients (ring, communicator) -> sums -> optimizer shard -> parameter store

`rounds` has the way to the sums, `stores` where parameters live; here they meet in a step. The engine never asks which
strategy made its choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from sherd import observe
from sherd.comm import Communicator, labelled
from sherd.config import StepOptions
from sherd.engine.buffers import BufferSync
from sherd.engine.choices import Choices, Parameters
from sherd.engine.editing import Editing
from sherd.engine.edits import EditGuard
from sherd.engine.gathered_store import GatheredStore
from sherd.engine.gradients import RingGradients
from sherd.engine.host_gathered_store import HostGatheredStore
from sherd.engine.host_store import HostStore
from sherd.engine.inventory import Inventory
from sherd.engine.mesh import Mesh
from sherd.engine.restore import tensors_as_they_are
from sherd.engine.rounds import Rounds
from sherd.engine.scaling import recorded
from sherd.engine.stores import ParameterStore, PrivateStore, ReplicaStore
from sherd.engine.torn import Torn
from sherd.engine.trained import Trained
from sherd.engine.watch import Watch
from sherd.errors import Diverged, SherdError
from sherd.layout.shard_layout import ShardLayout
from sherd.patches import backward

log = logging.getLogger("sherd")

_STORES: dict[Parameters, type[ParameterStore]] = {
    Parameters.REPLICAS: ReplicaStore,
    Parameters.PRIVATE: PrivateStore,
    Parameters.GATHERED: GatheredStore,
    Parameters.GATHERED_BY_HOST: HostGatheredStore,
    Parameters.HOST: HostStore,
}


@dataclass
class Update:
    """One update of the parameters."""

    used: list[bool]
    """by entry: whether it has a gradient on any rank"""
    begun: bool = True
    """whether something may have been changed, beyond what can be seen of the parameters"""


class Engine:
    """Training of one model on one rank. It has the parameters from `take_over` on.

    `undo` gets what puts the model back as it was, for whoever does not come so far.
    """

    def __init__(
        self,
        comm: Communicator,
        inventory: Inventory,
        choices: Choices,
        options: StepOptions,
        optimizer: Optimizer | None,
        undo: ExitStack,
    ) -> None:
        self.comm = comm
        self.inventory = inventory
        self.choices = choices
        self.skipped = 0
        self._options = options
        self.trained = Trained(inventory, comm.world, comm.tree.group, options.bucket_bytes)
        self.mesh = Mesh.cut(comm, choices.shard_over)
        undo.callback(self.mesh.close)
        undo.callback(tensors_as_they_are((*inventory.parameters, *inventory.buffers)))
        self.store = _STORES[choices.parameters](self.mesh, self.trained)
        self._guard = EditGuard(comm, inventory, self.store, checksums=options.check == "edits")
        self._torn = Torn(inventory, comm.rank, optimizer is not None)
        watch = Watch(comm, inventory, self._guard, self._torn, optimizer)
        self.rounds = Rounds(comm, self.trained, choices, options, watch, unfreeze=self._unfreeze)
        undo.callback(backward.forget, self.rounds)
        self.editing = Editing(inventory, self.store, self._guard)
        self.on_growth: list[Callable[[], None]] = []
        """Called when parameters were unfrozen, which are then behind the others in `trained`."""

    def take_over(self) -> None:
        """Move the parameters to where they are to live, with rank 0's values. Collective."""
        self.store.take_over()
        self.store.from_leader(self.inventory.buffers)
        self._guard.accept()
        self._buffers = BufferSync(self.comm, self.inventory, self._options.sync_buffers)
        backward.install(recorded)
        backward.listen(self.rounds)

    @property
    def layout(self) -> ShardLayout:
        """The layout of the parameters that are trained."""
        return self.trained.layout

    @property
    def gradients(self) -> RingGradients:
        """Where gradients are kept."""
        return self.rounds.gradients

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self.rounds.number

    def accept_edits(self) -> bool:
        """What was done to the parameters is an update of their optimizer's; whether anything was."""
        touched = self._guard.touched()
        self._guard.accept()
        return touched

    def prepare_step(self) -> bool:
        """Whether this `step()` is a real one and its gradient is fit for it. Collective if it is real."""
        self.refuse_torn("step()")
        if self.editing.under_way:
            raise SherdError(f"rank {self.comm.rank}: step() inside full_parameters; leave it first")
        if not self.rounds.window.advance():
            return False
        self._guard.check_kinds()  # first: gradients would have to fit too
        self.rounds.settle()
        self._buffers.sync(self.steps)
        if not self.rounds.finite and self._options.nonfinite != "allow":
            self._refuse_step()
            return False
        if self._options.clip_norm is not None:
            self.rounds.clip(self._options.clip_norm)
        return True

    @contextmanager
    def updating(self) -> Iterator[Update]:
        """Parameters may be updated by their owners inside."""
        self._guard.check()
        with labelled(f"step {self.steps}"):
            if self._guard.compares:  # which also waits until nobody reads what is about to be updated
                self._guard.compare_if_any(f"before the update of step {self.steps}")
            self.store.acquire()
            update = Update(self.rounds.access.used)
            try:
                yield update
                self.store.publish()
            except BaseException as error:
                if update.begun or self._guard.touched():
                    self._torn.tear(self.steps, error)
                raise
        self._guard.accept()
        self.rounds.number += 1

    def refuse_torn(self, what: str) -> None:
        """Raise if `what` would use what an update has left half done."""
        self._torn.refuse(what)

    def loaded(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters were loaded on all ranks."""
        if self._torn.loaded(parameters):
            self.rounds.restart()

    def loaded_optimizer(self) -> None:
        """The optimizer's state was loaded."""
        if self._torn.loaded_optimizer():
            self.rounds.restart()

    def _unfreeze(self, indices: list[int]) -> None:
        """Train parameters that were frozen until now. Collective."""
        names = [self.inventory.names[index] for index in indices]
        with labelled(f"unfreezing {', '.join(names)} before step {self.steps}"):
            everybody, rank = self.comm.compare_object(names)
        if rank:
            only = sorted(set(everybody[rank]) ^ set(everybody[0]))
            raise Diverged(
                f"before step {self.steps} rank 0 and rank {rank} unfroze different parameters: {only} on one of them "
                f"only; set requires_grad alike on every rank",
                ranks=(0, rank),
            )
        self.trained.grow(indices)
        self.store.grow(indices)
        self.rounds.grow()
        for follow in self.on_growth:
            follow()

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
