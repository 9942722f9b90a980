"""The engine: the way of a gradient, from autograd's hook to the next forward.

    hook -> round -> bucket -> ring -> communicator -> sum -> optimizer -> parameter store

`begin_round`, `arrive` and `end_round` are a backward; `prepare_step` and `updating` are a step. Everything that they
need was put together by `assembly`; the engine never asks which strategy chose it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from sherd import observe
from sherd.comm import Communicator, labelled
from sherd.config import StepOptions
from sherd.engine.buckets.bucket import Bucket, Local
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.exchange import Exchange
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.ring import Reductions
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.consistency.agreement import agree, agree_on_edits, apply, report
from sherd.engine.consistency.settings import compare_optimizers, compare_unfrozen
from sherd.engine.consistency.torn import Torn
from sherd.engine.consistency.unchanged import Unchanged
from sherd.engine.gradients import round
from sherd.engine.gradients.access import GradAccess
from sherd.engine.gradients.gradient import Gradient, LossWeights, Window
from sherd.engine.gradients.round import Round
from sherd.engine.modules.buffers import BufferSync
from sherd.engine.optimizer.shard import OptimizerShard
from sherd.engine.optimizer.whole import WholeOptimizer
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.engine.parameters.mesh import Mesh
from sherd.engine.parameters.store import ParameterStore
from sherd.errors import ConfigError, SherdError
from sherd.layout.shard_layout import ShardLayout
from sherd.patches import backward

log = logging.getLogger("sherd")

_ALIKE = "Set and edit p.grad alike on every rank"


class State(enum.Enum):
    """What the engine is in the middle of."""

    READY = "ready"
    UPDATING = "in an update"
    BROKEN = "broken"
    """an update failed in the middle, and nothing may use what it left behind (see `torn`)"""


_MOVES = {
    State.READY: (State.UPDATING,),
    State.UPDATING: (State.READY, State.BROKEN),
    State.BROKEN: (State.READY,),
}


@dataclass(frozen=True)
class Parts:
    """What an engine is made of, as its strategy chose."""

    mesh: Mesh
    buckets: BucketList
    store: ParameterStore
    exchange: Exchange
    access: GradAccess
    window: Window
    adds_up_here: bool
    """whether the gradients of several backwards are added up on the rank that made them"""


@dataclass
class Update:
    """One update of the parameters."""

    begun: bool = True
    """whether something may have been changed, beyond what can be seen of the parameters"""


class Engine:
    """Training of one model on one rank."""

    updater: WholeOptimizer | OptimizerShard | None = None

    def __init__(
        self,
        comm: Communicator,
        inventory: Inventory,
        options: StepOptions,
        optimizer: Optimizer | None,
        parts: Parts,
    ) -> None:
        self.comm = comm
        self.inventory = inventory
        self.mesh = parts.mesh
        self.store = parts.store
        self.exchange = parts.exchange
        self.access = parts.access
        self.window = parts.window
        self.buckets = parts.buckets
        self.weights = LossWeights(options.loss_reduction, options.accumulate)
        self.gradient = Gradient(self.weights)
        self.reductions = Reductions(comm, parts.exchange, inventory.device)
        self.round = Round(comm.rank, self.reductions)
        self.unchanged = Unchanged(comm, inventory, parts.store, checksums=options.check == "edits")
        self.torn = Torn(inventory, comm.rank, optimizer is not None)
        self.state = State.READY
        self.steps = 0
        """How many steps were taken."""
        self.skipped = 0
        self.modules_communicate = False
        """Whether modules exchange something of their own during a backward. Where ranks use different parameters,
        buckets would be launched between different ones of these exchanges: they then wait for the end."""
        self._options = options
        self._optimizer = optimizer
        self._adds_up_here = parts.adds_up_here
        self._uniform = False  # whether every rank used every parameter in the last round
        # Where ranks do not each have a copy, they compare what was edited before every update.
        self._looks_in_backward = not parts.store.compares_edits
        self._learned = False  # whether the launch order is that of rank 0's gradients
        self._train(self.buckets.parameters)

    def move(self, to: State) -> None:
        """Become `to`."""
        if to not in _MOVES[self.state]:
            raise SherdError(f"rank {self.comm.rank}: the engine is {self.state.value} and cannot be {to.value}")
        self.state = to

    def take_over(self) -> None:
        """Move the parameters to where they are to live, with rank 0's values. Collective."""
        self.store.take_over()
        self.store.from_leader(self.inventory.buffers)
        self.unchanged.accept()
        self.buffers = BufferSync(self.comm, self.inventory, self._options.sync_buffers)
        backward.install()
        backward.listen(self)

    @property
    def layout(self) -> ShardLayout:
        """The layout of the parameters that are trained."""
        return self.buckets.layout

    # ---------------------------------------------------------------- a backward

    def begin_round(self) -> None:
        """An outermost backward begins, of this model or of another."""
        if self.round.state is round.State.FAILED:
            return  # other models of this process may go on
        self._unfreeze_if_asked()
        self.access.hide(self.buckets, self.window.whole)  # autograd must find nothing to add to
        if not self.window.open and not any(member.used or member.used_here for member in self.buckets.parameters):
            self.gradient.restart(self.buckets)  # the program dropped all of it: model.zero_grad()
        self.round.move(round.State.OPEN)

    def arrive(self, member: TrackedParameter, gradient: Tensor) -> None:
        """Take a gradient that autograd made, if it is the first of a round or not a usual one."""
        if self.round.state is not round.State.COLLECTING:
            self._begin_collecting()
        if gradient.dtype is not member.bucket.dtype or gradient.shape != member.entry.shape:
            self.unchanged.check_kinds()
        self.round.arrive(member, gradient)

    def _begin_collecting(self) -> None:
        """The first gradient of a round is here."""
        self.round.refuse_failed()
        if not backward.under_way():
            raise SherdError(
                f"rank {self.comm.rank}: this backward was not started by loss.backward() or torch.autograd.backward, "
                f"so its end would go unnoticed; call one of these"
            )
        if self.state is State.BROKEN:
            self.torn.refuse("this backward")
        if self._looks_in_backward:
            self.unchanged.check()
        round.refuse_other_hooks(self.inventory.members, self.comm.rank)
        self.gradient.add(self.buckets)
        factor = self.weights.enter()
        self.gradient.backwards += 1
        self.window.backward()
        at_once = self._reduces and (self._uniform or not self.modules_communicate)
        self.round.collect(
            self.buckets, factor, self.weights.op if at_once else None, f"a backward of step {self.steps}"
        )

    @property
    def _reduces(self) -> bool:
        """Whether contributions of this round are reduced in it."""
        return not self._adds_up_here or (self.window.last and not self.window.holding)

    def end_round(self) -> None:
        """It is over; every gradient hook has been called."""
        if self.round.state is round.State.COLLECTING:
            if self._reduces:
                self._flush()
            if self.window.whole and not self.window.holding:
                self.gradient.divide(self.buckets)
        self.round.close()
        self._show()

    def abandon_round(self, error: BaseException) -> None:
        """It failed."""
        self.round.fail(error)
        self._show()

    def _flush(self) -> None:
        """Reduce what was not reduced yet, and agree with the other ranks on what there is. Collective."""
        try:
            self.gradient.add(self.buckets)  # on a rank without a gradient in this round too
            op = self.weights.op
            with labelled(f"the end of a backward of step {self.steps}"):
                self.round.flush(self.buckets, op)
                if late := self._agree(self.round.late(self.buckets.buckets)):
                    self.round.flush_late(late, op)
                    self._agree()
                if not self._learned:
                    self._learn()
        except BaseException as error:
            self.round.fail(error)
            raise

    def _agree(self, late: Iterable[Bucket] = ()) -> list[Bucket]:
        """Tell the other ranks how it went here, and take over how it went everywhere; gives what is late."""
        # Where each has a copy of its own, a model that was distributed without its optimizer is edited by it in every
        # step, and nothing has to be compared.
        edited = bool(self.unchanged.edits) and (self._optimizer is not None or self.unchanged.compares)
        mine = report(self.buckets, self.gradient, self.steps, self._optimizer, edited, late)
        agreed = agree(self.comm, mine, self.buckets)
        if not agreed.same_settings and self._optimizer is not None:
            compare_optimizers(self.comm, self._optimizer, self.inventory.members, self.steps)
        if agreed.edited:
            with labelled(f"what was done to parameters before step {self.steps}"):
                self.unchanged.compare(f"before step {self.steps}")
        self._uniform = agreed.uniform
        apply(agreed, self.buckets, self.gradient, self.comm.world)
        return [bucket for bucket, is_late in zip(self.buckets.buckets, agreed.late, strict=True) if is_late]

    def _learn(self) -> None:
        """Launch buckets from now on in the order in which rank 0 completed them."""
        places = {bucket: place for place, bucket in enumerate(self.buckets.buckets)}
        completed = [*self.round.completed]
        order = [*completed, *(bucket for bucket in self.buckets.launch_order if bucket not in completed)]
        with self.comm.counters.agreeing():
            learned = self.comm.broadcast_object([places[bucket] for bucket in order])
        self.buckets = self.buckets.launched_in(learned)
        self._learned = True

    def _show(self) -> None:
        if self.window.whole:
            self.access.show(self.buckets)

    # ---------------------------------------------------------------- the gradient between backward and step

    def settle(self) -> None:
        """Make the gradient whole: nothing is local any more, nothing under way, and weights are divided out."""
        self.round.refuse_failed()
        self.access.collect(self.buckets)
        shown = self.access.shown
        if not self.gradient.backwards:
            shown = False
            # A rank that skipped a backward would otherwise go on without the others.
            with labelled(f"step {self.steps} without a backward"):
                self._agree()
        edited = [bucket for bucket in self.buckets.buckets if bucket.edited]
        if any(bucket.local is not Local.NONE for bucket in self.buckets.buckets):
            shown = False
            self._flush()
            self.round.close()
        if not shown:
            self._show()
        if edited or self.access.assigned:  # those that were set before a backward were measured in it
            for bucket in edited:
                bucket.measure()
            with labelled(f"what was done to p.grad before step {self.steps}", _ALIKE):
                self.gradient.finite = agree_on_edits(
                    self.comm, self.buckets, self.access.seen, self.access.assigned, self.steps
                )
            self.access.seen, self.access.assigned = 0, []
        if self.weights.pointless:
            raise ConfigError("every weight of this step was 0, so its gradient has no mean; skip the step")
        self.gradient.divide(self.buckets)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient so that its 2-norm is at most `max_norm`; the norm it had. Collective."""
        self.settle()
        with labelled(f"the gradient norm of step {self.steps}"):
            return self.gradient.clip(self.buckets, max_norm, self.comm, self.access.suspects(self.buckets))

    def forget(self, keep_zeros: bool = False) -> None:
        """Drop the gradient, as `zero_grad()` does after a real step; nothing is dropped inside a window.

        With `keep_zeros` it becomes zero instead, so that parameters without a new one are updated all the same.
        """
        if self.window.open:
            return
        self.weights.forget()
        if keep_zeros:
            self.access.collect(self.buckets)  # a gradient that the program set counts too
        if keep_zeros and any(member.used or member.used_here for member in self.buckets.parameters):
            self.settle()
            for bucket in self.buckets.buckets:
                if bucket.summed:
                    bucket.sum.zero_()  # zero times NaN is NaN
        else:
            for bucket in self.buckets.buckets:
                bucket.forget()
            self.access.forget(self.buckets)
        self.gradient.restart(self.buckets)  # after settle(), which measures what was done to p.grad
        self.gradient.finite = True

    def restart(self) -> None:
        """Begin anew, with no gradient and at the beginning of a window."""
        self.move(State.READY)
        self.window.restart()
        self.forget()

    # ---------------------------------------------------------------- a step

    def prepare_step(self) -> bool:
        """Whether this `step()` is a real one and its gradient is fit for it. Collective if it is real."""
        self.torn.refuse("step()")
        if self.unchanged.lent:
            raise SherdError(f"rank {self.comm.rank}: step() inside full_parameters; leave it first")
        if not self.window.advance():
            return False
        self.unchanged.check_kinds(closely=False)  # first: gradients would have to fit too
        self.settle()
        self.buffers.sync(self.steps)
        if not self.gradient.finite and self._options.nonfinite != "allow":
            self._skip()
            return False
        if self._options.clip_norm is not None:
            self.clip(self._options.clip_norm)
        return True

    @contextmanager
    def updating(self) -> Iterator[Update]:
        """Parameters may be updated by their owners inside."""
        self.unchanged.check()
        with labelled(f"step {self.steps}"):
            if self.unchanged.compares:  # this also waits until no rank reads what is about to be updated
                self.unchanged.compare_if_any(f"before the update of step {self.steps}")
            self.store.acquire(self.buckets.buckets)
            self.move(State.UPDATING)
            update = Update()
            try:
                yield update
                self.store.publish(self.buckets.buckets)
            except BaseException as error:
                self.store.abandon()
                torn = update.begun or self.unchanged.touched()
                self.move(State.BROKEN if torn else State.READY)
                if torn:
                    self.torn.tear(self.steps, error)
                raise
            self.move(State.READY)
        self.unchanged.accept()
        self.steps += 1

    def accept_edits(self) -> bool:
        """What was done to the parameters is an update of their optimizer's; whether anything was."""
        touched = self.unchanged.touched()
        self.unchanged.accept()
        return touched

    def _skip(self) -> None:
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

    # ---------------------------------------------------------------- what changes between steps

    def loaded(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters were loaded on all ranks."""
        if self.torn.loaded(parameters):
            self.restart()

    def loaded_optimizer(self) -> None:
        """The optimizer's state was loaded."""
        if self.torn.loaded_optimizer():
            self.restart()

    def _unfreeze_if_asked(self) -> None:
        """Train parameters that were frozen until now. Collective if there are such."""
        with bypass_torch_function():
            found = {m for bucket in self.buckets.frozen for m in bucket.members if m.parameter.requires_grad}
        if not found or self.comm.closed:  # this backward may be that of another model
            return
        members = [member for member in self.inventory.members if member in found]
        compare_unfrozen(self.comm, members, self.steps)
        self.buckets = self.buckets.unfrozen(members)
        self._train(members)
        self._learned = False
        if self.updater is not None:
            self.updater.follow(self.buckets)

    def _train(self, members: Iterable[TrackedParameter]) -> None:
        """Make room for the gradients of these parameters, and take them from autograd."""
        members = list(members)
        theirs = {member.bucket for member in members}
        self.exchange.take([bucket for bucket in self.buckets.buckets if bucket in theirs])
        self.reductions.fit(self.buckets.buckets)
        self.access.follow(members)
        for member in members:
            round.hook(member, self.comm.rank, self)

    def gradient_bytes(self) -> dict[str, int]:
        """What this rank allocated for gradients, by kind."""
        more = sum(bucket.more_bytes for bucket in self.buckets.buckets)
        return {"gradients": self.exchange.nbytes + more, "buckets": self.reductions.ring.nbytes}
