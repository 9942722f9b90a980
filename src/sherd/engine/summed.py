"""The way of a gradient that is summed over the ranks, from autograd's hook to the sum.

    hook -> round -> bucket -> ring -> communicator -> sum

`begin_round`, `arrive` and `end_round` are a backward. What it made is whole after `settle`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.bucket import Bucket, Local
from sherd.engine.buckets.exchange import Exchange
from sherd.engine.buckets.order import merged
from sherd.engine.buckets.ring import Reductions
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.consistency.agreement import agree, agree_on_edits, apply, report
from sherd.engine.consistency.settings import compare_optimizers, compare_unfrozen
from sherd.engine.consistency.torn import Torn
from sherd.engine.consistency.unchanged import Unchanged
from sherd.engine.gradients import round
from sherd.engine.gradients.access import GradAccess
from sherd.engine.gradients.gradient import Gradient, Trained
from sherd.engine.gradients.path import GradientPath, refuse_pointless
from sherd.engine.gradients.round import Round
from sherd.engine.gradients.scaled_roots import RootScaling
from sherd.errors import SherdError
from sherd.patches import backward

_ALIKE = "Set and edit p.grad alike on every rank"


class SummedGradients(GradientPath):
    """Gradients are taken from autograd by hooks, and summed bucket by bucket while a backward still runs; or, if they
    are not `hooked`, when it has ended."""

    def __init__(
        self,
        comm: Communicator,
        trained: Trained,
        exchanges: Mapping[Communicator, Exchange],
        access: GradAccess,
        unchanged: Unchanged,
        torn: Torn,
        adds_up_here: bool,
        hooked: bool = True,
        scaling: RootScaling | None = None,
    ) -> None:
        self.together = comm
        self.rank = comm.number
        self.scaling = scaling
        """The loss scale that gradients have until they are summed."""
        self.finite = True
        self.access = access
        self.reductions = Reductions(trained.inventory.device)
        self.round = Round(comm.number, self.reductions)
        self._comm = comm
        self._trained = trained
        self._exchanges = exchanges
        self._unchanged = unchanged
        self._torn = torn
        self._adds_up_here = adds_up_here
        self._hooked = hooked  # or most gradients are taken when a backward has ended
        self._noticed = False  # whether a gradient of this backward was seen where most are swept
        self._uniform = False  # whether every rank used every parameter in the last round
        self._learned = False  # whether the launch order is that of rank 0's gradients
        self._waiting = False  # whether there may be contributions of earlier rounds, with the scale of those
        self._hooks: dict[TrackedParameter, RemovableHandle] = {}

    @property
    def over(self) -> bool:
        """Whether there are no ranks to train with any more."""
        return self._comm.closed

    @property
    def followed(self) -> Sequence[TrackedParameter]:
        """What is trained."""
        return self._trained.buckets.parameters

    # ---------------------------------------------------------------- a backward

    def begin_round(self) -> None:
        if self.round.state is round.State.FAILED:
            return  # other models of this process may go on
        self._noticed = False
        self._unfreeze_if_asked()
        parts = self._trained.parts
        filling = [bucket for gradient, its in parts if not gradient.window.whole for bucket in its]
        self.access.hide(self._trained.buckets, filling)  # autograd must find nothing to add to
        used = {gradient: _used(its) for gradient, its in parts}
        for gradient, its in parts:
            # What only other ranks hold and have used is dropped with the rest.
            kept = used[gradient] or (gradient.elsewhere and any(used.values()))
            if not gradient.window.open and not kept:
                gradient.restart(its)  # the program dropped all of it: model.zero_grad()
        self.round.move(round.State.OPEN)

    def arrive(self, member: TrackedParameter, gradient: Tensor) -> None:
        """Take a gradient that autograd made, if it is the first of a round or not a usual one."""
        if self.round.state is not round.State.COLLECTING:
            self.refuse_unnoticed()
            self._begin_collecting()
        if not member.bucket.fits(member, gradient):
            self._unchanged.check_kinds()
        self.round.arrive(member, gradient)

    def notice(self) -> None:
        self._noticed = True
        self.refuse_unnoticed()

    def refuse_unnoticed(self) -> None:
        """Raise in a backward that began without `begin_round`, and drop what it made."""
        if backward.under_way():
            return
        if not self._hooked:
            round.taken(self.followed)
            self._show()
        raise SherdError(
            f"rank {self._comm.number}: this backward was not started by loss.backward() or "
            f"torch.autograd.backward, so its end would go unnoticed; call one of these"
        )

    def _begin_collecting(self, at_once: bool = True) -> None:
        """The first gradient of a round is here. Buckets may be launched `at_once`, before the round ends."""
        self.round.refuse_failed()
        if self._torn.why:
            self._torn.refuse("this backward")
        round.refuse_other_hooks(self.followed, self._hooks, self._comm.number)
        factor = 1.0
        self._trained.backwards += 1
        for gradient, its in self._trained.parts:
            gradient.add(its)
            factor = gradient.weights.enter()  # the same for all
            gradient.backwards += 1
            gradient.window.backward()
        at_once &= self._reduces and (self._uniform or not self._trained.modules_communicate)
        label = f"a backward of step {self._trained.steps}"
        self.round.collect(self._trained.buckets, self._scaled(factor), self._op if at_once else None, label)

    def _scaled(self, factor: float) -> float:
        """This factor, where gradients may have another scale than what they are added to."""
        if self.scaling is None:
            return factor
        if not self._waiting:
            self.reductions.scale = self.scaling.scale.value
        return factor * (self.reductions.scale / self.scaling.entered)

    @property
    def _op(self) -> str:
        """The operation that reduces the ranks' contributions. One that was dropped may forget that it was weighed."""
        weights = [gradient.weights for gradient in self._trained.gradients]
        return next((each.op for each in weights if each.weighed), weights[0].op)

    @property
    def _reduces(self) -> bool:
        """Whether contributions of this round are reduced in it."""
        last = any(gradient.window.last for gradient in self._trained.gradients)
        return not self._adds_up_here or (last and not self._trained.holding)

    def end_round(self) -> None:
        try:
            self._sweep()
        except BaseException as error:
            self._fail(error)
            raise
        if self.round.state is round.State.COLLECTING:
            if self._reduces:
                self._flush()
            else:
                self._waiting = True
            for gradient, its in self._trained.parts:
                if gradient.window.whole and not self._trained.holding:
                    gradient.divide(its)
        self.round.close()
        self._show()

    def _sweep(self, at_once: bool = True) -> None:
        """Take the gradients of this backward that autograd has left in `p.grad`, where there are no hooks."""
        if self._hooked or self.round.state is not round.State.OPEN:
            return
        found = round.taken(self.followed)
        if self._noticed and not found:  # hooks of the program have taken all
            round.refuse_other_hooks(self.followed, self._hooks, self._comm.number)
        if found:
            self._begin_collecting(at_once)
            passed_on = [round.pass_on(self._comm.number, member, gradient, self) for member, gradient in found]
            for bucket in filter(None, passed_on):  # after all: none may seem to be incomplete
                self.round.complete(bucket)

    def abandon_round(self, error: BaseException) -> None:
        with suppress(SherdError):  # this backward would have been refused as well: what it made is dropped
            self._sweep(at_once=False)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.round.fail(error)
        self._show()

    def _flush(self) -> None:
        """Reduce what was not reduced yet, and agree with the other ranks on what there is. Collective."""
        try:
            if self._unchanged.looks_in_backward:
                self._unchanged.check()  # not earlier: autograd still needed what a parameter was moved to
            for gradient, its in self._trained.parts:
                gradient.add(its)  # on a rank without a gradient in this round too
            op = self._op
            with labelled(f"the end of a backward of step {self._trained.steps}"):
                self.round.flush(self._trained.buckets, op)
                late = self._agree(self.round.late(self._trained.buckets.buckets))
                if late is not None:
                    self.round.flush_late(late, op)
                    self._agree()
                if not self._learned:
                    self._learn()
            self._waiting = False
        except BaseException as error:
            self.round.fail(error)
            raise

    def _agree(self, late: Iterable[Bucket] = ()) -> list[Bucket] | None:
        """Tell the other ranks how it went here, and take over how it went everywhere; gives what is late of what this
        rank holds, or None if nothing is late on any rank."""
        trained, step = self._trained, self._trained.steps
        # Where each has a copy of its own, a model that was distributed without its optimizer is edited by it in every
        # step, and nothing has to be compared.
        edited = bool(self._unchanged.edits) and (bool(trained.optimizers) or self._unchanged.compares)
        scale = None if self.scaling is None else self.scaling.scale.value
        mine = report(trained.buckets, trained.gradients, edited, late, scale)
        agreed = agree(self.together, mine, trained.buckets)
        if not agreed.same_settings:
            compare_optimizers(self.together, trained.optimizers, trained.inventory, step)
        if agreed.edited:
            with labelled(f"what was done to parameters before step {step}"):
                self._unchanged.compare(f"before step {step}")
        self._uniform, self.finite = agreed.uniform, agreed.finite
        apply(agreed, trained.buckets, trained.gradients, self.together.world)
        if not any(agreed.late):
            return None
        slots = trained.buckets.slots
        return [bucket for bucket, is_late in zip(slots, agreed.late, strict=True) if bucket is not None and is_late]

    def _learn(self) -> None:
        """Launch buckets from now on in the order in which rank 0 completed them; those that it does not hold, in that
        of the first rank that does."""
        buckets, completed = self._trained.buckets, self.round.completed
        places = {bucket: place for place, bucket in enumerate(buckets.slots)}
        order = [*completed, *(bucket for bucket in buckets.launch_order if bucket not in completed)]
        mine = [places[bucket] for bucket in order]
        with self.together.counters.agreeing():  # whoever sums with whom must launch in one order
            if buckets.grouped:
                learned = merged(self.together.all_gather_object(mine))
            else:
                learned = self.together.broadcast_object(mine)
        self._trained.buckets = buckets.launched_in(learned)
        self._learned = True

    def _show(self, again: bool = True) -> None:
        """Set `p.grad` where it is not set yet, or everywhere."""
        for gradient, its in self._trained.parts:
            if gradient.window.whole:
                self.access.show([bucket for bucket in its if again or not bucket.shown])

    # ---------------------------------------------------------------- between backward and step

    def settle(self, wanted: Sequence[Gradient]) -> None:
        self.round.refuse_failed()
        self._unchanged.check_kinds(closely=False)  # first: gradients would have to fit too
        buckets, step = self._trained.buckets, self._trained.steps
        self.access.collect(buckets)
        changes = not any(gradient.backwards for gradient in wanted)  # what `p.grad` shows
        if changes:
            # A rank that skipped a backward would otherwise go on without the others.
            with labelled(f"{wanted[0].label} without a backward"):
                self._agree()
        edited = [bucket for bucket in buckets.buckets if bucket.edited]
        if any(bucket.local is not Local.NONE for bucket in buckets.buckets):
            self._flush()
            self.round.close()
            changes = True
        self._show(again=changes)
        mine = bool(edited or self.access.assigned)  # those that were set before a backward were measured in it
        if mine or buckets.grouped:  # a rank does not know what is done to parameters that it does not hold
            for bucket in edited:
                bucket.measure()
            with labelled(f"what was done to p.grad before step {step}", _ALIKE):
                found = agree_on_edits(self.together, buckets, self.access, mine, step)
            self.finite = self.finite if found is None else found
            self.access.seen.clear()
            self.access.assigned = []
        refuse_pointless(wanted)
        for gradient, its in self._trained.parts:
            gradient.divide(its)

    def measure(self) -> None:
        """Norms were taken while sums were in the cache, and the ranks have agreed."""

    def clip(self, max_norm: float, by_program: bool) -> float:
        """Collective. The same bits on every rank, and under every strategy with the same `AccumulateAt`."""
        buckets = self._trained.buckets
        suspects = self.access.suspects(buckets)  # they may have changed undetected
        for bucket in buckets.buckets:
            if bucket.scaled != 1.0 or bucket in suspects:
                bucket.measure()
        with labelled(f"the gradient norm of step {self._trained.steps}"):
            norm = buckets.table.total(self._comm)
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            for gradient, its in self._trained.parts:
                gradient.clip(its, factor)
        if not by_program:
            self.access.accept(buckets.buckets)
        return norm

    def forget(self, gradient: Gradient, keep_zeros: bool) -> None:
        buckets = self._trained.buckets
        its = self._trained.of(gradient)
        gradient.weights.forget()
        if keep_zeros:
            self.access.collect(buckets)  # a gradient that the program set counts too
        if keep_zeros and (gradient.elsewhere or _used(its)):
            self.settle((gradient,))
            for bucket in its:
                if bucket.summed:
                    bucket.sum.zero_()  # zero times NaN is NaN
        else:
            for bucket in its:
                bucket.forget()
            self.access.forget(its)
        gradient.restart(its)  # after settle(), which measures what was done to p.grad
        if not any(bucket.edited for bucket in buckets.buckets) and not self.access.is_used:
            self.access.seen.clear()
        if not any(each.backwards for each in self._trained.gradients):
            self.finite, self._waiting = True, False

    def lend(self, buckets: Iterable[Bucket]) -> None:
        """A bucket's `owned_sum` is its sum."""

    def take_back(self, buckets: Iterable[Bucket]) -> None:
        """Nothing was lent."""

    # ---------------------------------------------------------------- what is trained

    def _unfreeze_if_asked(self) -> None:
        """Train parameters that were frozen until now. Collective if there are such."""
        members = self._trained.thawed()
        if members and not self._comm.closed:  # this backward may be that of another model
            self._trained.train(members, compare_unfrozen(self.together, members, self._trained))
            self.follow(members)

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        members = list(members)
        theirs = {member.bucket for member in members}
        new = [each for each in self._trained.buckets.buckets if each in theirs and not each.kept]
        for comm, exchange in self._exchanges.items():
            exchange.take([bucket for bucket in new if bucket.comm is comm])
        self.reductions.fit(self._trained.buckets.buckets)
        self.access.follow(members)
        for member in members:
            if member.bucket.sum_dtype != member.bucket.dtype:
                member.parameter.grad_dtype = None  # any: `p.grad` shows the sum, and autograd makes its own
        # Where most are swept, one in each bucket only watches: a backward that nobody was told of would go unnoticed.
        those = members if self._hooked else [bucket.members[0] for bucket in theirs]
        hook = partial(round.hook, self._comm.number) if self._hooked else round.watch
        self._hooks.update({member: hook(member, self) for member in those})
        self._learned = False

    def leave(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for bucket in self._trained.buckets.buckets:
            bucket.forget()

    def bytes(self) -> dict[str, int]:
        more = sum(bucket.more_bytes for bucket in self._trained.buckets.buckets)
        kept = sum(exchange.nbytes for exchange in self._exchanges.values())
        return {"gradients": kept + more, "buckets": self.reductions.nbytes}


def _used(buckets: Iterable[Bucket]) -> bool:
    return any(member.used or member.used_here for bucket in buckets for member in bucket.members)
