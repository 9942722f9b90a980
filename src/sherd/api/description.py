"""The text of `sherd.describe`."""

from __future__ import annotations

from sherd.api.training import Training
from sherd.comm.counters import Counters, summed
from sherd.engine.choices import AccumulateAt


def described(training: Training) -> str:
    """Strategy, accumulation, transport, shards, buckets, calls and bytes by kind. Collective: it sums over ranks."""
    engine = training.engine
    layout, comm = engine.layout, engine.comm
    mine, coming = training.memory(), training.coming_state_bytes()
    mine["optimizer state"] += coming
    with comm.counters.agreeing(), comm.counters.between_steps():
        everybody, added = zip(*comm.all_gather_object((mine, coming)), strict=True)
    largest = max((bucket.numel for bucket in layout.buckets), default=0)
    owned = sum(bucket.slice_numel for bucket in layout.buckets)
    frozen = sum(member.entry.numel for bucket in engine.buckets.frozen for member in bucket.members)
    sliced = engine.store.updates_slices
    shard = f"each rank owns and updates {owned:,} elements" if sliced else "none: each rank updates everything"
    if engine.mesh.groups > 1:
        shard += f"; {engine.mesh.groups} groups of {engine.mesh.shard.world} ranks have a copy of the parameters each"
    lines = [
        f"strategy   {training.strategy.name}: parameters {training.choices.parameters.value}, "
        f"gradients {training.choices.gradients.value}, accumulated at the {training.choices.accumulate_at.value}",
        *_accumulation(training),
        f"ranks      {comm.world} over {comm.transport}",
        f"model      {layout.numel:,} trainable elements in {len(layout.entries)} parameters, "
        f"{layout.padded_numel:,} with padding; {frozen:,} frozen",
        f"shards     {shard}",
        f"buckets    {len(layout.buckets)}, the largest of {largest:,} elements",
        f"calls      {_calls(comm.counters)}",
        f"{'bytes':<20}{'this rank':>16}{'all ranks':>16}{'per parameter':>16}",
    ]
    numel = max(layout.numel, 1)
    for kind, own in mine.items():
        total = sum(each[kind] for each in everybody)
        lines.append(f"  {kind:<18}{own:>16,}{total:>16,}{total / numel:>16.2f}")
    if any(added):
        lines.append(f"  optimizer state: as it will be after the first step, which adds {sum(added):,} on all ranks")
    return "\n".join(lines)


def _calls(counters: Counters) -> str:
    """What this rank's last step called and sent."""
    if counters.last_step is None:
        return "not known before the first step"
    by_calls = sorted(counters.last_step.items(), key=lambda item: (-item[1].calls, item[0]))
    operations = ", ".join(f"{count.calls:,} {name}" for name, count in by_calls)
    total = summed(counters.last_step.values())
    sent = f"this rank sent {total.payload:,} bytes of tensors and {total.control:,} of control"
    return f"{total.calls:,} in the last step ({operations or 'nothing was communicated'}); {sent}"


def _accumulation(training: Training) -> list[str]:
    """Where backwards accumulate, if a step has several: it affects the bits, and strategies differ in it."""
    backwards, where = training.engine.window.length, training.choices.accumulate_at
    if backwards == 1:
        return []
    how = "the rank, one exchange per step" if where is AccumulateAt.RANK else "the owner, an exchange per backward"
    return [
        f"accumulate {backwards} backwards per step, added up at {how}; the same bits as another strategy with "
        f'accumulate_at="{where.value}"'
    ]
