"""The engine: the way of a gradient, from autograd's hook to the next forward.

    hook -> round -> bucket -> ring -> communicator -> sum -> optimizer -> parameter store

`begin_round`, `arrive` and `end_round` are a backward; `prepare_step` and `updating` are a step. Everything that they
need was put together by `assembly`; the engine never asks which strategy chose it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sherd import observe
from sherd.comm import Communicator, SoloCommunicator, labelled
from sherd.config import StepOptions
from sherd.engine.buckets.bucket import Bucket, Local
from sherd.engine.buckets.bucket_list import BucketList, assign
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
from sherd.engine.gradients.gradient import Gradient, LossWeights, name_of
from sherd.engine.gradients.own import OwnGradients
from sherd.engine.gradients.round import Round
from sherd.engine.modules.buffers import BufferSync
from sherd.engine.optimizer.unsplit import Updater
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.engine.parameters.mesh import Mesh
from sherd.engine.parameters.store import ParameterStore
from sherd.engine.policy import ExchangePolicy, StepContext
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
    policy: ExchangePolicy
    store: ParameterStore
    exchange: Exchange
    access: GradAccess
    adds_up_here: bool
    """whether the gradients of several backwards are added up on the rank that made them"""


@dataclass
class Update:
    """One update of the parameters. `run` makes it, with a closure for optimizers that evaluate the loss again."""

    run: Callable[..., Any]
    begun: bool = True
    """whether something may have been changed, beyond what can be seen of the parameters"""


class Engine:
    """Training of one model on one rank."""

    def __init__(
        self,
        comm: Communicator,
        inventory: Inventory,
        options: StepOptions,
        optimizers: Sequence[Optimizer],
        parts: Parts,
    ) -> None:
        self.comm = comm
        self.inventory = inventory
        self.mesh = parts.mesh
        self.policy = parts.policy
        self.store = parts.store
        self.exchange = parts.exchange
        self.access = parts.access
        self.buckets = parts.buckets
        self.optimizers = tuple(optimizers)
        self.gradients = _gradients(self.optimizers, options)
        """One per optimizer; one of all parameters, if there is no optimizer."""
        self.shards: dict[Optimizer | None, Updater] = {}
        """What each optimizer steps."""
        self.own = OwnGradients(self.gradients)
        self.finite = True
        """Whether the gradient is finite on every rank."""
        self.accumulate = options.accumulate
        self.holding = False
        """Whether the user said that a backward is not the last of its step."""
        self.alone = SoloCommunicator(comm.options)
        self.measures = False
        """Whether norms are wanted even where nothing is clipped or checked."""
        self.reductions = Reductions(comm, parts.exchange, inventory.device)
        self.round = Round(comm.rank, self.reductions)
        self.unchanged = Unchanged(comm, inventory, parts.store, checksums=options.check == "edits")
        self.torn = Torn(inventory, comm.rank, optimizers)
        self.state = State.READY
        self.modules_communicate = False
        """Whether modules exchange something of their own during a backward. Where ranks use different parameters,
        buckets would be launched between different ones of these exchanges: they then wait for the end."""
        self._options = options
        self._stepped: set[Gradient] = set()  # by whose `step()` the gradient was made ready or used since a backward
        self._adds_up_here = parts.adds_up_here
        self._uniform = False  # whether every rank used every parameter in the last round
        # Where ranks do not each have a copy, they compare what was edited before every update.
        self._looks_in_backward = not parts.store.compares_edits
        self._learned = False  # whether the launch order is that of rank 0's gradients
        self._hooks: list[RemovableHandle] = []
        self.sums = False
        """Whether the current gradient is summed over the ranks."""
        self._follow_policy()

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
    def steps(self) -> int:
        """How many steps were taken, by the optimizer that took most."""
        return max(gradient.steps for gradient in self.gradients)

    @property
    def weights(self) -> LossWeights:
        """The weight of the current backward, which is the same in every gradient."""
        return self.gradients[0].weights

    @property
    def together(self) -> Communicator:
        """The ranks that decide together about this step's gradient."""
        return self.comm if self.sums else self.alone

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
        self._follow_policy()
        if not self.sums:
            self._stepped = set()
            self.own.begin(self.buckets)
            return
        filling = [bucket for gradient, its in self._parts() if not gradient.window.whole for bucket in its]
        self.access.hide(self.buckets, filling)  # autograd must find nothing to add to
        for gradient, its in self._parts():
            if not gradient.window.open and not _used(its):
                gradient.restart(its)  # the program dropped all of it: model.zero_grad()
        self.round.move(round.State.OPEN)

    def _parts(self) -> list[tuple[Gradient, tuple[Bucket, ...]]]:
        """Every gradient, with its buckets."""
        return [(gradient, self.buckets.of(gradient.optimizer)) for gradient in self.gradients]

    def arrive(self, member: TrackedParameter, gradient: Tensor) -> None:
        """Take a gradient that autograd made."""
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
        round.refuse_other_hooks(self.inventory.members, self.comm.rank)
        factor = 1.0
        self._stepped = set()
        for gradient, its in self._parts():
            gradient.add(its)
            factor = gradient.weights.enter()  # the same for all
            gradient.backwards += 1
            gradient.window.backward()
        at_once = self._reduces and (self._uniform or not self.modules_communicate)
        self.round.collect(self.buckets, factor, self._op if at_once else None, f"a backward of step {self.steps}")

    @property
    def _op(self) -> str:
        """The operation that reduces the ranks' contributions. One that was dropped may forget that it was weighed."""
        return next((each.weights.op for each in self.gradients if each.weights.weighed), self.gradients[0].weights.op)

    @property
    def _reduces(self) -> bool:
        """Whether contributions of this round are reduced in it."""
        return not self._adds_up_here or (any(each.window.last for each in self.gradients) and not self.holding)

    def end_round(self) -> None:
        """It is over; every gradient hook has been called."""
        if not self.sums:
            self.own.end()
            return
        if self.round.state is round.State.COLLECTING:
            if self._reduces:
                self._flush()
            for gradient, its in self._parts():
                if gradient.window.whole and not self.holding:
                    gradient.divide(its)
        self.round.close()
        self._show()

    def abandon_round(self, error: BaseException) -> None:
        """It failed."""
        if not self.sums:
            self.own.abandon()
            return
        self.round.fail(error)
        self._show()

    def _flush(self) -> None:
        """Reduce what was not reduced yet, and agree with the other ranks on what there is. Collective."""
        try:
            if self._looks_in_backward:  # not earlier: autograd still needed what a parameter was moved to
                self.unchanged.check()
            for gradient, its in self._parts():
                gradient.add(its)  # on a rank without a gradient in this round too
            op = self._op
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
        edited = bool(self.unchanged.edits) and (bool(self.optimizers) or self.unchanged.compares)
        mine = report(self.buckets, self.gradients, edited, late)
        agreed = agree(self.comm, mine, self.buckets)
        if not agreed.same_settings:
            compare_optimizers(self.comm, self.optimizers, self.inventory.members, self.steps)
        if agreed.edited:
            with labelled(f"what was done to parameters before step {self.steps}"):
                self.unchanged.compare(f"before step {self.steps}")
        self._uniform, self.finite = agreed.uniform, agreed.finite
        apply(agreed, self.buckets, self.gradients, self.comm.world)
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
        for gradient, its in self._parts():
            if gradient.window.whole:
                self.access.show(its)

    # ---------------------------------------------------------------- the gradient between backward and step

    def settle(self, *wanted: Gradient) -> None:
        """Make the gradient whole: nothing is local any more, nothing under way, and weights are divided out.

        It is `wanted` for a step of these optimizers, or of any.
        """
        wanted = wanted or self.gradients
        if not self.sums:
            _refuse_pointless(wanted)
            self.own.divide(self.buckets)
            return
        self.round.refuse_failed()
        self.access.collect(self.buckets)
        if not any(gradient.backwards for gradient in wanted):
            # A rank that skipped a backward would otherwise go on without the others.
            with labelled(f"{wanted[0].label} without a backward"):
                self._agree()
        edited = [bucket for bucket in self.buckets.buckets if bucket.edited]
        if any(bucket.local is not Local.NONE for bucket in self.buckets.buckets):
            self._flush()
            self.round.close()
        self._show()
        if edited or self.access.assigned:  # those that were set before a backward were measured in it
            for bucket in edited:
                bucket.measure()
            with labelled(f"what was done to p.grad before step {self.steps}", _ALIKE):
                assigned = [member.name for member in self.access.assigned]
                self.finite = agree_on_edits(self.comm, self.buckets, self.access.seen, assigned, self.steps)
            self.access.seen, self.access.assigned = 0, []
        _refuse_pointless(wanted)
        for gradient, its in self._parts():
            gradient.divide(its)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient of all parameters so that its 2-norm is at most `max_norm`; the norm it had. Collective.

        The same bits on every rank, and under every strategy with the same `AccumulateAt`.
        """
        self.settle()
        if not self.sums:
            return self.own.clip(self.buckets, max_norm)
        suspects = self.access.suspects(self.buckets)  # they may have changed undetected
        for bucket in self.buckets.buckets:
            if bucket.scaled != 1.0 or bucket in suspects:
                bucket.measure()
        with labelled(f"the gradient norm of step {self.steps}"):
            norm = self.buckets.table.total(self.comm)
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            for gradient, its in self._parts():
                gradient.clip(its, factor)
        return norm

    def forget(self, gradient: Gradient, keep_zeros: bool = False) -> None:
        """Drop a gradient, as `zero_grad()` does after a real step; nothing is dropped inside a window.

        With `keep_zeros` it becomes zero instead, so that parameters without a new one are updated all the same.
        """
        if gradient.window.open:
            return
        its = self.buckets.of(gradient.optimizer)
        gradient.weights.forget()
        if not self.sums:
            self.own.forget(its, keep_zeros)
            return
        if keep_zeros:
            self.access.collect(self.buckets)  # a gradient that the program set counts too
        if keep_zeros and _used(its):
            self.settle(gradient)
            for bucket in its:
                if bucket.summed:
                    bucket.sum.zero_()  # zero times NaN is NaN
        else:
            for bucket in its:
                bucket.forget()
            self.access.forget(its)
        gradient.restart(its)  # after settle(), which measures what was done to p.grad
        if not any(bucket.edited for bucket in self.buckets.buckets):
            self.access.seen = 0
        if not any(each.backwards for each in self.gradients):
            self.finite = True

    def restart(self) -> None:
        """Begin anew, with no gradient and at the beginning of a window."""
        self.move(State.READY)
        for gradient in self.gradients:
            gradient.window.restart()
            self.forget(gradient)

    # ---------------------------------------------------------------- a step

    def prepare_step(self, gradient: Gradient) -> bool:
        """Whether this `step()` is a real one and its gradient is fit for it. Collective if it is real.

        Of several optimizers that step from the same backward, the first one makes the gradient of all parameters
        ready: buffers are shared, and it is clipped once.
        """
        self.torn.refuse("step()")
        if self.unchanged.lent:
            raise SherdError(f"rank {self.comm.rank}: step() inside full_parameters; leave it first")
        if not gradient.window.advance():
            return False
        self.unchanged.check_kinds()  # first: gradients would have to fit too
        first = not self._stepped or gradient in self._stepped
        self._stepped = {gradient} if first else {*self._stepped, gradient}
        self.settle(gradient)
        if first and self.policy.exchanges(gradient.calls):
            self.buffers.sync(self.steps)
        if not self._finite(first) and self._options.nonfinite != "allow":
            self._skip(gradient)
            return False
        if first and self._options.clip_norm is not None:
            self.clip(self._options.clip_norm)
            if self.sums:
                self.access.accept(self.buckets.buckets)  # another optimizer would take it for an edit
        return True

    def _finite(self, measure: bool) -> bool:
        """Whether the gradient is finite, where that is to be known: without a sum, nobody else would suffer."""
        if self.sums:
            return self.finite
        asked = self._options.nonfinite is not None
        if measure and (asked or self.measures):
            self.own.measure(self.buckets)
        return self.own.finite or not asked

    @contextmanager
    def updating(self, gradient: Gradient) -> Iterator[Update]:
        """The parameters of an optimizer may be updated by their owners inside."""
        self.unchanged.check()
        its = self.buckets.of(gradient.optimizer)
        with labelled(gradient.label):
            if self.unchanged.compares and (self.sums or self.policy.exchanges(gradient.calls)):
                # This also waits until no rank reads what is about to be updated.
                several = [each.label for each in self.gradients] if len(self.gradients) > 1 else ()
                self.unchanged.compare_if_any(f"before the update of {gradient.label}", several, gradient.label)
            s = StepContext(gradient.calls, self.comm, its, self.store, self.shards.get(gradient.optimizer))
            if not self.sums:
                self.own.fill(its)
            self.policy.before_update(s)
            self.move(State.UPDATING)
            update = Update(partial(self.policy.update, s))
            try:
                yield update
                self.policy.after_update(s)
            except BaseException as error:
                self.store.abandon()
                torn = update.begun or self.unchanged.touched()
                self.move(State.BROKEN if torn else State.READY)
                if torn:
                    self.torn.tear(gradient.label, error)
                raise
            self.move(State.READY)
        if not self.sums:
            self.own.let_go(self.buckets)
        self.unchanged.accept()
        gradient.steps += 1
        self._end_step()

    def accept_edits(self) -> bool:
        """What was done to the parameters is an update of their optimizer's; whether anything was."""
        touched = self.unchanged.touched()
        self.unchanged.accept()
        return touched

    def _end_step(self) -> None:
        if len(self._stepped) == len(self.gradients):  # else others may still step from the same backward
            self._follow_policy()

    def _skip(self, gradient: Gradient) -> None:
        gradient.skipped += 1
        self._end_step()
        text = (
            f"{gradient.label}: the gradient is not finite on some rank, so no rank takes the step "
            f"({gradient.skipped} skipped so far)"
        )
        observe.emit("warning", text=text)
        if self._options.nonfinite == "raise":
            raise SherdError(f'rank {self.comm.rank}: {text}; nonfinite="skip" would go on, "allow" would apply it')
        if self.comm.rank == 0:
            log.warning("%s", text)

    # ---------------------------------------------------------------- what changes between steps

    def weigh(self, weight: float | None) -> None:
        """Set the weight of the next backward."""
        for gradient in self.gradients:
            gradient.weights.pending = weight

    def give(self, optimizer: Optimizer, members: Iterable[TrackedParameter]) -> None:
        """These parameters are about to be in a group of this optimizer, which they were not before."""
        for member in members:
            if len(member.bucket.members) == 1:
                member.bucket.optimizer = optimizer
        self.shards[optimizer].follow(self.buckets)

    def loaded(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters were loaded on all ranks."""
        if self.torn.loaded(parameters):
            self.restart()

    def loaded_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer's state was loaded."""
        if self.torn.loaded_optimizer(optimizer):
            self.restart()

    def _unfreeze_if_asked(self) -> None:
        """Train parameters that were frozen until now. Collective if there are such."""
        with bypass_torch_function():
            found = {m for bucket in self.buckets.frozen for m in bucket.members if m.parameter.requires_grad}
        if not found or self.comm.closed:  # this backward may be that of another model
            return
        members = [member for member in self.inventory.members if member in found]
        if self.sums:
            compare_unfrozen(self.comm, members, self.steps)
        assign((member.bucket for member in members), self.optimizers)
        self.buckets = self.buckets.unfrozen(members)
        if self._hooks:
            self._train(members)
        self._learned = False
        for shard in self.shards.values():
            shard.follow(self.buckets)

    def _follow_policy(self) -> None:
        """Take gradients from autograd if they are summed in the next step, else leave them in `p.grad`."""
        self.sums = self.policy.sums(max(gradient.calls for gradient in self.gradients))
        if self.sums and not self._hooks:
            self._train(self.buckets.parameters)
        elif self._hooks and not self.sums:
            for handle in self._hooks:
                handle.remove()
            self._hooks = []
            for bucket in self.buckets.buckets:
                bucket.forget()

    def _train(self, members: Iterable[TrackedParameter]) -> None:
        """Make room for the gradients of these parameters, and take them from autograd."""
        members = list(members)
        theirs = {member.bucket for member in members}
        self.exchange.take([bucket for bucket in self.buckets.buckets if bucket in theirs])
        self.reductions.fit(self.buckets.buckets)
        self.access.follow(members)
        self._hooks += [round.hook(member, self.comm.rank, self.arrive) for member in members]

    def gradient_bytes(self) -> dict[str, int]:
        """What this rank allocated for gradients, by kind."""
        more = sum(bucket.more_bytes for bucket in self.buckets.buckets)
        return {"gradients": self.exchange.nbytes + self.own.nbytes + more, "buckets": self.reductions.ring.nbytes}


def _gradients(optimizers: Sequence[Optimizer], options: StepOptions) -> tuple[Gradient, ...]:
    reduction, accumulate = options.loss_reduction, options.accumulate
    if len(optimizers) > 1:
        named = enumerate(optimizers)
        return tuple(Gradient(each, name_of(each, index), reduction, accumulate) for index, each in named)
    return (Gradient(optimizers[0] if optimizers else None, "", reduction, accumulate),)


def _used(buckets: Iterable[Bucket]) -> bool:
    return any(member.used or member.used_here for bucket in buckets for member in bucket.members)


def _refuse_pointless(wanted: Iterable[Gradient]) -> None:
    if any(gradient.weights.pointless for gradient in wanted):
        raise ConfigError("every weight of this step was 0, so its gradient has no mean; skip the step")
