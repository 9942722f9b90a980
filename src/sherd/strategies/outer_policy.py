"""Teams that train apart, and an outer optimizer that steps what they have made: all at once, or in fragments.

    step    0 ........... start ........ turn ........ merge ........ start + every
                          |              |             |
                          values set     the mean is   the new values arrive, and are
                          out            stepped, and  mixed with what the team has
                                         sets out      made meanwhile

Everything happens at fixed steps, whatever the network does, so that a run can be repeated. Without a delay the three
are one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.parameters.mesh import Teams
from sherd.engine.policy import ExchangePolicy, StepContext
from sherd.strategies.averaging import AveragingPolicy
from sherd.strategies.outer import Fragment, Outer, cut


class OuterPolicy(AveragingPolicy):
    """An outer step every so often. `delay` steps lie between the start of an exchange and its end."""

    def __init__(
        self,
        inner: ExchangePolicy,
        every: int,
        warmup: int,
        outer: Outer,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 1.0,
    ) -> None:
        super().__init__(inner, every, warmup)
        self.drift.partial = delay > 0 and mix < 1
        self._outer = outer
        self._count = fragments
        self._delay = delay
        self._mix = mix
        self._fragments: dict[Optimizer | None, list[Fragment]] = {}
        self._known: set[Bucket] = set()

    # ---------------------------------------------------------------- when

    def due(self, step: int) -> bool:
        after = self.after_warmup(step)
        lags = {0, self._delay, self._turn, -1 if self._delay else 0}
        return any(self._starts(after - lag, number) for lag in lags for number in range(self._count))

    @property
    def _turn(self) -> int:
        """How many steps after its start the mean of a fragment is stepped."""
        return (self._delay + 1) // 2

    def _starts(self, after: int, number: int) -> bool:
        """Whether a fragment's values set out so many steps after the warm-up."""
        return after > 0 and after % self._every == (number + 1) * self._every // self._count % self._every

    # ---------------------------------------------------------------- what

    def join(self, teams: Teams, buckets: BucketList) -> None:
        self._order = {member: place for place, member in enumerate(buckets.parameters)}
        super().join(teams, buckets)

    def restart(self, buckets: Sequence[Bucket], samples: float | None) -> None:
        if not self._alone:
            self._follow(buckets)
            for optimizer in dict.fromkeys(bucket.optimizer for bucket in buckets):
                for fragment in self._fragments.get(optimizer, ()):
                    fragment.restart(samples)

    def _follow(self, buckets: Sequence[Bucket]) -> None:
        """Exchange what is not known yet, from the values that it has now, which are the same in all teams."""
        new = [bucket for bucket in buckets if bucket not in self._known]
        for optimizer in dict.fromkeys(bucket.optimizer for bucket in new):
            its = [bucket for bucket in new if bucket.optimizer is optimizer]
            members = [member for bucket in its for member in bucket.members]
            members.sort(key=lambda member: self._order.get(member, len(self._order)))
            across, outer = self._teams.across, self._outer
            if optimizer in self._fragments:  # unfrozen
                self._fragments[optimizer][-1].add(members, True, across, outer)
            else:
                fragments = self._fragments[optimizer] = [Fragment() for _ in range(self._count)]
                for fragment, row in zip(fragments, cut(members, self._count), strict=True):
                    fragment.add(row, self._count == 1, across, outer)
        self._known.update(new)

    def before_update(self, s: StepContext) -> None:
        if not self._alone and not self._known.issuperset(s.buckets):
            self._follow(s.buckets)
        super().before_update(s)

    def meet(self, s: StepContext) -> Iterable[tuple[Bucket, Tensor]]:
        after, written = self.after_warmup(s.step), dict[Bucket, None]()
        for number, fragment in enumerate(self._fragments.get(s.buckets[0].optimizer, ())):
            starts = self._starts(after, number)
            if self._delay and self._starts(after - self._turn, number):
                fragment.send_new()
                self._note(fragment)
            if self._delay and self._starts(after - self._delay, number):
                fragment.merge(self._mix)
                written.update(dict.fromkeys(fragment.buckets))
            if starts or (self._delay and self._starts(after + 1, number)):
                fragment.call(self._teams, s, aside=bool(self._delay) and not starts)
            if starts and self._delay:
                fragment.send_values()
            elif starts:
                fragment.exchange()
                self._note(fragment)
                written.update(dict.fromkeys(fragment.buckets))
        return [(bucket, bucket.values.owned.detach()) for bucket in written]

    def _note(self, fragment: Fragment) -> None:
        """A rank sees the mean of its own part only: one of as many as there are teams."""
        self.drift.squared = (self.drift.squared or 0.0) + fragment.squared * self._teams.count

    # ---------------------------------------------------------------- the rest

    def refuses(self, optimizer: Optimizer) -> str | None:
        trained = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        if 1 < self._count > trained:
            most = f"write fragments={trained}" if trained > 1 else "leave fragments= out"
            return f"it has {trained} trainable parameters, which cannot be cut into fragments={self._count}; {most}"
        return super().refuses(optimizer)

    def bytes(self) -> dict[str, int]:
        return {"outer state": sum(each.nbytes for those in self._fragments.values() for each in those)}
