"""Cases are run, and what they return is compared."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from sherd import SherdError, TimedOut
from sherd.testing import RankPool
from tests.helpers.training import WORLD, connected
from tests.what_works.cases import TIMEOUT, Case, Run


def verify(case: Case, pool: RankPool) -> None:
    """Run a case everywhere and raise AssertionError about the first thing that is not as it should be."""
    if case.refusal is not None:
        _check_refusals(case, pool.run(refusals, case))
        return
    ranks = pool.run(results, case)
    first = ranks[0][case.strategies[0]]
    assert first, f"{case.name} returned nothing, so nothing was compared"
    for rank, found in enumerate(ranks):
        for strategy in case.strategies:
            _same(found[strategy], first, f"{strategy} on rank {rank}, and {case.strategies[0]} on rank 0")
    if case.rtol is not None:
        torch.manual_seed(0)
        _close(first, case.script(Run()), case.rtol, "the ranks, and plain torch")


# -------------------------------------------------------------------- on the ranks


def results(case: Case) -> dict[str, Any]:
    """What a case returns under each strategy."""
    found = {}
    with connected(timeout=TIMEOUT) as comm:
        for strategy in case.strategies:
            torch.manual_seed(0)
            try:
                found[strategy] = case.script(Run(strategy, comm))
            except Exception as error:
                raise RuntimeError(f"{case.name} under {strategy}: {type(error).__name__}: {error}") from error
            comm.barrier().wait()  # a case that leaves a rank behind fails itself, and not the next
    return found


def refusals(case: Case) -> dict[str, tuple[str, str] | None]:
    """The error, by its kind and words, in which a case ends under each strategy; None where there is none."""
    return {strategy: _refusal(case, strategy) for strategy in case.strategies}


def _refusal(case: Case, strategy: str) -> tuple[str, str] | None:
    torch.manual_seed(0)
    with connected(timeout=TIMEOUT) as comm:  # each its own: an error may break it
        try:
            case.script(Run(strategy, comm))
        except TimedOut as error:
            raise AssertionError(f"{case.name} under {strategy} was only ended by the timeout: {error}") from error
        except SherdError as error:
            return type(error).__name__, str(error)
    return None


# -------------------------------------------------------------------- compared


def _check_refusals(case: Case, ranks: list[dict[str, tuple[str, str] | None]]) -> None:
    assert len(ranks) == WORLD
    kinds = set()
    for rank, found in enumerate(ranks):
        for strategy, error in found.items():
            where = f"{case.name} under {strategy} on rank {rank}"
            if rank not in case.on:
                assert error is None, f"{where} ended in {error}"
                continue
            assert error is not None, f"{where} was not refused"
            kind, text = error
            assert re.search(case.refusal, text, re.DOTALL), f"{where}: found {text!r}, expected {case.refusal!r}"
            kinds.add(kind)
    assert len(kinds) == 1, f"{case.name}: the errors differ between ranks or strategies: {sorted(kinds)}"


def _same(found: Any, expected: Any, what: str) -> None:
    """Two dicts have the same bits."""
    assert found.keys() == expected.keys(), f"{what}: {list(found)} and {list(expected)}"
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[name] == value, f"{what}: {name} is {found[name]!r} and {value!r}"
            continue
        _alike(found[name], value, f"{what}: {name}")
        error = "" if torch.equal(found[name], value) else f"by {(found[name] - value).abs().max():.3g}"
        assert not error, f"{what}: {name} differs {error}"


def _close(found: Any, expected: Any, rtol: float, what: str) -> None:
    """Two dicts of tensors agree to `rtol` of the largest element; what is no tensor is equal."""
    assert found.keys() == expected.keys(), f"{what}: {list(found)} and {list(expected)}"
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[name] == value, f"{what}: {name} is {found[name]!r} and {value!r}"
            continue
        _alike(found[name], value, f"{what}: {name}")
        if value.numel():
            error, largest = (found[name] - value).abs().max(), value.abs().max()
            assert error <= rtol * largest, f"{what}: {name} differs by {error:.3g} of {largest:.3g}"


def _alike(found: Any, expected: Tensor, what: str) -> None:
    assert isinstance(found, Tensor), f"{what} is {found!r} and a tensor"
    there, here = (found.dtype, found.shape), (expected.dtype, expected.shape)
    assert there == here, f"{what} is {there} and {here}"
