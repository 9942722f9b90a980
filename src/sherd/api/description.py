"""The text of `sherd.describe`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from sherd.api.training import Training
from sherd.comm.counters import Counters, summed
from sherd.engine.consensus import distance
from sherd.engine.contents import Role, pieces, scalars
from sherd.engine.engine import Engine
from sherd.engine.policy import AccumulateAt, Owns
from sherd.layout.entry import Dtypes
from sherd.machine import half_kernels


def described(training: Training) -> str:
    """Strategy, accumulation, transport, shards, buckets, calls and bytes by kind. Collective: it sums over ranks."""
    engine = training.engine
    layout, comm, policy = engine.layout, engine.comm, engine.policy
    mine, coming = training.memory(), training.coming_state_bytes()
    mine["optimizer state"] += coming
    owned_bytes = {role.value: 0 for role in Role}
    for piece in pieces(engine):
        owned_bytes[piece.role.value] += piece.tensor.nbytes
    others = (each.value for each in scalars(engine))
    owned_bytes[Role.STATE.value] += sum(each.nbytes for each in others if isinstance(each, Tensor) and each.dim())
    everyone = engine.teams.everyone
    with everyone.counters.agreeing(), everyone.counters.between_steps():
        everybody, added, owners = zip(*everyone.all_gather_object((mine, coming, owned_bytes)), strict=True)
    largest = max((bucket.numel for bucket in layout.buckets), default=0)
    owned = sum(bucket.described.owned_numel(bucket.comm.rank) for bucket in engine.buckets.buckets)
    frozen = sum(each.entry.numel for each in engine.buckets.asleep)
    whole = [each for each in engine.buckets.catalogue if each.holder is not None]
    who, everything = ("this", "what it holds") if engine.buckets.grouped else ("each", "everything")
    sliced = policy.owns is Owns.SLICE
    shard = f"{'this' if whole else who} rank owns and updates {owned:,} elements"
    if not sliced:
        shard = f"none: each rank updates {everything}"
    if whole:
        here = sum(each.holder == comm.rank for each in whole)
        shard += f"; {len(whole)} parameters are owned whole, {here} of them by this rank"
    if engine.mesh.groups > 1:
        shard += f"; {engine.mesh.groups} groups of {engine.mesh.shard.world} ranks have a copy of the parameters each"
    lines = [
        f"strategy   {training.strategy.name}: parameters {policy.home.value}, gradients {policy.keeps.value}, "
        f"accumulated at the {policy.accumulate_at.value}",
        *_accumulation(training),
        *_precision(engine),
        *_scale(engine),
        f"ranks      {engine.teams.everyone.world} over {engine.teams.everyone.transport}",
        *([f"cpu        {half_kernels()}"] if engine.inventory.device.type == "cpu" else ()),
        *_teams(engine),
        f"model      {layout.numel:,} trainable elements in {len(layout.entries)} parameters, "
        f"{layout.padded_numel:,} with padding; {frozen:,} frozen",
        *_groups(training),
        f"shards     {shard}",
        f"buckets    {len(layout.buckets)}, the largest of {largest:,} elements",
        f"calls      {_calls(comm.counters)}",
        f"{'bytes':<20}{'this rank':>16}{'all ranks':>16}{'per parameter':>16}",
    ]
    lines += _rows(mine, everybody, layout.numel)
    if any(added):
        lines.append(f"  optimizer state: as it will be after the first step, which adds {sum(added):,} on all ranks")
    lines.append("of these, what each rank owns, and writes into checkpoints; without padding and copies:")
    return "\n".join([*lines, *_rows(owned_bytes, owners, layout.numel)])


def _scale(engine: Engine) -> Iterator[str]:
    """How losses are scaled, if they are."""
    scale = engine.scale
    if scale is not None:
        skipped = f"{scale.total_overflows} step{'' if scale.total_overflows == 1 else 's'} skipped by overflows"
        yield f"loss scale {scale.value:,g}, {scale.good} steps after the last change or overflow; {skipped}"


def _precision(engine: Engine) -> Iterator[str]:
    """What is computed, sent, summed and stepped in which dtypes, where these are not all the same."""
    if engine.precision == "bf16-autocast":
        yield "precision  bf16-autocast: the forward runs under torch.autocast, parameters stay as they are"
    by_dtypes: dict[Dtypes, int] = {}
    for bucket in engine.layout.buckets:
        numel = sum(engine.layout.entries[entry].numel for entry in bucket.members)
        by_dtypes[bucket.dtypes] = by_dtypes.get(bucket.dtypes, 0) + numel
    for dtypes, numel in by_dtypes.items():
        if dtypes != Dtypes.all(dtypes.parameter):
            masters = f" with {dtypes.update} masters" if dtypes.update != dtypes.parameter else ""
            yield (
                f"precision  {numel:,} elements in {dtypes.parameter}{masters}; gradients travel in {dtypes.wire} and "
                f"are summed in {dtypes.sum}"
            )


def _teams(engine: Engine) -> Iterator[str]:
    """Who trains together, and how far the teams are from each other. Collective, where there are several."""
    teams, drift = engine.teams, engine.policy.drift
    if teams.count == 1:
        return
    alone = teams.team.world == 1
    who = "every rank trains alone" if alone else f"{teams.count} groups of {teams.team.world} ranks train together"
    since = "" if drift is None else f", {drift.since} steps after the last exchange"
    yield f"teams      {who}; this one is {distance(engine):.3g} from the consensus{since}"


def _groups(training: Training) -> Iterator[str]:
    """Who holds what, where ranks differ."""
    buckets = training.engine.buckets
    for ranks in buckets.groups[1:]:
        its = [each.entry.numel for each in (*buckets.catalogue, *buckets.asleep) if each.ranks == ranks]
        yield f"group      ranks {', '.join(map(str, ranks or ()))} hold {sum(its):,} elements in {len(its)} parameters"


def _rows(mine: Mapping[str, int], everybody: Sequence[Mapping[str, int]], numel: int) -> Iterator[str]:
    for kind, own in mine.items():
        total = sum(each[kind] for each in everybody)
        yield f"  {kind:<18}{own:>16,}{total:>16,}{total / max(numel, 1):>16.2f}"


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
    backwards, where = training.engine.trained.accumulate, training.engine.policy.accumulate_at
    if backwards == 1:
        return []
    how = "the rank, one exchange per step" if where is AccumulateAt.RANK else "the owner, an exchange per backward"
    return [
        f"accumulate {backwards} backwards per step, added up at {how}; the same bits as another strategy with "
        f'accumulate_at="{where.value}"'
    ]
