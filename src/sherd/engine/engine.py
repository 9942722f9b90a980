"""The engine: the way of a gradient, from autograd's hook to the next forward.

    hook -> collector -> gradients (ring, communicator) -> sums -> optimizer shard -> parameter store

The engine never asks which strategy made its choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sherd import observe
from sherd.comm import Communicator, labelled
from sherd.config import StepOptions
from sherd.engine import backward
from sherd.engine.choices import AccumulateAt, Choices, Gradients, Parameters
from sherd.engine.collector import Collector
from sherd.engine.editing import Editing
from sherd.engine.edits import EditGuard
from sherd.engine.grad_access import GatheredGrads, GradAccess, NativeGrads
from sherd.engine.gradients import ReplicatedGradients, RingGradients, WholeGradients
from sherd.engine.inventory import Inventory
from sherd.engine.layout import ShardLayout
from sherd.engine.norms import BlockNorms
from sherd.engine.parameter import raw_grad, set_raw_grad
from sherd.engine.stores import HostStore, ParameterStore, PrivateStore, ReplicaStore
from sherd.engine.window import Weights, Window
from sherd.errors import SherdError

log = logging.getLogger("sherd")

_STORES: dict[Parameters, type[ParameterStore]] = {
    Parameters.REPLICAS: ReplicaStore,
    Parameters.PRIVATE: PrivateStore,
    Parameters.HOST: HostStore,
}
_GRADIENTS: dict[Gradients, type[RingGradients]] = {
    Gradients.REPLICAS: ReplicatedGradients,
    Gradients.WHOLE: WholeGradients,
    Gradients.SLICES: RingGradients,
}


class Engine:
    """Training of one model on one rank."""

    def __init__(self, comm: Communicator, inventory: Inventory, choices: Choices, options: StepOptions) -> None:
        self.comm = comm
        self.inventory = inventory
        self.choices = choices
        self.options = options
        self.window = Window(options.accumulate)
        self.skipped = 0
        self.steps = 0
        self._weights = Weights(options.loss_reduction, options.accumulate)
        self._factor = 1.0
        self._holding = False
        self._touched = False
        self._finite = True
        self._learned = False
        self._arrivals: list[int] = []
        self.layout = inventory.layout(comm.world, comm.tree.group, options.bucket_bytes)
        self.store = _STORES[choices.parameters](comm, self.layout, inventory.trainable, inventory.frozen)
        self._build(self.layout)
        self.store.from_leader(inventory.buffers)
        self.guard = EditGuard(inventory, self.store, comm.rank, checksums=options.check == "edits")
        self.editing = Editing(comm, inventory, self.store, self.guard)
        for entry, parameter in enumerate(inventory.trainable):
            parameter.register_post_accumulate_grad_hook(self._hook(entry))  # type: ignore[no-untyped-call]
        backward.listen(self)

    def _build(self, layout: ShardLayout, memory: dict[str, Tensor] | None = None) -> None:
        """Make what depends on the layout."""
        self.layout = layout
        self._norms = BlockNorms(layout)
        self._stale: set[int] = set()  # buckets whose norms were not taken since they changed
        self.gradients = self._new_gradients(layout, memory)
        self._collector = Collector(layout, self.gradients)
        trainable, names = self.inventory.trainable, self.inventory.names
        self.access: GradAccess
        if isinstance(self.gradients, ReplicatedGradients):
            self.access = NativeGrads(self.gradients, trainable, names)
        else:
            self.access = GatheredGrads(self.comm, self.gradients, trainable, names, lambda: self.complete)

    def _new_gradients(self, layout: ShardLayout, memory: dict[str, Tensor] | None) -> RingGradients:
        kind = self.choices.gradients
        if kind is Gradients.SLICES and self._keeps_local:
            kind = Gradients.WHOLE
        numel = self.inventory.bucket_numel(self.options.bucket_bytes)
        return _GRADIENTS[kind](self.comm, layout, slot_numel=numel, on_sum=self._measure, memory=memory)

    @property
    def _keeps_local(self) -> bool:
        return self.choices.accumulate_at is AccumulateAt.RANK

    # ---------------------------------------------------------------- rounds

    @property
    def complete(self) -> bool:
        """Whether the gradient may be seen: inside a window there is none yet, as there is no step yet."""
        return self.window.last

    def _reduces(self) -> bool:
        """Whether contributions of this round are reduced at once."""
        return not self._keeps_local or (self.window.last and not self._holding)

    def _hook(self, entry: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = raw_grad(parameter)
            if gradient is not None:
                set_raw_grad(parameter, None)
                self._arrive(entry, gradient)

        return take

    def _arrive(self, entry: int, gradient: Tensor) -> None:
        if not self._touched:
            self._touched = True
            self._factor = self._weights.enter()
            self._collector.start()
        if self._factor == 0.0:
            gradient = torch.zeros_like(gradient)  # NaN times zero is NaN, and padding is allowed to have a loss of NaN
        self._collector.arrive(entry, gradient, self._factor, self._weights.op if self._reduces() else None)

    def begin_round(self) -> None:
        self.access.hide()

    def end_round(self) -> None:
        if not self._touched:
            self._show()
            return
        self._touched = False
        if self._reduces():
            self._reduce_rest()
        self._show()

    def abandon_round(self, error: BaseException) -> None:
        if self._touched:
            self._touched = False
            self._broken = error

    def _reduce_rest(self) -> None:
        """Reduce what was not reduced during the backward, and agree with the other ranks on what there is."""
        op = self._weights.op
        with labelled(f"the end of the backward of step {self.steps}"):
            self._collector.flush(op)
            self.gradients.settle()
            late = self._agree(self._collector.late_buckets())
            if any(late):
                self._collector.launch_late(late, op)
                self.gradients.settle()
                self._agree([False] * len(late))
            if not self._learned:
                self._learn()

    def _agree(self, late: Sequence[bool]) -> list[bool]:
        """Sum up over the ranks: who found what is not finite, what they weighed, what is late, what was used."""
        weights = self._weights
        head = [float(not self._norms.finite()), weights.local, float(bool(weights.weighed))]
        mine = torch.tensor([*head, *map(float, late), *map(float, self._collector.used)], dtype=torch.float64)
        with self.comm.counters.agreeing():
            total = self.comm.all_reduce(mine).wait().tolist()
        self._finite = total[0] == 0
        weights.agreed(total[1], total[2], self.comm.world)
        self.access.used = [
            old or count > 0 for old, count in zip(self.access.used, total[3 + len(late) :], strict=True)
        ]
        return [count > 0 for count in total[3 : 3 + len(late)]]

    def _learn(self) -> None:
        """Fix the order of launches to that in which rank 0 completed its buckets."""
        completed = self._collector.completed
        rest = [bucket for bucket in self._collector.order if bucket not in completed]
        with self.comm.counters.agreeing():
            self._collector.order, self._arrivals = self.comm.broadcast_object(
                ([*completed, *rest], self._collector.arrivals)
            )
        self._learned = True

    def _repack(self) -> None:
        """Pack buckets in the order in which gradients arrive, where nobody's slices depend on the packing."""
        arrivals, self._arrivals = self._arrivals, []
        if not isinstance(self.gradients, ReplicatedGradients):
            return
        order = [*arrivals, *(entry for entry in reversed(range(len(self.layout.entries))) if entry not in arrivals)]
        layout = self.inventory.layout(self.comm.world, self.comm.tree.group, self.options.bucket_bytes, order)
        if self.gradients.fits(layout):
            self._build(layout, self.gradients.memory)

    def _measure(self, bucket: int) -> None:
        self._norms.measure(bucket, self.gradients.slices[bucket])
        self._stale.discard(bucket)

    def _show(self) -> None:
        if self.complete:
            self.access.show()

    # ---------------------------------------------------------------- the gradient

    def settle(self) -> None:
        """Make the gradient whole: nothing is local any more, nothing under way, and weights are divided out."""
        if any(self.gradients.local(bucket) for bucket in range(len(self.layout.buckets))):
            self._collector.start()
            self._reduce_rest()
            self._show()
        self._stale.update(self.access.collect())
        divisor = self._weights.divisor()
        if divisor != 1.0:
            self._scale(1.0 / divisor)

    def norm(self) -> float:
        """The 2-norm of the gradient, the same bits on every rank and under every strategy. Collective."""
        self.settle()
        for bucket in sorted(self._stale):
            self._measure(bucket)
        with labelled(f"the gradient norm of step {self.steps}"):
            return self._norms.total(self.comm)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient so that its norm is at most `max_norm`; the norm it had. Collective."""
        norm = self.norm()
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            self._scale(factor)
        return norm

    def _scale(self, factor: float) -> None:
        for bucket, summed in enumerate(self.gradients.summed):
            if summed:
                self.gradients.sums[bucket].mul_(factor)
                self._stale.add(bucket)

    def weigh(self, weight: float) -> None:
        """Give the next backward a weight."""
        self._weights.set(weight)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backwards inside are not the last of their step."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def forget(self, keep_zeros: bool = False) -> None:
        """Drop the gradient, as `zero_grad()` does after a real step; nothing is dropped inside a window.

        With `keep_zeros` it becomes zero instead, so that parameters without a new one are updated all the same.
        """
        if self.window.open:
            return
        if keep_zeros:
            self._scale(0.0)
            return
        self.gradients.forget()
        self._collector.forget()
        self._weights.forget()
        self.access.forget()
        self._norms.forget()
        self._stale.clear()
        self._finite = True
        if self._arrivals:
            self._repack()

    # ---------------------------------------------------------------- the step

    def prepare_step(self) -> bool:
        """Whether this `step()` is a real one and its gradient is fit for it. Collective if it is real."""
        if not self.window.advance():
            return False
        self.settle()
        if not self._finite and self.options.nonfinite != "allow":
            self._refuse_step()
            return False
        if self.options.clip_norm is not None:
            self.clip(self.options.clip_norm)
        return True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Parameters may be updated by their owners inside."""
        if self.editing.under_way:
            raise SherdError(f"rank {self.comm.rank}: step() inside full_parameters; leave it first")
        self.guard.check()
        with labelled(f"step {self.steps}"):
            self.store.acquire()
            yield
            self.store.publish()
        self.guard.accept()
        self.steps += 1

    def _refuse_step(self) -> None:
        self.skipped += 1
        text = (
            f"step {self.steps}: the gradient is not finite on some rank, so no rank takes the step "
            f"({self.skipped} skipped so far)"
        )
        observe.emit("warning", text=text)
        if self.options.nonfinite == "raise":
            raise SherdError(f'rank {self.comm.rank}: {text}; nonfinite="skip" would go on, "allow" would apply it')
        if self.comm.rank == 0:
            log.warning("%s", text)
