"""Figures of all ranks: every sample counts once, though an uneven end of an epoch makes ranks repeat some."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
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
    """What a rank adds to a mean. It travels as a plain tuple."""

    value: Any
    weight: Any
    problem: str
    """why there is none, which all ranks then say"""


@overload
def mean(value: Tensor, n: float | Tensor | None = None, *, loader: DataLoader[Any] | None = None) -> Tensor: ...
@overload
def mean(value: float, n: float | Tensor | None = None, *, loader: DataLoader[Any] | None = None) -> float: ...
def mean(value: Any, n: Any = None, *, loader: Any = None) -> Any:
    """The mean over all ranks, each of which has the mean over `n` samples of its own. Collective.

        accuracy = sherd.mean((model(x).argmax(1) == y).double().mean())

    `n` is by default the number of samples in the batch at hand: the one that a distributed loader yielded last, in a
    loop that goes on. After the loop, say it. Of several loaders in turns, as in a `zip`, `loader` says whose batch is
    meant. Samples that were repeated, so that every rank has a batch, are not counted; a rank with n=0 adds nothing,
    whatever its value is. Takes a number, and gives a float, or a tensor, and gives one of the same shape and, if that
    is of floats, dtype. It is summed up in float64, and is the same on every rank.
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
    """What all ranks have, on every rank. Collective.

        labels, guesses = sherd.gather((y, model(x).argmax(1)))

    Tensors with a first dimension, alone or in a tuple, list or dict, are put together along it in rank order, which is
    the order of one process where they belong to the batch at hand. Samples that were repeated are taken out, of
    tensors as long as that batch or as an epoch of a loader. Where both could be meant, or those of several loaders,
    and it makes a difference, `loader` says whose they are. With `rows=False` the rows are no samples, and all are
    kept. Anything else becomes a list with an item per rank.
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
                f"on rank {rank}; pass tensors on every rank that differ in their first dimension (*) alone, or on none"
            )
    return _joined(everybody, value)


def _raise_first(problems: Sequence[str]) -> None:
    """What one rank refuses all refuse, in the same words."""
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
    """What this rank adds: numbers as they are, tensors in float64 on the CPU."""
    try:
        weight = _samples(loader) if n is None else _number_of(n)
        if n is not None and loader is not None:
            raise ConfigError("got both n= and loader=; write one of them")
        return Term(_number(value) if weight else None, weight, "")
    except (ConfigError, OverflowError) as error:
        return Term(None, 0, f"sherd.mean {error}")


def _samples(loader: Any) -> int:
    """How many samples count in the batch at hand."""
    _checked(loader)
    found = {batch.counted for batch in batch_weight.batches(loader)}
    if not found:
        raise ConfigError(
            "got no n=, and no batch of a distributed loader is at hand: no loop over one is under way; write "
            "sherd.mean(value, n=samples), with the number of samples that the value is a mean over"
        )
    if len(found) > 1:
        raise ConfigError(
            f"got no n=, and several loaders are in use, whose batches have {_listed(found)} samples; write "
            f"sherd.mean(value, loader=...) with the one that is meant, or n="
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
    """The mean, or None if there is nothing to take it of."""
    values = [torch.as_tensor(term.value, dtype=torch.float64) for _, term in terms]
    for (rank, _), value in zip(terms, values, strict=True):
        if value.shape != values[0].shape:
            raise ConfigError(
                f"sherd.mean got shape {tuple(values[0].shape)} on rank {terms[0][0]} and {tuple(value.shape)} on rank "
                f"{rank}; take the mean over this rank's samples first: value.mean(0)"
            )
    if not values:
        return None
    # Weights that add up to 1 at most cannot make a sum overflow, and powers of 2 change no bit of it.
    largest = max(math.frexp(term.weight)[1] for _, term in terms) + len(terms).bit_length()
    weights = [math.ldexp(term.weight, -largest) for _, term in terms]
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += value * weight
    return total / math.fsum(weights)


# ---------------------------------------------------------------- rows


def _sent(value: Any, rows: bool, loader: Any) -> tuple[str, Any]:
    """Why there is nothing to send, and what is sent."""
    try:
        _checked(loader)
        if loader is not None and not (rows and _is_rows(value)):
            raise ConfigError("got loader=, which is about tensors of samples; leave it out, and rows=False too")
        return "", _own_rows(value, loader) if rows and _is_rows(value) else _on_cpu(value)
    except ConfigError as error:
        return f"sherd.gather {error}", None


def _is_rows(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    inside = list(value.values()) if type(value) is dict else value if type(value) in (tuple, list) else ()
    return bool(inside) and all(map(_is_rows, inside))


def _own_rows(value: Any, loader: Any) -> Any:
    """The rows that are this rank's own: repeated ones are the last."""
    if type(value) is dict:
        return {key: _own_rows(each, loader) for key, each in value.items()}
    if not isinstance(value, Tensor):
        return type(value)(_own_rows(each, loader) for each in value)
    rows = value.detach().cpu()
    found = batch_weight.matching(len(rows), loader)
    if len(found) > 1:
        own = _listed({counts.counted for counts in found})
        raise ConfigError(
            f"got {len(rows)} rows, of which {own} are this rank's own, depending on the loader that they belong to; "
            f"write sherd.gather(rows, loader=...) with it, or rows=False if they are no samples"
        )
    if not found and loader is not None:
        raise ConfigError(
            f"got {len(rows)} rows and loader=, of which neither the batch at hand nor the epoch has so many"
        )
    return rows[: found.pop().counted] if found else rows


def _outline(value: Any) -> str:
    """Its structure in words, which must be the same on every rank."""
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
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (tuple, list) else value


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
