"""Collectives that torch has and the communicator lacks, built from those that it has.

All ranks first agree on the text of the call, which says more than the calls it is built from: a gather on one rank and
an all-gather on another are an error, as are two roots. Before that, a rank checks everything it was given: when it
refuses a call, it has sent nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sherd.comm.backend import checks
from sherd.comm.base import Communicator
from sherd.comm.calls import describe
from sherd.comm.handle import Handle
from sherd.errors import ConfigError, Diverged

Parts = tuple[list[Handle], Callable[[], None] | None]
"""The handles of a collective, and what is left to do when they are complete."""


def reduce(comm: Communicator, tensor: Tensor, root: int, op: str) -> list[Handle]:
    """The sum on `root`; the other ranks keep what they have."""
    comm.check_rank(root, "reduce", "root")
    comm.check("all_reduce", tensor, tensor, op)
    agreed = comm.agree(describe("reduce", tensor.dtype, tensor.shape, op, f"root {root}"))
    output = tensor if comm.rank == root else torch.empty_like(tensor)
    return [agreed, comm.all_reduce(tensor, output, op=op)]


def gather(comm: Communicator, input: Tensor, outputs: Sequence[Tensor], root: int) -> Parts:
    """Every rank's `input` in the `outputs` of `root`."""
    comm.check_rank(root, "gather", "root")
    comm.check("all_gather", flat(input))
    if comm.rank == root:
        checks.parts(comm, "gather", outputs, input)
        checks.writable(comm, "gather", outputs)
    agreed = comm.agree(describe("gather", input.dtype, input.shape, f"root {root}"))
    handle = comm.all_gather(flat(input))
    if comm.rank != root:
        return [agreed, handle], None
    return [agreed, handle], lambda: spread(handle.wait().view(comm.world, -1), outputs)


def scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Parts:
    """The r-th of the `inputs` of `root` in the `output` of rank r."""
    comm.check_rank(root, "scatter", "root")
    comm.check("broadcast", output, output, root)
    if comm.rank == root:
        checks.parts(comm, "scatter", inputs, output)
    agreed = comm.agree(describe("scatter", output.dtype, output.shape, f"root {root}"))
    rows = output.new_empty(comm.world, output.numel())
    if comm.rank == root:
        torch.cat([flat(part) for part in inputs], out=rows.view(-1))
    handle = comm.broadcast(rows.view(-1), root)
    return [agreed, handle], lambda: copy_into(output, rows[comm.rank])


def all_to_all(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Parts:
    """The r-th of the `inputs` in the outputs of rank r; the parts may differ in size."""
    for kind, tensors in (("inputs", inputs), ("outputs", outputs)):
        if len(tensors) != comm.world:
            raise ConfigError(f"rank {comm.rank}: all_to_all needs {comm.world} {kind}, got {len(tensors)}")
    dtype = inputs[0].dtype
    for tensor in (*inputs, *outputs):
        if tensor.dtype != dtype:
            raise ConfigError(
                f"rank {comm.rank}: all_to_all needs tensors of one dtype, got {dtype} and {tensor.dtype}"
            )
    checks.writable(comm, "all_to_all", outputs)
    comm.check("all_to_all", flat(inputs[0]).new_empty(comm.world))
    width = _agreed_width(comm, [part.numel() for part in inputs], [part.numel() for part in outputs], dtype)
    sent, received = (inputs[0].new_empty(comm.world, width) for _ in range(2))
    for row, part in zip(sent, inputs, strict=True):
        row[: part.numel()].copy_(flat(part))
    handle = comm.all_to_all(sent.view(-1), received.view(-1))
    return [handle], lambda: spread(received, outputs)


def _agreed_width(comm: Communicator, sent: Sequence[int], taken: Sequence[int], dtype: torch.dtype) -> int:
    """The size of the largest part. If a part does not fit, every rank raises the same error. Collective."""
    mine = torch.tensor([*sent, *taken])
    everybody = comm.all_gather(mine, what=f"sizes of an all_to_all of {dtype}").wait().view(comm.world, 2, -1)
    given, room = everybody[:, 0], everybody[:, 1].t()  # by sender, then receiver
    for sender, receiver in (given != room).nonzero().tolist():
        raise Diverged(
            f"rank {sender} sends {int(given[sender, receiver])} elements to rank {receiver} in this all_to_all, which "
            f"has room for {int(room[sender, receiver])}; output_split_sizes of a rank are the input_split_sizes that "
            f"the others have for it",
            ranks=(sender, receiver),
        )
    return int(given.max())


def sparse_all_reduce(comm: Communicator, tensor: Tensor, op: str) -> Parts:
    """The sum of sparse tensors, such as the gradients of embeddings, in place of `tensor`."""
    if op != "sum":
        raise ConfigError(f"rank {comm.rank}: sparse tensors can be summed, not reduced by {op}; write ReduceOp.SUM")
    mine = tensor.detach().coalesce()
    comm.check("all_reduce", mine.values(), None, op)
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
        with torch.no_grad():  # a detached sparse tensor would keep its old number of elements
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


def _without_padding(gathered: Tensor, counts: Sequence[int]) -> list[Tensor]:
    parts = gathered.view(len(counts), -1, *gathered.shape[1:]) if max(counts) else [gathered] * len(counts)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]
