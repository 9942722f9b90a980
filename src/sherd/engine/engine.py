"""The engine: a training step of one model on one rank.

A backward goes one of two ways: its gradients are summed over the ranks (`summed`), or they stay where autograd left
them (`gradients.own`). Then `prepare_step` and `updating` are a step:

    gradient -> settled, checked, clipped -> optimizer -> parameter store

Everything was put together by `assembly`; the engine never asks which strategy chose it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sherd import observe
from sherd.comm import Communicator, labelled
from sherd.config import StepOptions
from sherd.engine.buckets.bucket import Values
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.consistency.torn import Torn
from sherd.engine.consistency.unchanged import Unchanged
from sherd.engine.gradients import overflow
from sherd.engine.gradients.gradient import Gradient, LossWeights, Trained
from sherd.engine.gradients.loss_scale import Change, DynamicScale
from sherd.engine.gradients.own import OwnGradients
from sherd.engine.gradients.path import GradientPath
from sherd.engine.modules.buffers import BufferSync
from sherd.engine.optimizer.unsplit import Updater
from sherd.engine.parameters.masters import put_masters, with_masters
from sherd.engine.parameters.mesh import Mesh, Teams
from sherd.engine.parameters.store import ParameterStore, take_from_leader
from sherd.engine.policy import ExchangePolicy, StepContext
from sherd.engine.summed import SummedGradients
from sherd.errors import SherdError
from sherd.layout.shard_layout import ShardLayout
from sherd.patches import backward

log = logging.getLogger("sherd")


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
    """What an engine is made of, as its policy says."""

    teams: Teams
    mesh: Mesh
    groups: Mapping[Ranks, Communicator]
    policy: ExchangePolicy
    store: ParameterStore
    trained: Trained
    unchanged: Unchanged
    torn: Torn
    summed: SummedGradients
    own: OwnGradients


def _not_begun(*_: Any) -> Any:
    raise SherdError("this update has not begun")


@dataclass
class Update:
    """One update of the parameters. `run` makes it, with a closure for optimizers that evaluate the loss again."""

    run: Callable[..., Any] = _not_begun
    begun: bool = False
    """whether something may have been changed, beyond what can be seen of the parameters"""


class Engine:
    """Training of one model on one rank."""

    def __init__(self, options: StepOptions, parts: Parts) -> None:
        self.teams = parts.teams
        self.comm: Communicator = parts.teams.team
        """The ranks that train together."""
        self.mesh = parts.mesh
        self.groups = parts.groups
        """The groups of ranks that this one is in; None is everyone."""
        self.policy = parts.policy
        self.store = parts.store
        self.trained = parts.trained
        self.unchanged = parts.unchanged
        self.torn = parts.torn
        self.summed = parts.summed
        self.state = State.READY
        self.at_consensus = False
        """Whether parameters have the values of all teams together, for a while (see `consensus`)."""
        self.measures = False
        """Whether norms are wanted even where nothing is clipped or checked."""
        self.precision = options.precision
        """What was asked for: "bf16-autocast" shows in no dtype of a parameter."""
        self._options = options
        self._own = parts.own
        self._stepped: set[Gradient] = set()  # by whose `step()` the gradient was made ready or used since a backward
        self._backwards = 0  # as many there were by then
        self._change = Change.NONE  # what the step that was first to use a gradient did to the loss scale
        self._moved: set[Gradient] = set()  # who has taken a step since the policy was asked
        self.path: GradientPath = self._own
        """The way that the next gradient goes."""
        self._follow_policy()

    def move(self, to: State) -> None:
        """Become `to`."""
        if to not in _MOVES[self.state]:
            raise SherdError(f"rank {self.comm.number}: the engine is {self.state.value} and cannot be {to.value}")
        self.state = to

    def take_over(self) -> None:
        """Move the parameters to where they are to live, with the values of their first rank. Collective."""
        if self.teams.count > 1:  # to the first rank of every team, which the others then take them from
            take_from_leader(self.teams.across, (*self.inventory.parameters, *self.inventory.buffers))
        self._fill_masters()
        self.store.take_over()
        for ranks, comm in self.groups.items():
            take_from_leader(comm, self.inventory.buffers_of(ranks))
        self.unchanged.accept()
        how = self._options.sync_buffers
        self.buffers = [BufferSync(comm, self.inventory, how, ranks) for ranks, comm in self.groups.items()]
        self._buffers_of_all = self.buffers
        if self.teams.count > 1:
            self._buffers_of_all = [BufferSync(self.teams.everyone, self.inventory, how)]
        self.policy.join(self.teams, self.buckets)
        if self.scale is not None:
            self.scale.state = self.comm.broadcast_object(self.scale.state)  # of earlier models, which may still live
        backward.install()
        backward.listen(self.path)

    def _fill_masters(self) -> None:
        """Take rank 0's values into the masters before parameters are rounded. Collective, if there are any."""
        members = with_masters(self.inventory.members)
        for comm in self.groups.values() if members else ():
            take_from_leader(comm, (member.parameter for member in members if member.bucket.comm is comm))
        put_masters(members, self.store.updates_slices)

    def _follow_policy(self) -> None:
        """Choose the way of the next gradient."""
        self._moved = set()
        step = min(gradient.calls for gradient in self.gradients)  # what holds for some steps holds for all optimizers
        sums = self.policy.sums(step)
        if sums:
            self.summed.together = self.policy.decide_together(step, self.teams)
        before, self.path = self.path, self.summed if sums else self._own
        if before is not self.path:
            before.leave()
            self.path.follow(self.buckets.parameters)
            if backward.forget(before):
                backward.listen(self.path)

    # ---------------------------------------------------------------- what is trained

    @property
    def inventory(self) -> Inventory:
        """All parameters and buffers of the model."""
        return self.trained.inventory

    @property
    def buckets(self) -> BucketList:
        """The buckets that are trained."""
        return self.trained.buckets

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """One per optimizer."""
        return self.trained.gradients

    @property
    def shards(self) -> dict[Optimizer, Updater]:
        """What each optimizer steps."""
        return self.trained.shards

    @property
    def steps(self) -> int:
        """How many steps were taken, by the optimizer that took most."""
        return self.trained.steps

    @property
    def weights(self) -> LossWeights:
        """The weight of the current backward, which is the same in every gradient."""
        return self.gradients[0].weights

    @property
    def scale(self) -> DynamicScale | None:
        """The scale of losses, if they are scaled."""
        return None if self.summed.scaling is None else self.summed.scaling.scale

    @property
    def layout(self) -> ShardLayout:
        """The layout of the parameters that are trained."""
        return self.buckets.layout

    def give(self, optimizer: Optimizer, members: Iterable[TrackedParameter]) -> None:
        """These parameters are about to be in a group of this optimizer, which they were not before."""
        for member in members:
            if len(member.bucket.members) == 1:
                member.bucket.optimizer = optimizer
        self.trained.buckets = self.buckets  # they belong to another gradient now
        self.shards[optimizer].follow(self.buckets)

    # ---------------------------------------------------------------- the gradient between backward and step

    def settle(self, *wanted: Gradient) -> None:
        """Make the gradient whole, for a step of these optimizers or of any. Collective if it is summed."""
        self.path.settle(wanted or self.gradients)

    def clip(self, max_norm: float, by_program: bool = True) -> float:
        """Scale the gradient of all parameters so that its 2-norm is at most `max_norm`; the norm it had."""
        self.settle()
        return self.path.clip(max_norm, by_program)

    def forget(self, gradient: Gradient, keep_zeros: bool = False) -> None:
        """Drop a gradient, as `zero_grad()` does after a real step; nothing is dropped inside a window.

        With `keep_zeros` it becomes zero instead, so that parameters without a new one are updated all the same.
        """
        if not gradient.window.open:
            self.path.forget(gradient, keep_zeros)

    def restart(self) -> None:
        """Begin anew, with no gradient and at the beginning of a window."""
        self.move(State.READY)
        for gradient in self.gradients:
            gradient.window.restart()
            self.forget(gradient)

    # ---------------------------------------------------------------- a step

    def prepare_step(self, gradient: Gradient) -> bool:
        """Whether this `step()` is a real one and its gradient is fit for it. Collective if it is real and summed.

        Of several optimizers that step from the same backward, the first one makes the gradient of all parameters
        ready: buffers are shared, and it is clipped once.
        """
        self.torn.refuse("step()")
        if self.unchanged.lent or self.at_consensus:
            where = "full_parameters" if self.unchanged.lent else "sherd.consensus"
            raise SherdError(f"rank {self.comm.number}: step() inside {where}; leave it first")
        if not gradient.window.advance():
            return False
        first = self._steps_first(gradient)
        self.settle(gradient)
        if first:
            self._share_buffers(gradient.calls)
        finite = self._finite(first)
        if first and self.scale is not None:
            self._change = overflow.follow(self.scale, gradient, finite, told=self.comm.rank == 0)
        if not finite and (self.scale is not None or self._options.nonfinite != "allow"):
            self._skip(gradient)
            return False
        if first and self._options.clip_norm is not None:
            self.clip(self._options.clip_norm, by_program=False)
        return True

    def leave_out(self, gradient: Gradient) -> None:
        """The program leaves out a real `step()`, as a GradScaler does, on all ranks that train together. Collective
        where ranks meet at this step."""
        gradient.window.advance()
        if self._steps_first(gradient):
            self._share_buffers(gradient.calls)
        self._end_skipped(gradient)

    def _share_buffers(self, step: int) -> None:
        """Make buffers equal: in all teams, where those meet at this step, else in this one."""
        if self.policy.shares_buffers(step):
            self.share_buffers_of_all()
        elif self.policy.exchanges(step):
            for buffers in self.buffers:
                buffers.sync(self.steps)

    def share_buffers_of_all(self) -> None:
        """Make the buffers of all teams equal. Collective."""
        for buffers in self._buffers_of_all:
            buffers.sync(self.steps)

    def _steps_first(self, gradient: Gradient) -> bool:
        """Whether no other optimizer has stepped from this gradient yet."""
        if self.trained.backwards != self._backwards or gradient in self._stepped:
            self._stepped = set()
        self._backwards = self.trained.backwards
        first = not self._stepped
        self._stepped.add(gradient)
        return first

    def _finite(self, first: bool) -> bool:
        """Whether the gradient is finite, where that is to be known: alone, nobody else would suffer."""
        asked = self._options.nonfinite is not None or self.teams.count > 1
        if first and (asked or self.measures):
            self.path.measure()
        return self.path.finite or not (asked or self.path is self.summed)

    @contextmanager
    def updating(self, gradient: Gradient) -> Iterator[Update]:
        """The parameters of an optimizer may be updated by their owners inside."""
        update, s = Update(), self._context(gradient)
        reads_sums = s.shard is not None and s.shard.reads_sums
        with self.changing(s, gradient.label, update):
            if reads_sums:
                self.path.lend(s.buckets)
            self.policy.before_update(s)
            update.run, update.begun = partial(self.policy.update, s), True
            yield update
            self.policy.after_update(s)
        if reads_sums:
            self.path.take_back(s.buckets)
        gradient.steps += 1
        self._end_step(gradient)

    def _context(self, gradient: Gradient) -> StepContext:
        shard = None if gradient.optimizer is None else self.shards[gradient.optimizer]
        buckets, samples = self.trained.of(gradient), self.trained.samples
        return StepContext(gradient.calls, self.teams, buckets, self.store, shard, samples)

    @contextmanager
    def changing(self, s: StepContext, label: str, update: Update) -> Iterator[None]:
        """Parameters change inside: by a step of an optimizer, or by what teams exchange."""
        meets = self.path is self.summed or self.teams.count > 1 or self.policy.exchanges(s.step)
        self.unchanged.check(closely=meets)
        with labelled(label) if meets else nullcontext():
            if self.unchanged.compares and meets:
                # This also waits until no rank reads what is about to be updated.
                several = [each.label for each in self.gradients] if len(self.gradients) > 1 else ()
                self.unchanged.compare_if_any(f"before the update of {label}", several, label)
            self.move(State.UPDATING)
            try:
                yield
            except BaseException as error:
                self.store.abandon()
                torn = update.begun or self.unchanged.touched()
                self.move(State.BROKEN if torn else State.READY)
                if torn:
                    self.torn.tear(label, error)
                raise
            self.move(State.READY)
        if meets:
            self.unchanged.accept()
        else:
            self.unchanged.accept_values()  # alone, an optimizer's own update leaves them in their places

    def accept_edits(self) -> bool:
        """What was done to the parameters is an update of their optimizer's; whether anything was."""
        touched = self.unchanged.touched()
        self.unchanged.accept()
        return touched

    def _end_step(self, gradient: Gradient) -> None:
        self._moved.add(gradient)
        if len(self._moved) == len(self.gradients):  # else others may still step from the same backward
            self._follow_policy()
            self.comm.counters.end_step()

    def _end_skipped(self, gradient: Gradient) -> None:
        if self.teams.count > 1:  # the others may be waiting at this step
            s = self._context(gradient)
            with self.changing(s, gradient.label, Update()):
                self.policy.skipped(s)
        gradient.skipped += 1
        self._end_step(gradient)

    def _skip(self, gradient: Gradient) -> None:
        self._end_skipped(gradient)
        if self.scale is not None:
            gradient.overflowed += 1
            if self._change is Change.EXHAUSTED:
                raise overflow.exhausted(self.comm, self.buckets, self.scale, gradient)
            return
        where, who = ("some rank", "no rank takes") if self.comm.world > 1 else ("this rank", "it does not take")
        text = (
            f"{gradient.label}: the gradient is not finite on {where}, so {who} the step "
            f"({gradient.skipped} skipped so far)"
        )
        observe.emit("warning", text=text)
        if self._options.nonfinite == "raise":
            raise SherdError(f'rank {self.comm.number}: {text}; nonfinite="skip" would go on, "allow" would apply it')
        if self.comm.rank == 0:
            log.warning("%s", text)

    # ---------------------------------------------------------------- what changes between steps

    def take_from_first_team(self) -> None:
        """Take the first team's parameters, while they are lent for editing. Collective, if there are several teams."""
        if self.teams.count > 1:
            take_from_leader(self.teams.across, self.inventory.parameters)

    def refuse_at_consensus(self, what: str) -> None:
        """Raise inside `sherd.consensus`, at whose end `what` would be undone."""
        if self.at_consensus:
            raise SherdError(
                f"rank {self.comm.number}: {what} inside sherd.consensus would be lost at its end; leave it first"
            )

    def loaded(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters were loaded on all ranks."""
        self.policy.loaded(self.buckets)
        if self.torn.loaded(parameters):
            self.restart()

    def loaded_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer's state was loaded."""
        if self.torn.loaded_optimizer(optimizer):
            self.restart()

    def values(self) -> Iterator[Values]:
        """The values of all buckets."""
        return (bucket.values for bucket in self.buckets.every)

    def gradient_bytes(self) -> dict[str, int]:
        """What this rank allocated for gradients, by kind."""
        own, summed = self._own.bytes(), self.summed.bytes()
        return {kind: own[kind] + summed[kind] for kind in own}
