"""Frozen, validated options: the base of every option class, and the communicator's options.

An option class is a frozen, keyword-only dataclass derived from `Options`. Building one checks the names, then the
types (from the annotations), then the ranges (in its `validate()`), so that every existing object is valid:

    @dataclass(frozen=True, kw_only=True)
    class ExampleOptions(Options):
        depth: int = 2

        def validate(self) -> None:
            positive(self, "depth")
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from sherd.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing_extensions import Self

TRANSPORTS = ("auto", "host", "cluster", "c10d")
ORDERS = ("tree", "transport")
CHUNK_ALIGNMENT = 4096
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-autocast")
HALF_PRECISIONS = ("bf16", "fp16")
DTYPES = ("fp32", *HALF_PRECISIONS)
_OTHER_NAMES = {
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


class Options:
    """The base of frozen option classes: unknown names, wrong types and bad values raise `ConfigError`."""

    def __new__(cls, *args: object, **options: object) -> Self:
        # Checked here because the dataclass's own __init__ would raise a bare TypeError for a misspelt name.
        if args:
            raise ConfigError(f"{cls.__name__} takes its options by keyword; found the positional value {args[0]!r}")
        _refuse_unknown(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            _check_type(self, name, hint)
        self.validate()

    def validate(self) -> None:
        """Check ranges and combinations; the types are already checked. Subclasses override it."""

    def replace(self, **changes: Any) -> Self:
        """The same options with some changed, validated again."""
        return type(self)(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Option names and values in declaration order, as `from_dict` takes them."""
        return {name: getattr(self, name) for name in _names(type(self))}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from names and values; missing names keep their defaults."""
        _refuse_unknown(cls, options)
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class CommOptions(Options):
    """How ranks communicate."""

    transport: str = "auto"
    """What carries the data: "host" (shared memory between the ranks of one host), "cluster" (shared memory inside each
    host, torch.distributed between hosts), "c10d" (torch.distributed), or "auto": the fastest that works."""

    group: int | None = None
    """G of the summation tree: sums run in rank order inside groups of G consecutive ranks, then in group order. None:
    the number of ranks per host."""

    timeout: float = 1800.0
    """Seconds to wait for a rank to reach a call before raising an error."""

    warn_after: float | None = None
    """Seconds to wait for a rank to reach a call before a warning names it; less than `timeout`. None: 30 s, or a third
    of `timeout` if that is less."""

    check: bool = True
    """Compare a fingerprint of every call between the ranks, so that mismatched calls raise an error."""

    host: str | None = None
    """A label that overrides which ranks share a host: those with the same label. None: detected."""

    order: str = "tree"
    """"tree" sums in the order of the summation tree; "transport" in the backend's own order."""

    chunk_bytes: int = 1 << 20
    """Bytes of a staging chunk of the host transport: a multiple of 4096."""

    chunks: int = 2
    """Staging chunks per rank of the host transport: how far a writer may run ahead of its readers. A small number
    stays in the cache."""

    def validate(self) -> None:
        one_of(self, "transport", TRANSPORTS)
        one_of(self, "order", ORDERS)
        at_least(self, "group", 1)
        positive(self, "timeout")
        positive(self, "warn_after")
        if self.warn_after is not None and self.warn_after >= self.timeout:
            expected = f"less than timeout={self.timeout!r}, or no warning would ever come"
            refuse(self, "warn_after", expected, f"warn_after={self.timeout / 10:g}")
        if self.host is not None and not self.host.strip():
            refuse(self, "host", "a non-empty label, or None", 'host="a"')
        multiple_of(self, "chunk_bytes", CHUNK_ALIGNMENT)
        at_least(self, "chunks", 1)

    @property
    def warn_seconds(self) -> float:
        """`warn_after`, or its default."""
        return min(30.0, self.timeout / 3) if self.warn_after is None else self.warn_after

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Options from SHERD_TRANSPORT, SHERD_TIMEOUT, SHERD_WARN_AFTER, SHERD_HOST and SHERD_CHECK.

        Arguments override the environment; an empty variable counts as unset.
        """
        _refuse_unknown(cls, overrides)
        found: dict[str, str] = {}
        options = dict(overrides)
        for name, parse in _FROM_ENV.items():
            variable = f"SHERD_{name.upper()}"
            text = os.environ.get(variable, "")
            if text and name not in overrides:
                options[name] = parse(variable, text)
                found[variable] = text
        try:
            return cls(**options)
        except ConfigError as error:
            if not found:
                raise
            read = ", ".join(f"{variable}={text!r}" for variable, text in found.items())
            raise ConfigError(f"{error} (from the environment: {read})") from None


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
    """Bytes of gradients that are reduced together. None: a fraction of the model, at most 2 MB."""

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
        one_of(self, "precision", PRECISIONS)
        if self.wire_dtype is not None:
            one_of(self, "wire_dtype", DTYPES)
        if self.grad_dtype is not None:
            one_of(self, "grad_dtype", ("fp32", "bf16"))  # unscaled, gradients may be too small for fp16
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


# Validators: each takes the options and the name of one, so that its message can show both.


def refuse(options: Options, name: str, expected: str, write: str | None = None) -> NoReturn:
    """Raise a `ConfigError` about an option: what was found, what was expected, what to write instead."""
    advice = f"; write {write}" if write else ""
    raise ConfigError(f"{type(options).__name__}: {name}={getattr(options, name)!r} must be {expected}{advice}")


def positive(options: Options, name: str) -> None:
    """The option is a finite number above zero, or None."""
    value = getattr(options, name)
    if value is not None and not (math.isfinite(value) and value > 0):
        refuse(options, name, "a finite number above 0")


def at_least(options: Options, name: str, least: float) -> None:
    """The option is a finite number of at least `least`, or None."""
    value = getattr(options, name)
    if value is not None and not (math.isfinite(value) and value >= least):
        refuse(options, name, f"at least {least}")


def power_of_two(options: Options, name: str) -> None:
    """The option is a power of two, such as 0.5 or 65536."""
    value = getattr(options, name)
    if not math.isfinite(value) or value <= 0 or math.frexp(value)[0] != 0.5:
        up = 2.0 ** round(math.log2(value)) if math.isfinite(value) and value > 0 else 1.0
        refuse(options, name, "a power of two, so that scaling rounds nothing", f"{name}={up:g}")


def multiple_of(options: Options, name: str, unit: int) -> None:
    """The option is a positive multiple of `unit`."""
    value = getattr(options, name)
    if value <= 0 or value % unit:
        up = max(unit, -(-value // unit) * unit)
        refuse(options, name, f"a positive multiple of {unit}", f"{name}={up}")


def one_of(options: Options, name: str, valid: Collection[str]) -> None:
    """The option is one of the valid names."""
    value = getattr(options, name)
    if value not in valid:
        likely = _OTHER_NAMES.get(value, value)
        raise ConfigError(f"{type(options).__name__}: unknown {name}={value!r}; {nearest(likely, valid)}")


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


# Parsers of environment variables.


def _text(variable: str, text: str) -> str:
    return text


def _seconds(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} must be a number of seconds, such as {variable}=60") from None


def flag_from_env(variable: str, default: bool) -> bool:
    """0 or 1 in the environment; the default if it is unset or empty."""
    text = os.environ.get(variable, "")
    return _flag(variable, text) if text else default


def _flag(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{variable}={text!r} must be 0 or 1; write {variable}=1 to turn it on")
    return text == "1"


_FROM_ENV: dict[str, Callable[[str, str], object]] = {
    "transport": _text,
    "timeout": _seconds,
    "warn_after": _seconds,
    "host": _text,
    "check": _flag,
}


# Names and types, read from the dataclass.


def _names(cls: type[Options]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(typing.cast(Any, cls)) if field.init)


def _hints(cls: type[Options]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _names(cls)}


def _refuse_unknown(cls: type[Options], names: Iterable[object]) -> None:
    for name in names:
        if name not in _names(cls):
            raise ConfigError(f"{cls.__name__} has no option {name!r}; {nearest(name, _names(cls))}")


def _check_type(options: Options, name: str, hint: Any) -> None:
    """Refuse a value that its annotation does not allow; an int where a float belongs is converted."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = tuple(typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if union else (hint,)))
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return  # Any, Literal and the like: left to validate()
    value = getattr(options, name)
    if type(value) is int and float in kinds and int not in kinds:
        object.__setattr__(options, name, float(value))
        return
    # bool is a subclass of int, but True is not a count; it is probably meant for another option.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        refuse(options, name, f"of type {wanted}, not {type(value).__name__}")
