"""What follows a gradient that overflows, or not, where losses are scaled."""

from __future__ import annotations

import logging

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.gradients.gradient import Gradient
from sherd.engine.gradients.loss_scale import Change, DynamicScale
from sherd.errors import SherdError

log = logging.getLogger("sherd")


def follow(scale: DynamicScale, gradient: Gradient, finite: bool, told: bool) -> Change:
    """Let the loss scale follow a gradient that all ranks have found `finite`, or not; a change is logged if it is to
    be `told`."""
    before, change = scale.value, scale.step(finite)
    if not told or change not in (Change.GROWN, Change.REDUCED):
        return change
    text, count = f"the loss scale becomes {scale.value:g}", scale.options.growth_interval
    if finite:
        log.info("%s: %s after %d steps without an overflow", gradient.label, text, count)
    else:
        more = f"{scale.total_overflows} step{'s' * (scale.total_overflows > 1)} skipped so far"
        log.info("%s: the gradient overflows at a loss scale of %g; %s (%s)", gradient.label, before, text, more)
    return change


def exhausted(comm: Communicator, buckets: BucketList, scale: DynamicScale, gradient: Gradient) -> SherdError:
    """The error of a gradient that overflows at the smallest loss scale. Collective."""
    with labelled(f"what overflows in {gradient.label}"), comm.counters.agreeing():
        found = comm.all_gather_object([bucket.not_finite() for bucket in buckets.buckets])
    bad = {name for names in found for each in names for name in each}
    names = [each.entry.name for each in buckets.catalogue if each.entry.name in bad]
    told = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return SherdError(
        f"rank {comm.number}: {gradient.label}: the gradient of {told} is NaN or infinite even at a loss "
        f"scale of {scale.value:g}, the smallest allowed. Scaling is then seldom the cause: look for NaN or "
        f"infinity in the batch and in the loss, and try a lower learning rate. If losses are meant to be that "
        f"large, allow smaller scales with loss_scale=sherd.LossScale(floor={scale.value / 16:g})"
    )
