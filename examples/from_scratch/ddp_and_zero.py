"""Both at once: ZeRO inside groups of ranks, data parallelism between the groups.

    sherd run -n 4 examples/from_scratch/ddp_and_zero.py

Ranks form a table. A row is a group that holds one copy of everything, a slice on each of its ranks. A column holds the
same slice, once in every group. With 4 ranks in groups of 2:

                     slice 0   slice 1
    group 0           rank 0    rank 1     rows: reduce-scatter gradients, all-gather weights (fast, inside a machine)
    group 1           rank 2    rank 3     columns: all-reduce the slice of the gradient (slow, between machines)

Groups of one are DDP, one group of all is ZeRO; what lies between saves bytes between groups and costs memory. The
weights are the same to rounding: sums are taken in another order.
"""

from __future__ import annotations

import torch
from problem import loss_of, memory, network, padded, state, weights
from torch import nn

from sherd import comm


def table(ranks: comm.Communicator, size: int) -> tuple[comm.Communicator, comm.Communicator]:
    """The communicators of this rank's row and column. All ranks take part in making each of them."""
    world = range(ranks.world)
    rows = [ranks.subgroup(world[first : first + size]) for first in world[::size]]
    columns = [ranks.subgroup(world[place::size]) for place in range(size)]
    row, column = rows[ranks.rank // size], columns[ranks.rank % size]
    assert row is not None and column is not None  # None on ranks that are not in it
    return row, column


def train(ranks: comm.Communicator, size: int, steps: int) -> tuple[nn.Module, int]:
    """The model, and the bytes of gradients and state on this rank, in groups of `size`. As ZeRO's stage 2 inside."""
    row, column = table(ranks, size)
    model = network()
    for parameter in model.parameters():
        ranks.broadcast(parameter.data, root=0).wait()
    flat = weights(model)  # all parameters one after the other, and padding up to a multiple of the slices
    count, length = flat.numel(), -(-flat.numel() // size)
    whole = padded(flat, length * size)
    mine = whole[row.rank * length :][:length]
    optimizer = torch.optim.AdamW([mine], lr=0.01)
    for step in range(steps):
        loss_of(model, step, ranks.rank).backward()  # type: ignore[no-untyped-call]
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        part = row.reduce_scatter(padded(gradients, length * size)).wait()  # the group's sum, of one slice
        mine.grad = column.all_reduce(part).wait() / ranks.world  # the sum of all groups, hence the mean of all ranks
        optimizer.step()
        row.publish(mine, whole).wait()  # nothing to send to other groups: their ranks made the same update
        nn.utils.vector_to_parameters(whole[:count], model.parameters())
        model.zero_grad()
    return model, memory([mine.grad, *state(optimizer)])


def main() -> None:
    with comm.connect() as ranks:
        first = None
        for size in (size for size in range(1, ranks.world + 1) if ranks.world % size == 0):
            model, held = train(ranks, size, steps=20)
            first = weights(model) if first is None else first
            difference = (weights(model) - first).abs().max()
            if ranks.rank == 0:
                kind = "DDP" if size == 1 else "ZeRO" if size == ranks.world else "both"
                print(f"groups of {size} ({kind}): {held} bytes of gradients and state on each rank;", end=" ")
                print(f"weights differ from those of groups of 1 by {difference:.1g}")


if __name__ == "__main__":
    main()
