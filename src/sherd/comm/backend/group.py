"""A process group of torch.distributed over a communicator.

The names of the methods are torch's. C++ calls those that its trampolines know; the others are found by Python.
"""

# Torch declares overloads that its own functions do not use.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Store
from torch.distributed.distributed_c10d import AllreduceOptions

from sherd.comm.backend import collectives
from sherd.comm.backend.collectives import flat
from sherd.comm.backend.works import Pending, Turn
from sherd.comm.base import Communicator
from sherd.comm.handle import Handle
from sherd.errors import ConfigError, Unsupported

_CPU = torch.device("cpu")
_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
}
_BITWISE = ("and", "or", "xor")
_DEFAULT = AllreduceOptions()


class Group(dist.ProcessGroup):
    """Ranks of torch.distributed that talk over sherd's transports."""

    def __init__(self, store: Store, communicator: Communicator) -> None:
        # Torch's other constructor, with a store, makes groups that C++ does not call back.
        super().__init__(communicator.rank, communicator.world)  # type: ignore[call-arg]
        self.communicator = communicator
        self._store = store
        self._turn = Turn(communicator)
        self._name = self._description = "undefined"
        self._coalesced: list[Pending] | None = None

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = _DEFAULT) -> dist.Work:
        if isinstance(tensors, Tensor):  # as torch's DDP calls it for ranks that have joined
            tensors = [tensors]
        if tensors[0].is_sparse:
            return self._sparse_all_reduce(tensors, opts)
        with self._turn as comm:
            handles = [comm.all_reduce(t, t, op=self._reduction(opts, t)) for t in tensors]
        return self._pending(handles, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = _DEFAULT) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        with self._turn as comm:
            handles, finish = collectives.reduce(comm, tensor, opts.rootRank, self._reduction(opts, tensor))
        return self._pending(handles, tensors, finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _DEFAULT) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _DEFAULT
    ) -> dist.Work:
        with self._turn as comm:
            handles = [
                comm.reduce_scatter(flat(given), self._room(taken), op=self._reduction(opts, given))
                for taken, given in zip(outputs, inputs, strict=True)
            ]
        return self._pending(handles, outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _DEFAULT
    ) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            collectives.check_sizes(self.communicator, "reduce_scatter", parts, output)
        joined = [torch.cat([flat(part) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, opts)

    # ---------------------------------------------------------------- movements

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        with self._turn as comm:
            handles = [comm.broadcast(self._checked(t), opts.rootRank) for t in tensors]
        return self._pending(handles, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        with self._turn as comm:
            handles = [
                comm.all_gather(flat(self._checked(given)), self._room(taken))
                for taken, given in zip(outputs, inputs, strict=True)
            ]
        return self._pending(handles, outputs)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        rows = [given.new_empty(self.communicator.world, given.numel()) for given in inputs]
        with self._turn as comm:
            for given, taken in zip(inputs, outputs, strict=True):
                collectives.check_sizes(comm, "all_gather", taken, given)
            handles = [
                comm.all_gather(flat(self._checked(given)), row.view(-1))
                for given, row in zip(inputs, rows, strict=True)
            ]

        def finish() -> None:
            for row, taken in zip(rows, outputs, strict=True):
                collectives.spread(row, taken)

        return self._pending(handles, [tensor for taken in outputs for tensor in taken], finish)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        [given] = inputs
        taken = outputs[0] if outputs else []
        with self._turn as comm:
            if comm.rank == opts.rootRank:
                collectives.check_sizes(comm, "gather", taken, given)
            handles, finish = collectives.gather(comm, self._checked(given), taken, opts.rootRank)
        return self._pending(handles, taken, finish)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        [taken] = outputs
        with self._turn as comm:
            given = inputs[0] if inputs else []
            handles, finish = collectives.scatter(comm, self._checked(taken), given, opts.rootRank)
        return self._pending(handles, outputs, finish)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for given in inputs:
            self._checked(given)
        with self._turn as comm:
            handles, finish = collectives.all_to_all(comm, outputs, inputs)
        return self._pending(handles, outputs, finish)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        if output_split_sizes or input_split_sizes:
            outputs = _split(output, output_split_sizes, self.communicator.world)
            inputs = _split(input, input_split_sizes, self.communicator.world)
            return self.alltoall(outputs, inputs, opts)
        with self._turn as comm:
            handles = [comm.all_to_all(flat(self._checked(input)), self._room(output))]
        return self._pending(handles, [output])

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        with self._turn as comm:
            handles = [comm.send(self._checked(t), to, tag) for t in tensors]
        return self._pending(handles, tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        with self._turn as comm:
            handles = [comm.recv(self._checked(t), source, tag) for t in tensors]
        return self._pending(handles, tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        raise Unsupported(f'rank {self.rank()}: the backend "sherd" receives from a rank; write recv(tensor, src=...)')

    def barrier(self, opts: Any = None) -> dist.Work:
        with self._turn as comm:
            handles = [comm.barrier()]
        return self._pending(handles, [])

    # Names that torch had for these before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---------------------------------------------------------------- life and identity

    def shutdown(self) -> None:
        self.communicator.close()

    def abort(self) -> None:
        self.communicator.close()

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.world

    def getRank(self) -> int:  # noqa: N802
        return self.communicator.rank

    def getSize(self) -> int:  # noqa: N802
        return self.communicator.world

    def getBackendName(self) -> str:  # noqa: N802
        return "sherd"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    # ---------------------------------------------------------------- several calls as one

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None

        def finish() -> None:
            for work in works:
                work.wait()

        return Pending(self._turn, [], [], finish)

    # ---------------------------------------------------------------- private

    def _pending(
        self, handles: Sequence[Handle], outputs: Sequence[Tensor], finish: Callable[[], None] | None = None
    ) -> dist.Work:
        work = Pending(self._turn, handles, outputs, finish)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _sparse_all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        with self._turn as comm:
            handles, finish = collectives.sparse_all_reduce(comm, tensor, self._reduction(opts, tensor._values()))
        return self._pending(handles, tensors, finish)

    def _reduction(self, opts: Any, tensor: Tensor) -> str:
        self._checked(tensor)
        op = opts.reduceOp.op
        name = _REDUCTIONS.get(op)
        if name is None:
            fix = "multiply the tensor first and write ReduceOp.SUM" if op == ReduceOp.PREMUL_SUM else "write another"
            raise Unsupported(f'rank {self.rank()}: the backend "sherd" has no {op}; {fix}')
        if name in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"rank {self.rank()}: {op} needs whole numbers or bools, got {tensor.dtype}")
        return name

    def _room(self, output: Tensor) -> Tensor:
        """A flat view to write into."""
        if not self._checked(output).is_contiguous():
            raise ConfigError(f"rank {self.rank()}: the output must be contiguous; write output.contiguous()")
        return output if output.dim() == 1 else output.view(-1)

    def _checked(self, tensor: Tensor) -> Tensor:
        if tensor.is_cpu and tensor.layout is torch.strided:
            return tensor
        what = tensor.device if not tensor.is_cpu else tensor.layout
        raise Unsupported(
            f'rank {self.rank()}: the backend "sherd" moves dense tensors in memory of the CPU, got {what}; '
            'for others write new_group(backend="gloo") or "nccl"'
        )


def _split(tensor: Tensor, sizes: Sequence[int], world: int) -> Sequence[Tensor]:
    """Along the first dimension, equally where no sizes are given."""
    if sizes:
        return torch.split(tensor, list(sizes))
    if tensor.shape[0] % world:
        raise ConfigError(f"all_to_all cuts {tuple(tensor.shape)} into {world} equal parts; give the split sizes")
    return torch.chunk(tensor, world) if tensor.shape[0] else [tensor] * world
