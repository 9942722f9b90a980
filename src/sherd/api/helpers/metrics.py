"""Metrics over all ranks: every sample counts once, although ranks repeat some where an epoch ends unevenly."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sherd.api.helpers.coordination import exchange
from sherd.api.helpers.process import communicator
from sherd.data import batch_weight
from sherd.data.loader import is_counted
from sherd.errors import ConfigError

_NAN = torch.tensor(math.nan, dtype=torch.float64)


class Term(NamedTuple):
    """What a rank contributes to a mean. It is sent as a plain tuple."""

    value: Any
    weight: Any
    problem: str
    """why there is no value; all ranks then raise it"""


@overload
def mean(value: Tensor, n: float | Tensor | None = None, *, loader: DataLoader[Any] | None = None) -> Tensor: ...
@overload
def mean(value: float, n: float | Tensor | None = None, *, loader: DataLoader[Any] | None = None) -> float: ...
def mean(value: Any, n: Any = None, *, loader: Any = None) -> Any:
    """The mean over all ranks, where each passes the mean over its own `n` samples. Collective.

        accuracy = sherd.mean((model(x).argmax(1) == y).double().mean())

    By default `n` is the number of samples in the current batch: the one that a distributed loader yielded last, in a
    loop that is still running. After the loop, pass it. With several loaders in a `zip` or the like, `loader` says
    whose batch is meant. Samples that were repeated to give every rank a batch do not count; a rank with n=0 adds
    nothing, whatever its value. Takes a number and returns a float, or takes a tensor and returns one of the same shape
    and, if floating-point, dtype. Summed in float64, and the same on every rank.
    """
    comm = communicator()
    sent = tuple(_term(value, n, loader))
    terms = [Term(*each) for each in exchange(comm, "sherd.mean", sent)]
    _raise_first([term.problem for term in terms])
    found = _weighted([(rank, term) for rank, term in enumerate(terms) if term.weight])
    if found is None:  # no rank has samples
        found = torch.full_like(value, math.nan, dtype=torch.float64) if isinstance(value, Tensor) else _NAN
    if isinstance(value, Tensor):
        return found.to(value.device, value.dtype if value.is_floating_point() else torch.float64)
    return found if found.dim() else found.item()


def gather(value: Any, *, rows: bool = True, loader: DataLoader[Any] | None = None) -> Any:
    """The values of all ranks, on every rank. Collective.

        labels, guesses = sherd.gather((y, model(x).argmax(1)))

    Tensors with a first dimension, alone or in a tuple, list or dict, are concatenated along it in rank order, which is
    the order of a single process if they belong to the current batch. Repeated samples are removed from tensors that
    are as long as this batch or as an epoch of a loader. Where that is ambiguous and makes a difference, `loader` says
    which loader they belong to. With `rows=False` rows are not samples, and all are kept. Any other value becomes a
    list with one item per rank.
    """
    comm = communicator()
    sent = _sent(value, rows, loader)
    received = exchange(comm, "sherd.gather", sent)
    _raise_first([problem for problem, _ in received])
    everybody = [each for _, each in received]
    outlines = [_outline(each) if _is_rows(each) else "" for each in everybody]
    if not any(outlines):
        return everybody
    for rank, outline in enumerate(outlines):
        if outline != outlines[0]:
            raise ConfigError(
                f"rank {comm.rank}: sherd.gather got {outlines[0] or 'no rows'} on rank 0 and {outline or 'no rows'} "
                f"on rank {rank}; pass tensors that differ only in their first dimension (*), on every rank or on none"
            )
    return _joined(everybody, value)


def _raise_first(problems: Sequence[str]) -> None:
    """What one rank refuses, all refuse, with the same message."""
    for rank, problem in enumerate(problems):
        if problem:
            raise ConfigError(f"rank {rank}: {problem}")


def _checked(loader: Any) -> None:
    if loader is not None and not is_counted(loader):
        raise ConfigError(
            f"got loader=, a {type(loader).__name__} that was not distributed; write the loader that sherd.distribute "
            f"returned"
        )


# ---------------------------------------------------------------- means


def _term(value: Any, n: Any, loader: Any) -> Term:
    """What this rank contributes: numbers as they are, tensors in float64 on the CPU."""
    try:
        weight = _samples(loader) if n is None else _number_of(n)
        if n is not None and loader is not None:
            raise ConfigError("got both n= and loader=; write one of them")
        return Term(_number(value) if weight else None, weight, "")
    except (ConfigError, OverflowError) as error:
        return Term(None, 0, f"sherd.mean {error}")


def _samples(loader: Any) -> int:
    """How many samples of the current batch count."""
    _checked(loader)
    found = {batch.counted for batch in batch_weight.batches(loader)}
    if not found:
        raise ConfigError(
            "got no n=, and there is no current batch: no loop over a distributed loader is running; write "
            "sherd.mean(value, n=samples), with the number of samples that the value is a mean over"
        )
    if len(found) > 1:
        raise ConfigError(
            f"got no n=, and several loaders are in use, whose current batches have {_listed(found)} samples; write "
            f"sherd.mean(value, loader=...) with the one you mean, or n="
        )
    return found.pop()


def _number_of(n: Any) -> int | float:
    if hasattr(n, "item"):  # a tensor, or numpy's
        n = n.item() if n.size == 1 or (isinstance(n, Tensor) and n.numel() == 1) else math.nan
    if not isinstance(n, numbers.Real) or not 0 <= float(n) < math.inf:
        raise ConfigError(f"got n={n!r}; write the number of samples that the value is a mean over")
    return float(n)


def _number(value: Any) -> float | Tensor:
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach().to("cpu", torch.float64)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's
        value = value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    raise ConfigError(f"got a {type(value).__name__}; write a number or a tensor of real numbers")


def _weighted(terms: Sequence[tuple[int, Term]]) -> Tensor | None:
    """The mean, or None if there are no terms."""
    values = [torch.as_tensor(term.value, dtype=torch.float64) for _, term in terms]
    for (rank, _), value in zip(terms, values, strict=True):
        if value.shape != values[0].shape:
            raise ConfigError(
                f"sherd.mean got shape {tuple(values[0].shape)} on rank {terms[0][0]} and {tuple(value.shape)} on rank "
                f"{rank}; take the mean over this rank's samples first: value.mean(0)"
            )
    if not values:
        return None
    # Weights that add up to at most 1 cannot make the sum overflow, and scaling by powers of 2 is exact.
    largest = max(math.frexp(term.weight)[1] for _, term in terms) + len(terms).bit_length()
    weights = [math.ldexp(term.weight, -largest) for _, term in terms]
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += value * weight
    return total / math.fsum(weights)


# ---------------------------------------------------------------- rows


def _sent(value: Any, rows: bool, loader: Any) -> tuple[str, Any]:
    """What is wrong, or "", and what to send."""
    try:
        _checked(loader)
        if loader is not None and not (rows and _is_rows(value)):
            raise ConfigError("got loader=, which only applies to tensors of samples; leave it out, and rows=False too")
        return "", _own_rows(value, loader) if rows and _is_rows(value) else _on_cpu(value)
    except ConfigError as error:
        return f"sherd.gather {error}", None


def _is_rows(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    inside = list(value.values()) if type(value) is dict else value if type(value) in (tuple, list) else ()
    return bool(inside) and all(map(_is_rows, inside))


def _own_rows(value: Any, loader: Any) -> Any:
    """The rows that are this rank's own; repeated ones come last."""
    if not isinstance(value, Tensor):
        return _mapped(lambda each: _own_rows(each, loader), value)
    rows = value.detach().cpu()
    found = batch_weight.matching(len(rows), loader)
    if len(found) > 1:
        own = _listed({counts.counted for counts in found})
        raise ConfigError(
            f"got {len(rows)} rows, of which {own} are this rank's own, depending on the loader they belong to; write "
            f"sherd.gather(rows, loader=...) with that loader, or rows=False if they are not samples"
        )
    if not found and loader is not None:
        raise ConfigError(
            f"got {len(rows)} rows and loader=, but neither its current batch nor its epoch has that many"
        )
    return rows[: found.pop().counted] if found else rows


def _outline(value: Any) -> str:
    """Its structure as text, which must be the same on every rank."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(['*', *map(str, value.shape[1:])])}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_outline(each)}' for key, each in value.items())}}}"
    return f"{type(value).__name__}({', '.join(map(_outline, value))})"


def _joined(values: Sequence[Any], like: Any) -> Any:
    if isinstance(like, Tensor):
        return torch.cat(list(values)).to(like.device)
    if type(like) is dict:
        return {key: _joined([each[key] for each in values], like[key]) for key in like}
    return type(like)(_joined(each, own) for *each, own in zip(*values, like, strict=True))


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else _mapped(_on_cpu, value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A dict, tuple or list with its items changed; anything else as it is."""
    if type(value) is dict:
        return {key: change(each) for key, each in value.items()}
    return type(value)(map(change, value)) if type(value) in (tuple, list) else value


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
