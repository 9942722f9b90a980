"""Whether an optimizer is elementwise, so that it may be stepped in parts. Found by trying it on small tensors.

A list of names would not do: the answer depends on options too, and users write their own optimizers.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.optimizer.inner import hyper_parameters, is_torchs
from sherd.engine.optimizer.probe import BY_CLOSURE, Probe, WhyNot
from sherd.engine.optimizer.regimes import RANDOM, SPECIAL
from sherd.optim.layerwise import is_layerwise
from sherd.patches.own_collectives import no_collectives

Shapes = Mapping[int, tuple[int, ...]]
"""By number of dimensions."""

_ODD: Shapes = {0: (), 1: (517,), 2: (23, 45), 3: (7, 9, 11), 4: (5, 7, 3, 9)}
"""Cuts fall inside rows, columns and channels."""
_ROUND: Shapes = {0: (), 1: (768,), 2: (48, 32), 3: (48, 4, 4), 4: (48, 4, 2, 2)}
"""For optimizers that divide parameters among ranks and need sizes that divide evenly."""
_LARGE, _LARGE_MATRIX = 128, (129, 131)
"""A rule for matrices may apply to large ones only. It usually looks at the shorter side, with a bound of 128."""
_UNITS = {1: (*range(1, 64, 3), 127, 517), **{unit: range(unit, 1024, 3 * unit) for unit in (16, 32, 64)}}
"""Elements that merged tensors may be a multiple of, and the sizes that show it: the last elements, which do not fill a
vector or two, are often rounded in another way than the rest. fp32 has vectors of at most 16 elements, bf16 of 32."""
_RATE = 0.01
"""The learning rate of the probes: it does not affect the answer, but a warm-up's rate of 0 would hide it."""


def why_not_elementwise(optimizer: Optimizer) -> WhyNot | None:
    """Why `optimizer` cannot be stepped in parts, or None if the parts have exactly the bits of the whole.

    Neither the optimizer nor the random state of torch and Python is changed, and nothing is sent.
    """
    if is_layerwise(optimizer):
        return None  # apart from the norms of layers, which an optimizer shard gives it
    return _answer(optimizer, Probe.why_not)


def why_not_whole(optimizer: Optimizer) -> WhyNot | None:
    """Why the parameters of `optimizer` cannot be stepped each by another rank, which has the whole of it, or None if
    they then have exactly the bits of all stepped together. Of one that draws random numbers that is not asked."""
    return _answer(optimizer, Probe.why_not_apart)


Question = Callable[[Probe], WhyNot | None]


def _answer(optimizer: Optimizer, question: Question) -> WhyNot | None:
    if _needs_closure(optimizer):
        return BY_CLOSURE
    key = _key(optimizer)
    if key is None:
        return _ask(optimizer, question)
    if (question, key) not in _known:
        _known[question, key] = _ask(optimizer, question)
    return _known[question, key]


_known: dict[Any, WhyNot | None] = {}


def merging_unit(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Of how many elements a tensor of this group and dtype must be a multiple, so that it may be stepped as one with
    the next one, with padding between them; 0 if it never may. They then have exactly the bits that they have by
    themselves, on this machine."""
    if is_layerwise(optimizer):
        return 0  # it must see where a layer ends
    if "param_names" in group and not is_torchs(optimizer):
        return 0  # it may follow the names
    hyper = _probed(group)
    key = type(optimizer), repr(_rough(hyper)), dtype
    if is_torchs(optimizer) and key in _merging:
        return _merging[key]
    model = next((each for each in group["params"] if each.numel() and optimizer.state.get(each)), None)
    device = next((each.device for each in group["params"] if not each.is_meta), torch.device("cpu"))
    found = 0
    with undisturbed(optimizer) as called:
        for unit, sizes in _UNITS.items():
            probe = Probe(optimizer, hyper, [(size,) for size in sizes], dtype, device, model, ())
            # In 16 bits the rounding hides most differences: no run is long enough to show that there are none.
            if not found and (dtype.itemsize > 2 or unit == 64) and probe.same_merged() and not called:
                found = unit
    return _merging.setdefault(key, found) if is_torchs(optimizer) else found


_merging: dict[Any, int] = {}


def _key(optimizer: Optimizer) -> Any:
    """What the answer depends on, if that is known; None for a user's class, which may depend on anything."""
    if not is_torchs(optimizer) or optimizer.state:
        return None
    groups = []
    for group in optimizer.param_groups:
        kinds = {(each.dtype, each.device, each.dim(), _is_large(each)) for each in group["params"]}
        options = {**hyper_parameters(group), "lr": isinstance(group.get("lr"), Tensor), "initial_lr": None}
        groups.append((repr(options), frozenset(kinds)))
    return type(optimizer), tuple(groups)


def _ask(optimizer: Optimizer, question: Question) -> WhyNot | None:
    if name := own_collective(optimizer):
        return _communicating(name)
    with undisturbed(optimizer) as called:
        why_not = next((found for probe in _probes(optimizer, _ODD) if (found := question(probe))), None)
    return _communicating(called[0]) if called else why_not


def own_collective(optimizer: Optimizer) -> str | None:
    """The first collective of torch.distributed that `step()` calls, if any. Nothing is sent.

    A step that fails before it communicates looks like one that does not.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if is_torchs(optimizer):
        return None  # torch's own optimizers call none
    with undisturbed(optimizer) as called:
        for probe in _probes(optimizer, _ROUND):
            with suppress(Exception):  # a user's optimizer may raise anything
                probe.record(RANDOM[:1])
    return called[0] if called else None


def _communicating(collective: str) -> WhyNot:
    return WhyNot(
        f"its step() communicates on its own, with {collective} of torch.distributed",
        "use its single-process variant: sherd averages the gradients before step() and shards what can be sharded",
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    try:
        _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return any(each.name == "closure" and each.default is inspect.Parameter.empty for each in arguments)


@contextmanager
def undisturbed(optimizer: Optimizer) -> Iterator[list[str]]:
    """Inside, random states are preserved, collectives raise, and nothing is compiled: that takes seconds and counts
    towards torch.compile's recompile limit. Yields the names of the collectives that were called."""
    devices = {each.device for group in optimizer.param_groups for each in group["params"]}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    before = random.getstate()
    try:
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.random.fork_rng(accelerators), no_collectives() as called:
            yield called
    finally:
        random.setstate(before)


def _is_large(parameter: Tensor) -> bool:
    return parameter.dim() == 2 and min(parameter.shape) >= _LARGE


def _probes(optimizer: Optimizer, shapes_of: Shapes) -> Iterator[Probe]:
    """One probe per distinct set of hyper-parameters, dtype and device."""
    seen: set[Any] = set()
    for group in optimizer.param_groups:
        hyper = _probed(group)
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in group["params"]:
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            by_kind.setdefault((parameter.dtype, device), []).append(parameter)
        for (dtype, device), parameters in (by_kind or {(torch.float32, torch.device("cpu")): []}).items():
            # Always a matrix: a rule for matrices must show even where parameters are empty until they are gathered.
            usual = dict.fromkeys((shapes_of[2], *(shapes_of.get(each.dim(), shapes_of[2]) for each in parameters)))
            large = any(map(_is_large, parameters))
            model = next((each for each in parameters if each.numel() and optimizer.state.get(each)), None)
            for shapes in (tuple(usual), *([(_LARGE_MATRIX,)] if large else ())):
                rest = (dtype, device, shapes, model is None)
                exact, rough = (repr(hyper), *rest), (repr(_rough(hyper)), *rest)
                if exact not in seen:
                    special = () if rough in seen or shapes == (_LARGE_MATRIX,) else SPECIAL
                    yield Probe(optimizer, hyper, shapes, dtype, device, model, special)
                seen.update((exact, rough))


def small_shape(dimensions: int) -> tuple[int, ...]:
    """The shape of a small tensor that optimizers are tried with."""
    return _ODD.get(dimensions, _ODD[2])


def _probed(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters to probe with."""
    hyper = hyper_parameters(group)
    hyper.pop("initial_lr", None)
    if "lr" in hyper:
        hyper["lr"] = torch.full_like(hyper["lr"], _RATE) if isinstance(hyper["lr"], Tensor) else _RATE
    return hyper


def _rough(value: Any) -> Any:
    """A number as its type: groups that differ only in rate or decay follow one rule, so one probe is enough."""
    if isinstance(value, dict):
        return {key: _rough(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_rough(each) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (value > 0) - (value < 0), abs(value) >= 1
    return value
