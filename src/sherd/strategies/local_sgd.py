"""Local SGD: teams train apart, and every so many steps their parameters are averaged.

After a summed warm-up it is post-local SGD (Lin et al. 2018, https://arxiv.org/abs/1808.07217); with outer="slowmo"
slow momentum is added (Wang et al. 2019, https://arxiv.org/abs/1910.00643).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator, Handle
from sherd.config import at_least, one_of, positive, refuse
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.optimizer.elementwise import why_not_elementwise
from sherd.engine.optimizer.forecast import Forecast
from sherd.engine.policy import ExchangePolicy, StepContext
from sherd.errors import ConfigError
from sherd.strategies.averaging import Averaging, AveragingPolicy
from sherd.strategies.crossing import Roll, share_of, spread, together
from sherd.strategies.outer import Outer
from sherd.strategies.outer_policy import OuterPolicy
from sherd.strategies.registry import register

PARAMETERS, WITH_STATE = AVERAGED = ("parameters", "parameters and optimizer state")
_UNDER_WAY = 2
_INSTEAD = 'write average="parameters", which leaves every team its own state'


@register("local-sgd", elsewhere=("post local sgd", "parameter averaging", "model averaging", "fedavg", "slowmo"))
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Ranks, or hosts, or teams of ranks train apart; every so many steps their parameters become their mean.

    Teams that have trained on different numbers of samples since the last exchange are weighed by them.
    """

    every: int = 8

    average: str = PARAMETERS
    """What is averaged: "parameters", or "parameters and optimizer state": of that, what is kept per element, such as
    momentum. Step counters stay each team's own."""

    outer: str | None = None
    """"slowmo" steps the mean with momentum: u = slow_momentum * u + (before - mean), after = before - slow_lr * u,
    with the parameters `before` these steps. Its state takes 8 bytes per parameter, sharded over all ranks."""

    slow_lr: float = 1.0
    slow_momentum: float = 0.5

    def validate(self) -> None:
        super().validate()
        one_of(self, "average", AVERAGED)
        if self.outer is not None:
            one_of(self, "outer", ("slowmo",))
        positive(self, "slow_lr")
        at_least(self, "slow_momentum", 0)
        if self.slow_momentum >= 1:
            refuse(self, "slow_momentum", "less than 1", "slow_momentum=0.5")
        if self.outer and self.average == WITH_STATE:
            refuse(self, "average", f'"parameters" with outer={self.outer!r}', 'average="parameters"')

    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        inner = self.inner_policy(comm, device)
        if self.outer is not None:
            return OuterPolicy(inner, self.every, self.warmup, Outer(self.slow_lr, self.slow_momentum, nesterov=False))
        return MeanPolicy(inner, self.every, self.warmup, self.average == WITH_STATE)


class MeanPolicy(AveragingPolicy):
    """The mean of what teams have, weighed by samples where these differ."""

    def __init__(self, inner: ExchangePolicy, every: int, warmup: int, with_state: bool) -> None:
        super().__init__(inner, every, warmup)
        self._with_state = with_state
        self._seen: dict[Optimizer | None, float] = {}  # how many samples there were at the last exchange

    def restart(self, buckets: Sequence[Bucket], samples: float | None) -> None:
        if samples is not None:
            self._seen.update({bucket.optimizer: samples for bucket in buckets})

    def meet(self, s: StepContext) -> Iterable[tuple[Bucket, Tensor]]:
        optimizer, names = s.buckets[0].optimizer, [member.name for bucket in s.buckets for member in bucket.members]
        owned = [(bucket, bucket.values.owned.detach()) for bucket in s.buckets]
        if self._with_state and s.shard is not None:
            for bucket, key, flat in _state(s):
                names.append(f"{bucket.members[0].name} {key}")
                owned.append((bucket, flat))
        seen, self._seen[optimizer] = self._seen.get(optimizer, 0.0), s.samples
        factor = Roll(s.teams, s.samples - seen, names, s.step, aside=False).factor()
        shares = [share_of(*each) for each in owned]
        parameters, found = {id(share) for share in shares[: len(s.buckets)]}, []

        def put(share: Tensor, mean: Tensor) -> None:
            if id(share) in parameters:
                found.append(float(torch.dist(share, mean)) ** 2)
            share.copy_(mean)

        under_way: deque[tuple[Handle, list[Tensor]]] = deque()
        for views in together(shares, lambda share: share):
            flat = torch.cat([view.reshape(-1) for view in views])
            if factor is not None:
                flat.mul_(factor)
            under_way.append((s.across.all_reduce(flat, flat, op="mean" if factor is None else "sum"), views))
            if len(under_way) > _UNDER_WAY:
                handle, those = under_way.popleft()
                spread(handle.wait(), those, put)
        for handle, those in under_way:
            spread(handle.wait(), those, put)
        self.drift.squared = sum(found)
        return owned

    def refuses(self, optimizer: Optimizer) -> str | None:
        if self._with_state:
            if why_not := why_not_elementwise(optimizer):
                return f"its state cannot be averaged: {why_not.cause}; {_INSTEAD}"
            if whole := [
                dtype for dtype in Forecast(optimizer, type(optimizer)).dtypes() if not dtype.is_floating_point
            ]:
                return f"its state cannot be averaged: it keeps {whole[0]} for every element; {_INSTEAD}"
        return super().refuses(optimizer)


def _state(s: StepContext) -> Iterator[tuple[Bucket, object, Tensor]]:
    for bucket, key, flat in s.shard.flat_state(s.buckets):
        if not flat.is_floating_point():
            raise ConfigError(f"the optimizer keeps {key!r} in {flat.dtype}, which cannot be averaged; {_INSTEAD}")
        yield bucket, key, flat
