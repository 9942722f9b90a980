"""Who mixes parameters with whom, and with what weights: the arithmetic of gossip.

A *round* is one mixing matrix: row i has what rank i takes of every rank, itself included, so y_i = sum of w_ij x_j. A
column has what becomes of a rank's values. If columns sum to 1, the sum over the ranks stays what it was (*mass*). If
rows do too, equal values stay equal, and the ranks approach their mean. If rows do not, they approach it only after
division by the *mass* that each rank holds, which is mixed the same way: push-sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sherd.errors import ConfigError

TOLERANCE = 1e-6
"""How far a sum of weights may be from 1: rounding of a matrix in single precision, but not a slip."""
_GONE = 1e-6
"""An eigenvalue below this is a zero that was computed."""


@dataclass(frozen=True)
class Mixing:
    """One round."""

    rows: tuple[dict[int, float], ...]
    """what each rank takes: weights by rank, in ascending order, without zeros"""

    @classmethod
    def of(cls, matrix: Sequence[Sequence[float]]) -> Mixing:
        """The round of a full matrix."""
        return cls(tuple({rank: weight for rank, weight in enumerate(row) if weight} for row in matrix))

    @classmethod
    def around(cls, world: int, offsets: Sequence[int]) -> Mixing:
        """Every rank gives to those at these distances after it, and all weights are equal."""
        near = sorted({0, *(offset % world for offset in offsets)})
        return cls(tuple(dict.fromkeys(sorted((i - o) % world for o in near), 1 / len(near)) for i in range(world)))

    def sources(self, rank: int) -> list[int]:
        """The others that a rank takes from."""
        return [each for each in self.rows[rank] if each != rank]

    def targets(self, rank: int) -> list[int]:
        """The others that take from a rank."""
        return [each for each, row in enumerate(self.rows) if rank in row and each != rank]

    def of_mass(self, mass: Sequence[float]) -> tuple[float, ...]:
        """What every rank holds after this round of what all of them held before."""
        return tuple(sum(weight * mass[rank] for rank, weight in row.items()) for row in self.rows)

    def rounded(self, bits: int) -> Mixing:
        """Weights that are multiples of 2^-bits, each column summing to exactly 1.

        A third is not a float: three of them sum to more than 1, and parameters would grow by that in every round. A
        rank keeps what the others do not take.
        """
        unit = 2.0**-bits
        rows = [{rank: round(weight / unit) * unit for rank, weight in row.items()} for row in self.rows]
        for rank, row in enumerate(rows):
            row[rank] = 1.0 - sum(other.get(rank, 0.0) for other in rows if other is not row)
        return Mixing(tuple(rows))

    def matrix(self) -> torch.Tensor:
        """The full matrix, in double precision."""
        full = torch.zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        for rank, row in enumerate(self.rows):
            for source, weight in row.items():
                full[rank, source] = weight
        return full


@dataclass(frozen=True)
class Topology:
    """Rounds that are repeated in turn."""

    rounds: tuple[Mixing, ...]

    def at(self, number: int, bits: int | None = None) -> Mixing:
        """The round with this number, from 0; with `bits`, `rounded` to these."""
        place = number % len(self.rounds)
        if bits is None:
            return self.rounds[place]
        if (place, bits) not in self._rounded:
            self._rounded[place, bits] = self.rounds[place].rounded(bits)
        return self._rounded[place, bits]

    @cached_property
    def _rounded(self) -> dict[tuple[int, int], Mixing]:
        return {}

    @property
    def world(self) -> int:
        return len(self.rounds[0].rows)

    @cached_property
    def contraction(self) -> float:
        """What one round leaves of the distance from the mean, in the long run; 0 if it is gone after a few.

        The second largest eigenvalue of all rounds in turn, as an average per round. 1 minus that is the spectral gap.
        """
        full = torch.eye(self.world, dtype=torch.float64)
        for mixing in self.rounds:
            full = mixing.matrix() @ full
        sizes = torch.linalg.eigvals(full).abs().sort(descending=True).values.tolist()
        second = sizes[1] if self.world > 1 else 0.0
        return 0.0 if second < _GONE else float(second ** (1 / len(self.rounds)))


def ring(world: int) -> Topology:
    """Every rank mixes with the one before and the one after it, a third each; two ranks, a half each."""
    return Topology((Mixing.around(world, (-1, 1)),))


def exponential(world: int) -> Topology:
    """Every rank gives to those 1, 2, 4, ... after it, and keeps as much: the static exponential graph (Ying et al.,
    2021). It is directed, and its matrix is doubly stochastic."""
    return Topology((Mixing.around(world, _powers(world)),))


def one_peer_exponential(world: int) -> Topology:
    """Every rank gives half to the one 1, then 2, then 4, ... after it (Assran et al., 2019; Ying et al., 2021). Of
    2^k ranks, each has the mean after k rounds."""
    return Topology(tuple(Mixing.around(world, (power,)) for power in _powers(world) or (0,)))


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "ring": ring,
    "exponential": exponential,
    "one-peer-exponential": one_peer_exponential,
}


def topology_of(spec: str | Sequence[Sequence[float]], world: int) -> Topology:
    """The topology of a name, or of a matrix, among so many ranks."""
    if isinstance(spec, str):
        return TOPOLOGIES[spec](world)
    if len(spec) != world:
        raise ConfigError(
            f"the mixing matrix is for {len(spec)} ranks, but there are {world}; write one row and one column per "
            f"rank, or a name: {', '.join(map(repr, TOPOLOGIES))}"
        )
    return Topology((Mixing.of(spec),))


def _powers(world: int) -> list[int]:
    return [1 << k for k in range((world - 1).bit_length())]


# ---------------------------------------------------------------- a user's matrix


def read_matrix(given: Any) -> tuple[tuple[float, ...], ...]:
    """Rows of numbers, from nested lists, a tensor or an array."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    try:
        rows = tuple(tuple(float(weight) for weight in row) for row in plain)
    except (TypeError, ValueError):
        raise ConfigError(
            f"a mixing matrix is one row of numbers per rank, found {given!r}; write nested lists, a tensor or an "
            f"array, or a name: {', '.join(map(repr, TOPOLOGIES))}"
        ) from None
    if not rows or any(len(row) != len(rows) for row in rows):
        found = f"{len(rows)} rows of {sorted({len(row) for row in rows})} weights"
        raise ConfigError(f"a mixing matrix has one row and one column per rank, found {found}")
    return rows


def check_matrix(rows: Sequence[Sequence[float]], push_sum: bool) -> None:
    """Refuse a matrix with which ranks would not approach their mean."""
    ranks = range(len(rows))
    for i in ranks:
        for j in ranks:
            if not 0 <= (found := rows[i][j]) < float("inf"):
                raise ConfigError(f"a mixing matrix has weights of 0 or more, found {found!r} in row {i}, column {j}")
    across = [sum(row) for row in rows]
    down = [sum(row[j] for row in rows) for j in ranks]
    if (rank := _first_off(down)) is not None:
        _refuse_mass(rank, down[rank], _first_off(across) is None)
    if (rank := _first_off(across)) is not None and not push_sum:
        raise ConfigError(
            f"this mixing matrix is column stochastic, not doubly: row {rank} sums to {across[rank]:.6g}, so the ranks "
            f"would end up with different multiples of their mean; write push_sum=True, which divides those out"
        )
    for rank in ranks:
        if (kept := rows[rank][rank]) < TOLERANCE:
            raise ConfigError(
                f"a mixing matrix needs a positive diagonal, found {kept:g} in row {rank}, column {rank}: rank {rank} "
                f"would give away all its values, and ranks could swap theirs for ever; let it keep a part"
            )
    _check_connected(Mixing.of(rows))


def _first_off(sums: Sequence[float]) -> int | None:
    return next((rank for rank, total in enumerate(sums) if abs(total - 1) > TOLERANCE), None)


def _refuse_mass(rank: int, total: float, rows_sum_to_one: bool) -> None:
    does = "loses" if total < 1 else "gains"
    fix = "each column must sum to 1"
    if rows_sum_to_one:
        fix += "; its rows do, so transpose it (row i has what rank i takes) and write push_sum=True"
    raise ConfigError(
        f"this mixing matrix {does} mass: column {rank} sums to {total:.6g}, so the sum over the ranks would "
        f"{'shrink' if total < 1 else 'grow'} in every round; {fix}"
    )


def _check_connected(mixing: Mixing) -> None:
    for neighbours, way in ((mixing.targets, "from rank 0 to rank"), (mixing.sources, "to rank 0 from rank")):
        reached = new = {0}
        while new:
            new = {rank for each in new for rank in neighbours(each)} - reached
            reached = reached | new
        missing = sorted(set(range(len(mixing.rows))) - reached)
        if missing:
            raise ConfigError(
                f"this mixing matrix is not connected: nothing gets {way} {missing[0]}, however many rounds there are, "
                f"so the ranks cannot approach one mean; add a weight between ranks {missing} and the others"
            )
