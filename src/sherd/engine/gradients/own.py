"""Gradients that stay on their rank: autograd leaves them in `p.grad`, and the optimizer steps from there.

For steps whose gradients are not summed: all steps of a world of one, and those of a strategy that averages parameters
instead. There are no hooks, and nothing is collective. Where the policy merges, an update reads gradients from flat
memory, into which they are copied together; one that has a bucket to itself is read where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sherd.comm import Communicator
from sherd.data import batch_weight
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.gradient import Gradient, Trained
from sherd.engine.gradients.path import GradientPath, refuse_pointless
from sherd.engine.gradients.round import dense
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.layout.norms import added, block_norms
from sherd.layout.placement import BLOCK, padded

_NOTHING = torch.empty(0)


class OwnGradients(GradientPath):
    """What autograd adds up in `p.grad`, with the weights of its backwards."""

    def __init__(self, trained: Trained, alone: Communicator, has_others: bool = False) -> None:
        self.together = alone
        self._has_others = has_others  # in other teams, which may have the samples that this rank lacks
        self._trained = trained
        self._aside: list[tuple[Gradient, list[tuple[nn.Parameter, Tensor | None]]]] = []
        self._hidden: dict[nn.Parameter, Tensor] = {}  # what is added up inside a window: `p.grad` shows none
        self._flat: dict[Bucket, tuple[Tensor, list[Tensor]]] = {}
        self._order: tuple[BucketList, Tensor] | None = None
        self.finite = True

    # ---------------------------------------------------------------- a backward

    def begin_round(self) -> None:
        """Where a backward has a weight of its own, it starts from nothing and is added at the end."""
        trained = self._trained
        trained.backwards += 1
        for gradient in trained.gradients:
            gradient.unclip()
        if members := trained.thawed():
            trained.train(members)
        if batch_weight.current() == 1.0 and all(map(_plain, trained.gradients)):
            return
        with bypass_torch_function():
            for gradient, buckets in trained.parts:
                its = [member.parameter for bucket in buckets for member in bucket.members]
                self._aside.append((gradient, [(p, self._hidden.pop(p, p.grad)) for p in its]))
            for member in trained.buckets.parameters:
                member.parameter.grad = None

    def end_round(self) -> None:
        """Multiply what it made by its weight, and add it to what was there."""
        aside, self._aside = self._aside, []
        if not aside:
            return
        with bypass_torch_function():
            made = any(parameter.grad is not None for _, its in aside for parameter, _ in its)
            if made:  # else it was another model's
                for gradient, its in aside:
                    self._weigh(gradient, its)
            for gradient, its in aside:
                for parameter, before in its:
                    made_here = parameter.grad
                    if before is not None and made_here is not None:
                        parameter.grad = before + made_here if before.requires_grad else before.add_(made_here)
                    elif before is not None:
                        parameter.grad = before
                if not gradient.window.whole:
                    self._hide(parameter for parameter, _ in its)

    def _hide(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden[parameter] = parameter.grad
                parameter.grad = None

    def _weigh(self, gradient: Gradient, its: list[tuple[nn.Parameter, Tensor | None]]) -> None:
        weights = gradient.weights
        self._scale([before for _, before in its if before is not None], weights.undivide())
        gradient.window.backward()
        factor, made = weights.enter(), [parameter.grad for parameter, _ in its if parameter.grad is not None]
        self._scale(made, factor)
        if made:
            weights.agreed(weights.local, float(bool(weights.weighed)), 1)
        else:
            weights.withdraw()

    def abandon_round(self, error: BaseException) -> None:
        """What it made is dropped."""
        aside, self._aside = self._aside, []
        for parameter, before in (each for _, its in aside for each in its):
            parameter.grad = before

    # ---------------------------------------------------------------- between backward and step

    def settle(self, wanted: Sequence[Gradient]) -> None:
        if not self._has_others:
            refuse_pointless(wanted)
        for parameter, hidden in self._hidden.items():
            parameter.grad = hidden
        self._hidden.clear()
        for gradient, buckets in self._trained.parts:
            divisor = gradient.weights.divisor()
            if divisor != 1.0:
                self._scale(_grads(buckets), 1.0 / divisor)

    def forget(self, gradient: Gradient, keep_zeros: bool) -> None:
        gradient.weights.forget()
        parameters = self._trained.parameters_of(gradient)
        if self._hidden:
            for parameter in parameters:
                self._hidden.pop(parameter, None)
        with bypass_torch_function():
            for parameter in parameters:
                if keep_zeros and (own := parameter.grad) is not None:
                    parameter.grad = torch.zeros_like(own)
                else:
                    parameter.grad = None

    def lend(self, buckets: Iterable[Bucket]) -> None:
        """Give these buckets the gradient that an update reads, and note which parameters have one."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        with bypass_torch_function(), torch.no_grad():
            for bucket in buckets:
                for member in bucket.members:
                    member.used = member.parameter.grad is not None
                if len(bucket.members) == 1:
                    gradient = bucket.members[0].parameter.grad
                    if gradient is not None:
                        bucket.owned_sum = bucket.members[0].entry.flattened(
                            dense(gradient, bucket.members[0]).detach()
                        )
                    continue
                bucket.owned_sum, views = self._flat_of(bucket)
                for member, view in zip(bucket.members, views, strict=True):
                    if member.used:
                        targets.append(view)
                        sources.append(dense(member.parameter.grad, member))  # type: ignore[arg-type]
            if targets:
                torch._foreach_copy_(targets, sources)

    def take_back(self, buckets: Iterable[Bucket]) -> None:
        """Hold no gradient any more."""
        for bucket in buckets:
            bucket.owned_sum = _NOTHING

    def measure(self) -> None:
        self._norm()

    def _norm(self) -> float:
        """The 2-norm of the gradients of this rank, with the bits that the same sums have under every strategy."""
        buckets = self._trained.buckets
        self.lend(buckets.buckets)
        norms = [self._block_norms(bucket) for bucket in buckets.buckets]
        for bucket, found in zip(buckets.buckets, norms, strict=True):
            rows = bucket.norms.numel()
            bucket.norms.copy_(found.view(-1, rows)[bucket.comm.rank] if rows else found)
            bucket.scaled, bucket.edited = 1.0, False
        self.take_back(buckets.buckets)  # an update that reads them there lends them again
        if not norms:
            return 0.0
        ordered = torch.cat(norms)[self._in_order(buckets)]
        self.finite = bool(torch.isfinite(ordered).all())
        return float(added(ordered))

    def clip(self, max_norm: float, by_program: bool) -> float:
        norm = self._norm()
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            self._scale(_grads(self._trained.buckets.buckets), factor)
            for gradient, its in self._trained.parts:
                gradient.clip((), factor)
                for bucket in its:
                    bucket.scaled *= factor
        return norm

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        """Autograd leaves them where they are."""

    def leave(self) -> None:
        self._flat.clear()

    def bytes(self) -> dict[str, int]:
        return {"gradients": sum(flat.nbytes for flat, _ in self._flat.values()), "buckets": 0}

    # ---------------------------------------------------------------- private

    def _flat_of(self, bucket: Bucket) -> tuple[Tensor, list[Tensor]]:
        if bucket not in self._flat:
            device = bucket.members[0].parameter.device
            flat = torch.zeros(bucket.described.numel, dtype=bucket.dtype, device=device)
            self._flat[bucket] = flat, [member.shaped_in(flat) for member in bucket.members]
        return self._flat[bucket]

    def _block_norms(self, bucket: Bucket) -> Tensor:
        """The norms of all blocks of a bucket, as `Bucket.measure` takes them."""
        norms = torch.zeros(bucket.described.numel // BLOCK, dtype=torch.float64)
        if not any(member.used for member in bucket.members):
            return norms
        if len(bucket.members) > 1:
            for member, view in zip(bucket.members, self._flat[bucket][1], strict=True):
                if not member.used:
                    view.zero_()
        found = block_norms(bucket.owned_sum)
        norms[: found.numel()] = found
        return norms

    def _in_order(self, buckets: BucketList) -> Tensor:
        """The index of each block, parameter by parameter: the order in which every strategy adds them."""
        if self._order is None or self._order[0] is not buckets:
            starts, total = {}, 0
            for bucket in buckets.buckets:
                starts[bucket] = total
                total += bucket.described.numel // BLOCK
            firsts = [
                (starts[m.bucket] + m.offset // BLOCK, padded(m.entry.numel) // BLOCK) for m in buckets.parameters
            ]
            indices = [torch.arange(first, first + blocks) for first, blocks in firsts]
            self._order = buckets, torch.cat(indices) if indices else torch.zeros(0, dtype=torch.int64)
        return self._order[1]

    @staticmethod
    def _scale(gradients: Iterable[Tensor], factor: float) -> None:
        gradients = list(gradients)
        if factor == 1.0 or not gradients:
            return
        with torch.no_grad():
            if factor == 0.0:
                torch._foreach_zero_(gradients)  # zero times NaN is NaN, and the loss of no tokens may well be NaN
            else:
                torch._foreach_mul_(gradients, factor)


def _plain(gradient: Gradient) -> bool:
    """Whether its next backward counts as much as any, and so can be added by autograd."""
    return gradient.weights.pending is None and not gradient.weights.weighed and gradient.window.length == 1


def _grads(buckets: Iterable[Bucket]) -> list[Tensor]:
    with bypass_torch_function():
        found = [member.parameter.grad for bucket in buckets for member in bucket.members]
    return [gradient for gradient in found if gradient is not None]
