"""The options of training: of steps, of the loss scale, of loaders."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sherd.config.options import Options, at_least, one_of, positive, power_of_two, refuse

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-autocast")
HALF_PRECISIONS = ("bf16", "fp16")
DTYPES = ("fp32", *HALF_PRECISIONS)
_ELSEWHERE = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    "single": "fp32",
    "amp": "bf16-autocast",
    "autocast": "bf16-autocast",
}
"""What torch and other libraries call these. Messages suggest ours: as strings they are too far from them."""


@dataclass(frozen=True, kw_only=True)
class LossScale(Options):
    """Dynamic loss scaling, which a training loop does not see: small gradients would vanish in 16 bits.

    `backward` starts from the scale instead of from 1, and gradients are divided by it when they have been summed over
    the ranks. `p.grad`, norms, clipping and the `.grad` of everything that is not distributed never show it. Inside a
    backward it does show: in hooks on tensors and modules, and in the `.grad` of what was told to `retain_grad()`.
    `torch.autograd.grad` is not scaled.

    An overflow, which is a gradient that is not finite on some rank, costs a step: no rank takes it, whatever
    `nonfinite` says, and a learning-rate scheduler waits too. (An optimizer that evaluates the loss several times in a
    step cannot skip it half-way: there it is an error.) All scaled models of a process share one scale. Scales
    and factors are powers of two, so that scaling rounds nothing.
    """

    initial: float = 2.0**16
    """The first scale. A backward that starts from a float16 starts from 2**15 at most: it holds no more."""

    growth_interval: int = 2000
    """After so many steps in a row without an overflow the scale is multiplied by `growth`."""

    growth: float = 2.0
    """At least 1."""

    backoff: float = 0.5
    """What the scale is multiplied by after `hysteresis` overflows. Below 1."""

    hysteresis: int = 1
    """How many overflows lower the scale, counted since it last changed or could have grown."""

    floor: float = 1.0
    """The smallest scale. What overflows there too is an error, which names the parameters."""

    ceiling: float = 2.0**24
    """The largest scale."""

    def validate(self) -> None:
        for name in ("initial", "growth", "backoff", "floor", "ceiling"):
            power_of_two(self, name)
        at_least(self, "growth_interval", 1)
        at_least(self, "growth", 1.0)
        if self.backoff >= 1.0:
            refuse(self, "backoff", "below 1, or the scale would never become smaller", "backoff=0.5")
        at_least(self, "hysteresis", 1)
        if not self.floor <= self.initial <= self.ceiling:
            refuse(self, "initial", f"between floor={self.floor:g} and ceiling={self.ceiling:g}")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """What a step is, under any strategy."""

    accumulate: int = 1
    """Every K-th `step()` is a real one; gradients of the backwards in between accumulate."""

    accumulate_at: str | None = None
    """Where they accumulate: on the "rank" that computed them (one exchange per step) or at the "owner" of each slice
    (one exchange per backward, no memory for a local gradient). None: "rank" for ddp and zero1, "owner" for zero2 and
    zero3. The two round differently: strategies with the same value give the same bits."""

    clip_norm: float | None = None
    """Scale the gradient of every step so that its 2-norm is at most this."""

    nonfinite: str | None = None
    """What to do about NaN or infinite gradients: "skip" the step on every rank, "raise", or "allow" them. By default
    they are skipped where gradients are summed over the ranks, because those of one rank would reach all others, and
    allowed, as in plain torch, in a world of one."""

    loss_scale: LossScale | None = None
    """Scale losses before their backward, and gradients back once they are summed. None: do not."""

    loss_reduction: str = "mean"
    """Whether the loss is the "mean" over its batch, so that gradients are averaged, or the "sum": they are added."""

    sync_buffers: str = "mean"
    """How buffers that changed, such as running statistics, are synchronised at each step: "mean" averages
    floating-point buffers and takes others from rank 0, "leader" takes all from rank 0, "none" leaves them alone."""

    bucket_bytes: int | None = None
    """Bytes of gradients that are reduced together. None: a fraction of the model, at most 2 MB; on one host
    models of up to 16 MB are reduced when a backward has ended."""

    check: str = "versions"
    """Which edits of parameters are detected where every rank has a copy: those that change torch's "versions", or all
    "edits", by checksums that are compared before each update. Where ranks share a copy all are detected."""

    groups: Mapping[str, Sequence[int]] | None = None
    """Which ranks hold which parameters and buffers, where ranks differ: patterns of names, each with its ranks, as in
    {"experts.0.*": [0, 1]}. None: all ranks hold everything."""

    precision: str = "fp32"
    """What the model computes with: "bf16" or "fp16" parameters, of which owners keep fp32 masters; "bf16-autocast",
    fp32 parameters that torch.autocast casts in the forward; or "fp32", the dtypes that the model has."""

    grad_dtype: str | None = None
    """The dtype in which the sum of 16-bit gradients is kept. None: that of the masters."""

    wire_dtype: str | None = None
    """The dtype in which gradients travel. None: that of the parameters."""

    keep_fp32: Sequence[str | type | types.EllipsisType] | None = None
    """Modules and parameters that stay in fp32 under a 16-bit precision: names, patterns of names, classes of modules,
    and ... for what is kept by default. None: that, which is norm layers and losses."""

    def validate(self) -> None:
        at_least(self, "accumulate", 1)
        if self.accumulate_at is not None:
            one_of(self, "accumulate_at", ("rank", "owner"))
        positive(self, "clip_norm")
        if self.nonfinite is not None:
            one_of(self, "nonfinite", ("skip", "raise", "allow"))
        one_of(self, "loss_reduction", ("mean", "sum"))
        one_of(self, "sync_buffers", ("mean", "leader", "none"))
        at_least(self, "bucket_bytes", 1024)
        one_of(self, "check", ("versions", "edits"))
        if self.groups is not None:
            # Sorted, and a copy: what is written in another order is the same.
            object.__setattr__(self, "groups", {name: _ranks(self, name, each) for name, each in self.groups.items()})
        self._validate_precision()

    @property
    def converts(self) -> bool:
        """Whether parameters are kept in 16 bits, with masters."""
        return self.precision in HALF_PRECISIONS

    def _validate_precision(self) -> None:
        one_of(self, "precision", PRECISIONS, _ELSEWHERE)
        if self.wire_dtype is not None:
            one_of(self, "wire_dtype", DTYPES, _ELSEWHERE)
        if self.grad_dtype is not None:
            one_of(self, "grad_dtype", ("fp32", "bf16"), _ELSEWHERE)  # unscaled, gradients may be too small for fp16
        if self.grad_dtype == "bf16" and self.precision == "fp16":
            refuse(
                self, "grad_dtype", '"fp32" with fp16 parameters, whose gradients bf16 would round', 'grad_dtype="fp32"'
            )
        for name in ("grad_dtype", "keep_fp32"):
            if getattr(self, name) is not None and self.precision not in HALF_PRECISIONS:
                refuse(self, name, f"used with 16-bit parameters, not precision={self.precision!r}", 'precision="bf16"')
        if self.keep_fp32 is not None:
            if isinstance(self.keep_fp32, str):
                refuse(self, "keep_fp32", "a list", f"keep_fp32=[{self.keep_fp32!r}]")
            if wrong := [each for each in self.keep_fp32 if not isinstance(each, str | type | types.EllipsisType)]:
                refuse(self, "keep_fp32", f"made of names, classes of modules and ..., found {wrong[0]!r}")
            object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        if self.precision == "fp16" and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())


def _ranks(options: Options, pattern: object, ranks: object) -> tuple[int, ...]:
    """The ranks of one group, in order."""
    fix = 'groups={"experts.0.*": [0, 1]}'
    if not isinstance(pattern, str) or not pattern:
        refuse(options, "groups", f"about names of parameters, found {pattern!r}", fix)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        refuse(options, "groups", f"a list of ranks for each pattern, found {ranks!r} for {pattern!r}", fix)
    if wrong := [rank for rank in ranks if type(rank) is not int or rank < 0]:
        refuse(options, "groups", f"made of ranks, found {wrong[0]!r} for {pattern!r}", fix)
    if len(set(ranks)) < len(ranks):
        refuse(options, "groups", f"without repeats, found {list(ranks)} for {pattern!r}", fix)
    return tuple(sorted(ranks))


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(Options):
    """How a loader is sharded."""

    global_batch: int | None = None
    """Samples per step on all ranks together. It sets the loader's batch size, which is per rank and backward. None:
    the loader keeps its own."""

    iterable: str | None = None
    """What an IterableDataset yields on each rank: the whole stream, so that its batches are to be "split" among the
    ranks, or that rank's own part, because it is "sharded" already. None: such a dataset is refused."""

    def validate(self) -> None:
        at_least(self, "global_batch", 1)
        if self.iterable is not None:
            one_of(self, "iterable", ("split", "sharded"))
