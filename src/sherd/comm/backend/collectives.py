"""Collectives that torch has and the communicator has not, made of those that it has.

All ranks first agree on the words of the call, which say more than the parts it is made of: a gather on one rank and an
all-gather on another are an error, as are two roots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sherd.comm.base import Communicator
from sherd.comm.calls import describe
from sherd.comm.handle import Handle
from sherd.errors import ConfigError

Parts = tuple[list[Handle], Callable[[], None] | None]
"""The handles of a collective, and what is left to do when they are complete."""


def reduce(comm: Communicator, tensor: Tensor, root: int, op: str) -> Parts:
    """The sum on `root`; the other ranks keep what they have."""
    agreed = comm.agree(describe("reduce", tensor.dtype, tensor.shape, op, f"root {root}"))
    output = tensor if comm.rank == root else torch.empty_like(tensor)
    return [agreed, comm.all_reduce(tensor, output, op=op)], None


def gather(comm: Communicator, input: Tensor, outputs: Sequence[Tensor], root: int) -> Parts:
    """Everybody's `input` in the `outputs` of `root`."""
    agreed = comm.agree(describe("gather", input.dtype, input.shape, f"root {root}"))
    rows = input.new_empty(comm.world, input.numel())
    handle = comm.all_gather(flat(input), rows.view(-1))
    return [agreed, handle], (lambda: spread(rows, outputs)) if comm.rank == root else None


def scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Parts:
    """The r-th of the `inputs` of `root` in the `output` of rank r."""
    agreed = comm.agree(describe("scatter", output.dtype, output.shape, f"root {root}"))
    rows = output.new_empty(comm.world, output.numel())
    if comm.rank == root:
        check_sizes(comm, "scatter", inputs, output)
        torch.cat([flat(part) for part in inputs], out=rows.view(-1))
    handle = comm.broadcast(rows.view(-1), root)
    return [agreed, handle], lambda: copy_into(output, rows[comm.rank])


def all_to_all(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Parts:
    """The r-th of the `inputs` in the outputs of rank r; the parts may differ in size."""
    sizes = comm.all_gather(torch.tensor([part.numel() for part in inputs])).wait().view(comm.world, -1)
    expected = [part.numel() for part in outputs]
    if sizes[:, comm.rank].tolist() != expected:
        raise ConfigError(
            f"rank {comm.rank}: all_to_all has room for {expected} elements from the ranks, but they send "
            f"{sizes[:, comm.rank].tolist()}"
        )
    width = int(sizes.max())
    sent, received = (inputs[0].new_empty(comm.world, width) for _ in range(2))
    for row, part in zip(sent, inputs, strict=True):
        row[: part.numel()].copy_(flat(part))
    handle = comm.all_to_all(sent.view(-1), received.view(-1))
    return [handle], lambda: spread(received, outputs)


def sparse_all_reduce(comm: Communicator, tensor: Tensor, op: str) -> Parts:
    """The sum of sparse tensors, as embeddings have them for gradients, in place of `tensor`."""
    if op != "sum":
        raise ConfigError(f"rank {comm.rank}: sparse tensors can be summed, not reduced by {op}; write ReduceOp.SUM")
    mine = tensor.detach().coalesce()
    agreed = comm.agree(describe("sparse_all_reduce", tensor.dtype, tensor.shape, op))
    counts = comm.all_gather(torch.tensor([mine._nnz()])).wait().tolist()
    indices, values = mine.indices().t(), mine.values()
    gathered = []
    for part in (indices, values):
        padded = part.new_zeros(max(counts), *part.shape[1:])
        padded[: len(part)] = part
        gathered.append(comm.all_gather(padded))

    def finish() -> None:
        rows, found = (torch.cat(_without_padding(handle.wait(), counts)) for handle in gathered)
        total = torch.sparse_coo_tensor(rows.t(), found, tensor.shape, check_invariants=False).coalesce()
        with torch.no_grad():  # a detached sparse tensor would keep its own number of elements
            tensor.copy_(total)

    return [agreed, *gathered], finish


# ---------------------------------------------------------------- parts


def flat(tensor: Tensor) -> Tensor:
    """One dimension: torch's collectives compare numbers of elements, not shapes."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def copy_into(tensor: Tensor, row: Tensor) -> None:
    tensor.detach().copy_(row[: tensor.numel()].view(tensor.shape))


def spread(rows: Tensor, outputs: Sequence[Tensor]) -> None:
    for row, output in zip(rows, outputs, strict=True):
        copy_into(output, row)


def check_sizes(comm: Communicator, operation: str, parts: Sequence[Tensor], like: Tensor) -> None:
    sizes = [part.numel() for part in parts]
    if sizes != [like.numel()] * comm.world:
        expected = f"{comm.world} tensors of {like.numel()} elements each"
        raise ConfigError(f"rank {comm.rank}: {operation} needs {expected}, got sizes {sizes}")


def _without_padding(gathered: Tensor, counts: Sequence[int]) -> list[Tensor]:
    parts = gathered.view(len(counts), -1, *gathered.shape[1:]) if max(counts) else [gathered] * len(counts)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]
