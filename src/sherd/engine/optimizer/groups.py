"""The groups of the user's optimizer, which the program may change between steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter

from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.shown import same
from sherd.errors import ConfigError

_PARAMETERS = itemgetter("params")


class Groups:
    """Which group each trained parameter is in. Refuses what this optimizer must not step."""

    def __init__(self, optimizer: Optimizer, known: Iterable[nn.Parameter] = ()) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._known: set[Tensor] = set(known)
        self.members: dict[Tensor, TrackedParameter] = {}
        """The trained parameters that are this optimizer's, in a group or not."""
        self.of: dict[Tensor, int] = {}
        """The group of each of them that is in one."""

    def follow(self, buckets: BucketList) -> dict[Tensor, TrackedParameter]:
        """These are trained from now on; gives those of them that are this optimizer's and were not before."""
        # A shard that is made for itself, without an engine, has all of them.
        ours = {m.parameter: m for m in buckets.parameters if m.bucket.optimizer in (None, self._optimizer)}
        self._others: dict[Tensor, TrackedParameter] = {
            m.parameter: m for m in buckets.parameters if m.parameter not in ours
        }
        joined: dict[Tensor, TrackedParameter] = {p: m for p, m in ours.items() if p not in self.members}
        self.members.update(joined)
        self._grouped: list[list[Tensor]] = []
        self._frozen: list[Tensor] = []  # in a group, but not trained: without a gradient torch skips them
        return joined

    def read(self) -> bool:
        """Whether they have changed since the last time."""
        groups = self._optimizer.param_groups
        known = len(groups) == len(self._grouped) and all(map(same, map(_PARAMETERS, groups), self._grouped))
        if known and not any(parameter.requires_grad for parameter in self._frozen):
            return False
        self.of = {}
        for index, group in enumerate(groups):
            for position, parameter in enumerate(group["params"]):
                if parameter in self.members:
                    self.of[parameter] = index
                else:
                    self._check(index, position, parameter)
        self._grouped = [list(group["params"]) for group in groups]
        self._frozen = [each for each in chain.from_iterable(self._grouped) if each not in self.members]
        return True

    def _check(self, index: int, position: int, parameter: Tensor) -> None:
        if parameter in self._others:
            raise ConfigError(
                f"group {index} of {self._kind.__name__} has parameter {self._others[parameter].name!r}, which "
                f"another optimizer had at sherd.distribute; leave it there, and set its lr in both to change "
                f"which one trains it"
            )
        if parameter not in self._known and parameter.requires_grad:
            raise ConfigError(
                f"the optimizer's group {index} has at position {position} a parameter of shape "
                f"{tuple(parameter.shape)} that was not distributed; the optimizer's parameters must belong "
                f"to the distributed model: build it from model.parameters()"
            )
