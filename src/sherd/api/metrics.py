"""Figures of all ranks: every sample counts once, though an uneven end of an epoch makes ranks repeat some."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from sherd.api.helpers import exchange
from sherd.api.process import communicator
from sherd.data import share
from sherd.errors import ConfigError


class Term(NamedTuple):
    """What a rank adds to a mean. It travels as a plain tuple."""

    value: Any
    weight: Any
    problem: str
    """why there is none, which all ranks then say"""


@overload
def mean(value: Tensor, n: float | Tensor | None = None) -> Tensor: ...
@overload
def mean(value: float, n: float | Tensor | None = None) -> float: ...
def mean(value: Any, n: Any = None) -> Any:
    """The mean over all ranks, each of which has the mean over `n` samples of its own. Collective.

        accuracy = sherd.mean((model(x).argmax(1) == y).double().mean())

    `n` is by default the number of samples in the batch that the distributed loader yielded last on this rank.
    Samples that were repeated, so that every rank has a batch, are not counted; a rank with n=0 adds nothing, even if
    its value is NaN. Takes a number, and gives a float, or a tensor, and gives one of the same shape and, if that is of
    floats, dtype. It is summed up in float64, and is the same on every rank.
    """
    comm = communicator()
    sent = tuple(_term(value, n))
    terms = [Term(*each) for each in exchange(comm, "sherd.mean", sent)]
    for rank, term in enumerate(terms):
        if term.problem:
            raise ConfigError(f"rank {rank}: {term.problem}")
    counted = [(rank, term) for rank, term in enumerate(terms) if term.weight]
    if not any(isinstance(term.value, Tensor) for _, term in counted):
        found: Any = _ratio([term for _, term in counted])
    else:
        found = _weighted(counted)
    if not isinstance(value, Tensor):
        return float(found)
    like = value.dtype if value.is_floating_point() else torch.float64
    result = torch.as_tensor(found, dtype=torch.float64).to(value.device, like)
    return result.expand(value.shape).clone() if result.shape != value.shape else result


def gather(value: Any) -> Any:
    """What all ranks have, on every rank. Collective.

        labels, guesses = sherd.gather((y, model(x).argmax(1)))

    Tensors with a first dimension, alone or in a tuple, list or dict, are put together along it in rank order, which is
    the order of one process where they belong to the batch at hand. Samples that were repeated are taken out, of
    tensors as long as that batch or, after the loop, as the epoch. Anything else becomes a list with an item per rank.
    """
    comm = communicator()
    everybody = exchange(comm, "sherd.gather", _own_rows(value) if _is_rows(value) else _on_cpu(value))
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


# ---------------------------------------------------------------- means


def _term(value: Any, n: Any) -> Term:
    """What this rank adds: numbers as they are, tensors in float64 on the CPU."""
    if n is None:
        last = share.yielded()
        if last is None or last.batch is None:
            return Term(
                None,
                0,
                "sherd.mean got no n=, and no distributed loader has yielded a batch yet; write "
                "sherd.mean(value, n=len(y)), or pass the loader to sherd.distribute",
            )
        n = last.batch.counted
    if hasattr(n, "item"):  # a tensor, or numpy's
        n = n.item() if n.size == 1 or (isinstance(n, Tensor) and n.numel() == 1) else math.nan
    if not isinstance(n, numbers.Real) or not 0 <= float(n) < math.inf:
        return Term(None, 0, f"sherd.mean got n={n!r}; write the number of samples that the value is a mean over")
    if isinstance(value, Tensor) and not value.is_complex():
        return Term(value.detach().to("cpu", torch.float64), _plain(n), "")
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's
        value = value.item()
    if isinstance(value, numbers.Real):
        return Term(_plain(value), _plain(n), "")
    return Term(None, 0, f"sherd.mean got a {type(value).__name__}; write a number or a tensor of numbers")


def _plain(number: Any) -> int | float:
    return int(number) if isinstance(number, numbers.Integral) else float(number)


def _ratio(terms: Sequence[Term]) -> float:
    total = sum(term.weight for term in terms)
    if not total:
        return math.nan
    if all(isinstance(each, int) for term in terms for each in term[:2]):
        return float(sum(term.value * term.weight for term in terms) / total)
    return float(math.fsum(term.value * term.weight for term in terms) / total)


def _weighted(terms: Sequence[tuple[int, Term]]) -> Tensor:
    values = [torch.as_tensor(term.value, dtype=torch.float64) for _, term in terms]
    for (rank, _), value in zip(terms, values, strict=True):
        if value.shape != values[0].shape:
            raise ConfigError(
                f"sherd.mean got shape {tuple(values[0].shape)} on rank {terms[0][0]} and {tuple(value.shape)} on rank "
                f"{rank}; take the mean over this rank's samples first: value.mean(0)"
            )
    total, weights = torch.zeros_like(values[0]), 0.0
    for (_, term), value in zip(terms, values, strict=True):
        total += value * term.weight
        weights += term.weight
    return total / weights


# ---------------------------------------------------------------- rows


def _is_rows(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    inside = list(value.values()) if type(value) is dict else value if type(value) in (tuple, list) else ()
    return bool(inside) and all(map(_is_rows, inside))


def _own_rows(value: Any) -> Any:
    """The rows that are this rank's own: repeated ones are the last."""
    if type(value) is dict:
        return {key: _own_rows(each) for key, each in value.items()}
    if not isinstance(value, Tensor):
        return type(value)(map(_own_rows, value))
    rows = value.detach().cpu()
    found = next((tally for tally in share.tallies() if tally.loaded == len(rows)), None)
    return rows if found is None else rows[: found.counted]


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
    return value.detach().cpu() if isinstance(value, Tensor) else value
