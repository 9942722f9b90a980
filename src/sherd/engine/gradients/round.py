"""A round: one outermost backward, from autograd's hook to the launch of the last bucket.

A bucket is *complete* when each of its members has arrived once in the round. Buckets are launched as soon as they are
complete, but in one order that all ranks share. An incomplete one is launched too, with zeros for what is missing: when
more than `MAX_WAITING` complete ones wait for their turn, or at the end of the round. Without an `op` nothing is
launched before that end.

A gradient that arrives after its bucket was launched is *late*: it waits until the ranks have agreed on which buckets
have late gradients. Parameters are packed the same under every strategy, so the same gradients are late under all of
them, and the order of additions is the same.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sherd.comm import labelled
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.ring import Reductions
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import SherdError

log = logging.getLogger("sherd")

MAX_WAITING = 8
"""The number of complete buckets that may wait for their turn."""


class State(enum.Enum):
    """The phases of a round."""

    IDLE = "idle"
    OPEN = "open"
    """a backward is running, of this model or of another"""
    COLLECTING = "collecting"
    """gradients of this model have arrived"""
    FLUSHING = "flushing"
    """the remaining buckets are launched, and the ranks agree"""
    FAILED = "failed"


_MOVES = {
    State.IDLE: (State.OPEN, State.FLUSHING),  # gradients of backwards in no_sync are flushed without a backward
    State.OPEN: (State.COLLECTING, State.IDLE),
    State.COLLECTING: (State.FLUSHING, State.IDLE),
    State.FLUSHING: (State.IDLE,),
    State.FAILED: (),
}


class Round:
    """Takes gradients as they arrive and launches buckets in order. One object for all rounds of a model."""

    def __init__(self, rank: int, reductions: Reductions) -> None:
        self._rank = rank
        self._reductions = reductions
        self.state = State.IDLE
        self.error: BaseException | None = None
        self.label = ""
        """The name of this round in errors."""
        self._op: str | None = None
        self.completed: list[Bucket] = []
        """In the order in which they were completed here, from which the launch order of later rounds is learned."""

    def move(self, to: State) -> None:
        """Change the state of the round to `to`."""
        if to is not State.FAILED and to not in _MOVES[self.state]:
            raise SherdError(f"rank {self._rank}: a round that is {self.state.value} cannot become {to.value}")
        self.state = to

    def refuse_failed(self) -> None:
        """Raise if an earlier round failed after gradients were exchanged."""
        if self.state is State.FAILED:
            raise SherdError(
                f"rank {self._rank}: an earlier backward failed ({self.error}) after gradients had been exchanged, so "
                f"the ranks no longer have the same gradients; restart from a checkpoint"
            )

    def collect(self, buckets: BucketList, factor: float, op: str | None, label: str) -> None:
        """The first gradient has arrived; without `op` nothing is launched before the end of the round."""
        self.move(State.COLLECTING)
        self._start(buckets, factor, label)
        self._factor, self._op = factor, op

    def _start(self, buckets: BucketList, factor: float, label: str) -> None:
        self._order = buckets.launch_order
        self.label = label
        self.completed = []
        self._has_late = False
        self._launched = self._launched_complete = 0
        for bucket in self._order:
            bucket.open(factor)

    def arrive(self, member: TrackedParameter, gradient: Tensor) -> None:
        """Take a gradient."""
        bucket = member.bucket
        if bucket.launched:
            self._arrive_late(member, gradient)
        elif bucket.arrive(member, gradient):
            self.complete(bucket)

    def _arrive_late(self, member: TrackedParameter, gradient: Tensor) -> None:
        if self._factor == 0.0:
            gradient = torch.zeros_like(gradient)  # zero times NaN is NaN, and the loss of no tokens may well be NaN
        gradient = gradient.to(member.bucket.sum_dtype)  # as other contributions are, before a factor rounds them
        late, member.used_here, self._has_late = member.late, True, True
        member.late = gradient * self._factor if late is None else late.add_(gradient, alpha=self._factor)

    def complete(self, bucket: Bucket) -> None:
        """Every member of a bucket has arrived: launch it, if it is its turn."""
        self.completed.append(bucket)
        if self._op is None:
            bucket.add_up()  # at once, or a window would need memory for two gradients
            return
        self._launch_in_turn(self._op)
        # A bucket that stays incomplete must not keep all others in memory: its missing gradients become late.
        while len(self.completed) - self._launched_complete > MAX_WAITING:
            self._launch_next(self._op)
            self._launch_in_turn(self._op)

    def flush(self, buckets: BucketList, op: str) -> None:
        """Launch the buckets that were not complete."""
        if self.state is State.IDLE:
            self._start(buckets, 1.0, self.label)
        self.move(State.FLUSHING)
        while self._launched < len(self._order):
            self._launch_next(op)
        self._reductions.settle()

    def late(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """The buckets among these for which this rank has late gradients."""
        if not self._has_late:
            return []
        return [bucket for bucket in buckets if any(member.late is not None for member in bucket.members)]

    def flush_late(self, late: Sequence[Bucket], op: str) -> None:
        """Launch these buckets again, for which some rank has late gradients."""
        for bucket in self._order:
            if bucket in late:
                bucket.open()
                for member in bucket.members:
                    if member.late is not None:
                        bucket.arrive(member, member.late)
                        member.late = None
                bucket.launched = True
                self._launch(bucket, op)
        self._reductions.settle()

    def close(self) -> None:
        """The backward has ended. What was not launched is kept, times the factor of this round."""
        if self.state is State.COLLECTING:
            for bucket in self._order:
                bucket.add_up()
        if self.state not in (State.IDLE, State.FAILED):
            self.move(State.IDLE)

    def fail(self, error: BaseException) -> None:
        """The backward failed: permanently, if gradients were exchanged."""
        exchanged = self.state is State.FLUSHING or (self.state is State.COLLECTING and self._launched > 0)
        if exchanged:
            self.error = error
            self.move(State.FAILED)
            for bucket in self._order:
                bucket.abandon()
        else:
            self.close()

    def _launch_in_turn(self, op: str) -> None:
        while self._launched < len(self._order) and not self._order[self._launched].missing:
            self._launch_next(op)

    def _launch_next(self, op: str) -> None:
        bucket = self._order[self._launched]
        self._launched += 1
        self._launched_complete += not bucket.missing
        bucket.launched = True
        self._launch(bucket, op)

    def _launch(self, bucket: Bucket, op: str) -> None:
        with labelled(self.label):
            bucket.launch(op, self._reductions)


def refuse_other_hooks(parameters: Iterable[TrackedParameter], ours: Container[TrackedParameter], rank: int) -> None:
    """Raise if a parameter has a hook other than the engine's, which has one on each of `ours`."""
    with bypass_torch_function():
        hooked = [(member, its) for member in parameters if (its := member.parameter._post_accumulate_grad_hooks)]
    for member, its in hooked:
        if len(its) > (member in ours):
            raise SherdError(
                f"rank {rank}: parameter {member.name!r} has a hook of register_post_accumulate_grad_hook, which would "
                f"find no gradient: it is being reduced over the ranks; use p.grad after backward(), or "
                f"p.register_hook for this rank's own gradient"
            )


class Receiver(Protocol):
    """Who gradients are for."""

    round: Round

    def arrive(self, member: TrackedParameter, gradient: Tensor) -> None:
        """Take a gradient that is the first of a round, late, or not as its parameter."""

    def notice(self) -> None:
        """A gradient was made for a parameter that is watched. Raise in a backward that was not announced."""


def hook(rank: int, member: TrackedParameter, receiver: Receiver) -> RemovableHandle:
    """Pass on each gradient that autograd computes for a parameter, taken out of `p.grad`.

    References are weak: the garbage collector does not see cycles through torch's hooks.
    """
    receivers, members = weakref.ref(receiver), weakref.ref(member)

    def take(parameter: Tensor) -> None:
        gradient, known, receiver = parameter.grad, members(), receivers()
        if gradient is not None and known is not None and receiver is not None:
            parameter.grad = None
            if (complete := pass_on(rank, known, gradient, receiver)) is not None:
                receiver.round.complete(complete)

    handle: RemovableHandle = member.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return handle


def watch(member: TrackedParameter, receiver: Receiver) -> RemovableHandle:
    """Refuse gradients of backwards that were not announced; leave all others in `p.grad`, to be `taken` at the end."""
    receivers = weakref.ref(receiver)

    def look(parameter: Tensor) -> None:
        if (receiver := receivers()) is not None:
            receiver.notice()

    handle: RemovableHandle = member.parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    return handle


def taken(members: Iterable[TrackedParameter]) -> list[tuple[TrackedParameter, Tensor]]:
    """The gradients that autograd has left in `p.grad`, taken out of it."""
    with bypass_torch_function():
        found = [(member, gradient) for member in members if (gradient := member.parameter.grad) is not None]
        for member, _ in found:
            member.parameter.grad = None
    return found


def pass_on(rank: int, member: TrackedParameter, gradient: Tensor, receiver: Receiver) -> Bucket | None:
    """Give the round a gradient; the bucket that it completed, if any. This runs for every parameter in every backward,
    so the usual case is here: a contribution to a bucket that was not launched yet."""
    bucket = member.bucket
    if gradient.requires_grad or gradient.layout is not torch.strided:
        receiver.arrive(member, _plain(gradient, member, rank))
    elif receiver.round.state is not State.COLLECTING or bucket.launched or not bucket.fits(member, gradient):
        receiver.arrive(member, gradient)
    elif bucket.arrive(member, gradient):
        return bucket
    return None


def _plain(gradient: Tensor, member: TrackedParameter, rank: int) -> Tensor:
    """A dense gradient of what is sparse. Refuses one with a graph."""
    if gradient.requires_grad:
        raise SherdError(
            f"rank {rank}: backward(create_graph=True) on a distributed model would lose the graph of its "
            f"gradients; take the inner gradient with torch.autograd.grad(..., create_graph=True)"
        )
    return dense(gradient, member)


def dense(gradient: Tensor, member: TrackedParameter) -> Tensor:
    """The gradient itself, unless it is sparse."""
    if gradient.layout is torch.strided:
        return gradient
    if not member.warned:
        member.warned = True
        log.warning("the gradient of %r is sparse; it is used as a dense one, which takes more memory", member.name)
    return gradient.to_dense()
