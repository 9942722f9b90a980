"""A matrix cut into rows or columns, one part per rank, and its product computed without ever putting it together.

    sherd run -n 2 examples/from_scratch/shard_matrix.py

This is what ZeRO does to a parameter (it puts it together to use it) and tensor parallelism (it does not).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sherd import comm


def bounds(length: int, parts: int) -> list[int]:
    """Where the parts begin, and the end. The first `length % parts` of them are longer by one: nothing is lost."""
    short, longer = divmod(length, parts)
    return [part * short + min(part, longer) for part in range(parts + 1)]


def shard(matrix: Tensor, part: int, parts: int, dim: int) -> Tensor:
    """Rows (`dim=0`) or columns (`dim=1`). May be empty: there can be more ranks than rows."""
    begin, end = bounds(matrix.shape[dim], parts)[part : part + 2]
    return matrix.narrow(dim, begin, end - begin)


def gather(ranks: comm.Communicator, mine: Tensor, length: int, dim: int) -> Tensor:
    """The whole from everybody's shard; it is `length` long along `dim`.

    A collective moves as much from every rank, so shards are padded to the longest, and the padding is taken out again.
    """
    edges = bounds(length, ranks.world)
    mine = mine.movedim(dim, 0)
    padded = mine.new_zeros(edges[1], *mine.shape[1:])
    padded[: mine.shape[0]] = mine
    everybody = ranks.all_gather(padded).wait().chunk(ranks.world)
    sizes = [end - begin for begin, end in pairwise(edges)]
    return torch.cat([one[:size] for one, size in zip(everybody, sizes, strict=False)]).movedim(0, dim)


def times_columns(ranks: comm.Communicator, x: Tensor, columns: Tensor, width: int) -> Tensor:
    """x @ W, where each rank has columns of W: it computes those columns of the product, which are gathered."""
    return gather(ranks, x @ columns, width, dim=1)


def times_rows(ranks: comm.Communicator, x: Tensor, rows: Tensor) -> Tensor:
    """x @ W, where each rank has rows of W: with the same columns of x they give one term of a sum over the ranks."""
    return ranks.all_reduce(shard(x, ranks.rank, ranks.world, dim=1) @ rows).wait()


def two_layers(ranks: comm.Communicator, x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """relu(x @ A) @ B with columns of A and the same rows of B: what the first product leaves on a rank is what the
    second needs there, so that two layers take one all-reduce. Large transformers are cut like this."""
    return ranks.all_reduce((x @ columns).relu() @ rows).wait()


def main() -> None:
    torch.manual_seed(0)
    x, a, b = torch.randn(3, 5), torch.randn(5, 7), torch.randn(7, 4)  # 5 and 7 divide by nothing
    with comm.connect() as ranks:
        columns, rows, rows_of_b = (shard(m, ranks.rank, ranks.world, dim) for m, dim in ((a, 1), (a, 0), (b, 0)))
        shapes = ranks.all_gather_object([tuple(rows.shape), tuple(columns.shape)])
        errors = {
            "rows put together again": gather(ranks, rows, 5, dim=0) - a,
            "columns put together again": gather(ranks, columns, 7, dim=1) - a,
            "product by columns": times_columns(ranks, x, columns, 7) - x @ a,
            "product by rows": times_rows(ranks, x, rows) - x @ a,
            "two layers": two_layers(ranks, x, columns, rows_of_b) - (x @ a).relu() @ b,
        }
        if ranks.rank == 0:
            print(f"a {tuple(a.shape)} matrix; rows and columns on each rank: {shapes}")
            for what, error in errors.items():
                print(f"{what}: off by {error.abs().max():.1g}")


if __name__ == "__main__":
    main()
