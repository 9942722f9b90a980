"""Rounds: what happens to gradients from autograd's hook to the sum that all ranks agree on.

A *round* is one outermost backward. During it buckets are reduced as they become complete; at its end the rest is, and
ranks agree on what none of them knows alone: which parameters were used anywhere, whether every sum is finite, what
the contributions weighed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.config import StepOptions
from sherd.engine.agreement import Report, agree, agree_on_edits
from sherd.engine.apart import bypass_torch_function
from sherd.engine.choices import AccumulateAt, Choices, Gradients
from sherd.engine.collector import Collector
from sherd.engine.grad_access import GatheredGrads, GradAccess, NativeGrads
from sherd.engine.gradients import RingGradients
from sherd.engine.intake import Intake
from sherd.engine.measured import Measured
from sherd.engine.trained import Trained
from sherd.engine.watch import Watch
from sherd.engine.whole_gradients import ReplicatedGradients, WholeGradients
from sherd.engine.window import Weights, Window
from sherd.errors import ConfigError, SherdError
from sherd.layout.entry import dtype_name
from sherd.layout.shard_layout import ShardLayout
from sherd.patches import backward

_KINDS: dict[Gradients, type[RingGradients]] = {
    Gradients.REPLICAS: ReplicatedGradients,
    Gradients.WHOLE: WholeGradients,
    Gradients.SLICES: RingGradients,
}


class Rounds:
    """The gradients of one model on one rank. `unfreeze` is called with parameters that are to be trained too."""

    def __init__(
        self,
        comm: Communicator,
        trained: Trained,
        choices: Choices,
        options: StepOptions,
        watch: Watch,
        unfreeze: Callable[[list[int]], None],
    ) -> None:
        self.window = Window(options.accumulate)
        self.number = 0
        """Counts real steps; for messages."""
        self.finite = True
        self._comm = comm
        self._trained = trained
        self._frozen = trained.frozen
        self._choices = choices
        self._options = options
        self._weights = Weights(options.loss_reduction, options.accumulate)
        self._factor = 1.0
        self.careful = False
        """Whether modules exchange something of their own during a backward. Where ranks use different parameters,
        buckets would be launched between different ones of these exchanges: they then wait for the end."""
        self._uniform = False  # whether every rank used every parameter in the last round
        self._holding = False
        self._touched = False
        self._backwards = 0  # in the gradient
        self._learned = False
        self._arrivals: list[int] = []
        self._broken: BaseException | None = None
        self._watch = watch
        self._unfreeze = unfreeze
        self._build()
        self._intake = Intake(trained, comm.rank, self.arrive)

    @property
    def layout(self) -> ShardLayout:
        """The layout of the parameters that are trained."""
        return self._trained.layout

    def _build(self, memory: dict[str, Tensor] | None = None) -> None:
        """Make what depends on the layout."""
        comm, trained, layout = self._comm, self._trained, self.layout

        def make(on_sum: Callable[[int], None]) -> RingGradients:
            kind, numel, device = _KINDS[self._choices.gradients], trained.bucket_numel, trained.inventory.device
            return kind(comm, layout, slot_numel=numel, on_sum=on_sum, device=device, memory=memory)

        self._measured = Measured(layout, make)
        self._collector = Collector(layout, self.gradients)
        self.access: GradAccess
        if isinstance(self.gradients, ReplicatedGradients):
            self.access = NativeGrads(self.gradients, trained)
        else:
            self.access = GatheredGrads(comm, self.gradients, trained, lambda: self.complete)

    @property
    def gradients(self) -> RingGradients:
        """Where gradients are kept."""
        return self._measured.gradients

    def grow(self) -> None:
        """Take the parameters that are trained since, between two rounds."""
        self._measured.grow(self.layout)
        self._collector.grow(self.layout)
        self.access.grow()
        self._intake.grow()
        self._frozen = self._trained.frozen
        self._learned = False

    @property
    def _keeps_local(self) -> bool:
        return self._choices.accumulate_at is AccumulateAt.RANK

    @property
    def complete(self) -> bool:
        """Whether the gradient may be seen: inside a window there is none yet, as there is no step yet."""
        return self.window.complete

    # ---------------------------------------------------------------- a round

    def begin_round(self) -> None:
        parameters = self._trained.inventory.parameters
        with bypass_torch_function():
            unfrozen = [index for index in self._frozen if parameters[index].requires_grad]
        if unfrozen and not self._comm.closed:  # this backward may be that of another model
            self._unfreeze(unfrozen)
        self._measured.edited.update(self.access.hide())
        if not self.window.open and not any(self.access.used) and not any(self._collector.used):
            self._weights.forget()  # somebody dropped it all: model.zero_grad()
            self._measured.forget_norms()
            self._backwards = 0

    def arrive(self, entry: int, gradient: Tensor) -> None:
        """Take a gradient that autograd made."""
        if not self._touched:
            self._check_round()
            self._scale_back()
            self._factor = self._weights.enter()
            self._touched = True
            self._backwards += 1
            self.window.begin()
            self._collector.start()
            self._collector.label = f"a backward of step {self.number}"
        if self._factor == 0.0:
            gradient = torch.zeros_like(gradient)  # zero times NaN is NaN, and the loss of no tokens may well be NaN
        at_once = self._reduces and (self._uniform or not self.careful)
        self._collector.arrive(entry, gradient, self._factor, self._weights.op if at_once else None)

    def _check_round(self) -> None:
        """Refuse a round that cannot be right."""
        self._refuse_broken()  # here: other models of this process may go on
        if not backward.under_way():
            raise SherdError(
                f"rank {self._comm.rank}: this backward was not started by loss.backward() or torch.autograd.backward, "
                f"so its end would go unnoticed; call one of these"
            )
        self._watch.check()

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise SherdError(
                f"rank {self._comm.rank}: an earlier backward failed ({self._broken}) after gradients had been "
                f"exchanged, so the ranks no longer have the same; start again from a checkpoint"
            )

    @property
    def _reduces(self) -> bool:
        """Whether contributions of this round are reduced at once."""
        return not self._keeps_local or (self.window.last and not self._holding)

    def end_round(self) -> None:
        if self._touched:
            self._touched = False
            if self._reduces:
                self._reduce_rest()
            if self.complete and not self._holding:
                self._divide()
        self._show()

    def abandon_round(self, error: BaseException) -> None:
        if self._touched:
            self._touched = False
            self._broken = error if self._collector.launched else None
        self._show()

    def _reduce_rest(self) -> None:
        """Reduce what was not reduced during the backward, and agree with the other ranks on what there is."""
        try:
            self._reduce_and_agree()
        except BaseException as error:
            self._broken = error
            raise

    def _reduce_and_agree(self) -> None:
        op = self._weights.op
        self._scale_back()  # on a rank without a gradient in this round too
        with labelled(f"the end of a backward of step {self.number}"):
            self._collector.flush(op)
            self.gradients.settle()
            late = self._agree(self._collector.late())
            if any(late):
                self._collector.launch_late(late, op)
                self.gradients.settle()
                self._agree(self._collector.nothing_late())
            if not self._learned:
                self._learn()
                if any(late):
                    self._arrivals = []  # what is late depends on the packing: every strategy keeps its first one

    def _agree(self, late: Sequence[bool]) -> list[bool]:
        """Tell the other ranks how it went here, and take over how it went everywhere; gives what is late."""
        weights, collector = self._weights, self._collector
        with bypass_torch_function():
            trainable = [parameter.requires_grad for parameter in self._trained.parameters]
        report = Report(
            step=self.number,
            backwards=self._backwards,
            settings=self._watch.settings(),
            finite=self._measured.finite(),
            weight=weights.local,
            weighed=bool(weights.weighed),
            edited=self._watch.edited,
            late=late,
            used=collector.used,
            trainable=trainable,
        )
        agreed = agree(self._comm, report, self._trained.names)
        self._watch.agreed(agreed, self.number)
        self.finite = agreed.finite
        self._uniform = agreed.uniform
        weights.agreed(agreed.weight, agreed.weighing, self._comm.world)
        self.access.used = [before or used for before, used in zip(self.access.used, agreed.used, strict=True)]
        collector.forget()  # who drops a gradient now must not find it used again
        return agreed.late

    def _learn(self) -> None:
        """Launch buckets from now on in the order in which rank 0 completed them."""
        completed = self._collector.completed
        order = [*completed, *(bucket for bucket in self._collector.order if bucket not in completed)]
        with self._comm.counters.agreeing():
            self._collector.order, self._arrivals = self._comm.broadcast_object((order, self._collector.arrivals))
        self._learned = True

    def _repack(self) -> None:
        """Pack buckets in the order in which gradients arrive, where nobody's slices depend on the packing."""
        arrivals, self._arrivals = self._arrivals, []
        if not isinstance(self.gradients, ReplicatedGradients) or self._trained.grown:
            return
        order = [*arrivals, *(entry for entry in reversed(range(len(self.layout.entries))) if entry not in arrivals)]
        layout = self._trained.packed(order)
        if self.gradients.fits(layout):
            memory = {dtype_name(flat): flat for flat in self.gradients.memory}
            if self.gradients.held:
                memory = {dtype: torch.zeros_like(flat) for dtype, flat in memory.items()}
            for flat in memory.values():
                flat.zero_()  # what is padding now was a gradient before
            self._trained.layout = layout
            self._build(memory)

    def _show(self) -> None:
        if self.complete:
            self.access.show()

    # ---------------------------------------------------------------- the gradient

    def settle(self) -> None:
        """Make the gradient whole: nothing is local any more, nothing under way, and weights are divided out."""
        self._refuse_broken()
        changed = self._measured.edited.union(self.access.collect())
        if not self._backwards:
            # Nothing else would tell the other ranks, and one that has skipped a backward would go on by itself.
            with labelled(f"step {self.number} without a backward"):
                self._agree(self._collector.nothing_late())
        if any(self.gradients.local(bucket) for bucket in range(len(self.layout.buckets))):
            self._collector.start()
            self._reduce_rest()
        self._show()
        if changed:
            for bucket in sorted(changed):
                self._measured.measure(bucket)
            with labelled(f"what was done to p.grad before step {self.number}"):
                finite, seen, assigned = self._measured.finite(), self.access.seen, self.access.assigned
                self.finite = agree_on_edits(self._comm, finite, seen, assigned, self.number)
            self.access.seen, self.access.assigned = 0, []
        if self._weights.pointless:
            raise ConfigError("every weight of this step was 0, so its gradient has no mean; skip the step")
        self._divide()

    def _divide(self) -> None:
        divisor = self._weights.divisor()
        if divisor != 1.0:
            self._measured.scale(1.0 / divisor)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient so that its 2-norm is at most `max_norm`; the norm it had. Collective.

        The same bits on every rank, and under every strategy that accumulates at the same place.
        """
        self.settle()
        with labelled(f"the gradient norm of step {self.number}"):
            norm = self._measured.norm(self._comm, self.access.suspects())
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            self._measured.clip(factor)
        return norm

    @property
    def measured(self) -> Measured:
        """The norms of the gradient, as far as this rank owns it."""
        return self._measured

    def _scale_back(self) -> None:
        self._measured.keep_clipped()
        divided = self._weights.undivide()
        if divided != 1.0:
            self._measured.scale(divided)

    def weigh(self, weight: float) -> None:
        """Give the next backward a weight."""
        self._weights.set(weight)

    @property
    def weights(self) -> Weights:
        """How contributions count."""
        return self._weights

    @property
    def weight(self) -> float:
        """How much the backward under way counts on this rank, against those of the others."""
        return self._weights.current

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backwards inside are not the last of their step."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def restart(self) -> None:
        """Begin anew, with no gradient and at the beginning of a window."""
        self.window = Window(self.window.length)
        self.forget()

    def forget(self, keep_zeros: bool = False) -> None:
        """Drop the gradient, as `zero_grad()` does after a real step; nothing is dropped inside a window.

        With `keep_zeros` it becomes zero instead, so that parameters without a new one are updated all the same.
        """
        if self.window.open:
            return
        self._weights.forget()
        if keep_zeros and (any(self.access.used) or any(self._collector.used)):
            self.settle()
            self._measured.zero()
        else:
            self.gradients.forget()
            self._collector.forget()
            self.access.forget()
        self._backwards = 0
        self._measured.forget_norms()  # after settle(), which measures what was done to p.grad
        self.finite = True
        if self._arrivals and not any(self.access.used):
            self._repack()
