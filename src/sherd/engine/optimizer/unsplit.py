"""The user's optimizer itself, stepping whole parameters, which this rank must have: for what is not elementwise, and
where gradients stay in `p.grad`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.optimizer.elementwise import why_not_elementwise
from sherd.engine.optimizer.forecast import merging_pays
from sherd.engine.optimizer.groups import Groups
from sherd.engine.optimizer.inner import step_unhooked
from sherd.engine.optimizer.runs import Part
from sherd.engine.optimizer.shard import OptimizerShard
from sherd.engine.optimizer.state import state_bytes
from sherd.engine.optimizer.whole import WholeShard
from sherd.engine.parameters.masters import make_masters, stepping_masters, with_masters


class UnsplitOptimizer:
    """Steps every parameter on every rank, from `p.grad`, with its state in the user's object."""

    gathers_state = False
    reads_sums = False

    def __init__(
        self, optimizer: Optimizer, buckets: BucketList, takes_closure: bool, known: Iterable[nn.Parameter] = ()
    ) -> None:
        self._optimizer = optimizer
        self._users = Groups(optimizer, known)
        self._kind = type(optimizer)
        self.follow(buckets)
        # A closure needs the rounded parameters, so it is evaluated before masters are stepped.
        self.takes_closure = takes_closure and not self._with_masters
        closure = inspect.signature(self._kind.step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty

    def follow(self, buckets: BucketList) -> None:
        """Step the parameters in these buckets from now on."""
        self._buckets = buckets
        make_masters({member.bucket for member in self._users.follow(buckets).values()})
        self._with_masters = with_masters(buckets.parameters)
        self._parameters = [member.parameter for member in buckets.parameters]
        self._homes = [member.home.data_ptr() for member in buckets.parameters]

    def step(self, closure: Any = None) -> Any:
        """One update, in which the closure may be called several times."""
        self._users.read()
        arguments = () if closure is None else (closure,)
        with stepping_masters(self._with_masters) if self._with_masters else nullcontext():
            loss = step_unhooked(self._optimizer, self._kind, *arguments)
        if [*map(Tensor.data_ptr, self._parameters)] != self._homes:
            for member in self._buckets.parameters:
                member.settle()  # p.data = p.data - ...
        return loss

    def whole_state(self, comm: Communicator) -> dict[Any, Any]:
        return dict(self._optimizer.state)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        return self._kind.state_dict(self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with stepping_masters(self._with_masters):  # torch gives state the dtype of parameters
            self._kind.load_state_dict(self._optimizer, dict(state))

    def kept(self) -> Iterable[Part]:
        """What is kept, by parameter."""
        for member in self._buckets.parameters:
            part = Part(member, member.offset, 0, member.entry.numel, whole=True)
            part.state = self._optimizer.state.get(member.parameter, {})
            yield part

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer.state.values())

    @property
    def users(self) -> tuple[Optimizer, type[Optimizer]]:
        return self._optimizer, self._kind

    def coming(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        state, groups = self._optimizer.state, self._optimizer.param_groups
        return [(group, [p for p in group["params"] if p.requires_grad and not state.get(p)]) for group in groups]

    def state_entries(self) -> int:
        return len(self._optimizer.state)


Updater = OptimizerShard | UnsplitOptimizer


def updater_for(
    optimizer: Optimizer,
    buckets: BucketList,
    owner: int | None,
    flat: bool,
    known: Iterable[nn.Parameter] = (),
    whole: bool = False,
) -> Updater:
    """What steps the parameters of `owner`, or everything; where that is elementwise, in runs, if gradients are `flat`
    or copying them pays. An owner of `whole` parameters steps each of them as it is."""
    if owner is None:
        elementwise = not why_not_elementwise(optimizer)
        if not (elementwise and (flat or merging_pays(optimizer))):
            return UnsplitOptimizer(optimizer, buckets, takes_closure=not elementwise, known=known)
    return (WholeShard if whole else OptimizerShard)(optimizer, buckets, owner, known)
