"""A process group of torch.distributed over a communicator.

The names of the methods are torch's. C++ calls those that its trampolines know; torch's Python code calls the others.
"""

# Torch declares overloads that its own functions do not use.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed.distributed_c10d import AllreduceOptions

from sherd.comm.backend import checks, collectives
from sherd.comm.backend.collectives import flat
from sherd.comm.backend.works import Locked, Pending
from sherd.comm.base import Communicator
from sherd.comm.handle import Handle
from sherd.errors import Unsupported

_CPU = torch.device("cpu")
_DEFAULT = AllreduceOptions()


class Group(dist.ProcessGroup):
    """Ranks of torch.distributed that communicate over sherd's transports."""

    def __init__(self, store: Store, communicator: Communicator) -> None:
        # Torch's other constructor, with a store, makes groups that C++ does not call back.
        super().__init__(communicator.rank, communicator.world)  # type: ignore[call-arg]
        self.communicator = communicator
        self._store = store
        self._locked = Locked(communicator)
        self._name = self._description = "undefined"
        self._coalesced: list[Pending] | None = None

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = _DEFAULT) -> dist.Work:
        if isinstance(tensors, Tensor):  # as torch's DDP calls it for ranks that have joined
            tensors = [tensors]
        with self._locked as comm:
            if any(tensor.is_sparse for tensor in tensors):
                tensor = checks.only(comm, "an all_reduce of sparse tensors", tensors)
                handles, finish = collectives.sparse_all_reduce(comm, tensor, checks.reduction(comm, opts, tensors))
                return self._pending(handles, tensors, finish)
            checks.dense(comm, tensors)
            op = checks.reduction(comm, opts, tensors)
            checks.calls(comm, "all_reduce", [(t, t) for t in tensors], op)
            return self._pending([comm.all_reduce(t, t, op=op) for t in tensors], tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = _DEFAULT) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        with self._locked as comm:
            tensor = checks.only(comm, "reduce", tensors)
            checks.dense(comm, tensors)
            op = checks.reduction(comm, opts, tensors)
            return self._pending(collectives.reduce(comm, tensor, opts.rootRank, op), tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _DEFAULT) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _DEFAULT
    ) -> dist.Work:
        with self._locked as comm:
            checks.paired(comm, "reduce_scatter", outputs, inputs)
            checks.dense(comm, inputs)
            op = checks.reduction(comm, opts, inputs)
            pairs = [(flat(given), checks.room(comm, t)) for given, t in zip(inputs, outputs, strict=True)]
            checks.calls(comm, "reduce_scatter", pairs, op)
            return self._pending([comm.reduce_scatter(given, taken, op=op) for given, taken in pairs], outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _DEFAULT
    ) -> dist.Work:
        comm = self.communicator
        checks.paired(comm, "reduce_scatter", outputs, inputs)
        for output, parts in zip(outputs, inputs, strict=True):
            checks.parts(comm, "reduce_scatter", parts, output)
        joined = [torch.cat([flat(part) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, opts)

    # ---------------------------------------------------------------- movements

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        with self._locked as comm:
            checks.dense(comm, tensors)
            checks.calls(comm, "broadcast", [(t, t) for t in tensors], opts.rootRank)
            return self._pending([comm.broadcast(t, opts.rootRank) for t in tensors], tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        with self._locked as comm:
            checks.paired(comm, "all_gather", outputs, inputs)
            checks.dense(comm, inputs)
            pairs = [(flat(given), checks.room(comm, t)) for given, t in zip(inputs, outputs, strict=True)]
            checks.calls(comm, "all_gather", pairs)
            return self._pending([comm.all_gather(given, taken) for given, taken in pairs], outputs)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        with self._locked as comm:
            checks.paired(comm, "all_gather", outputs, inputs)
            checks.dense(comm, inputs)
            for given, taken in zip(inputs, outputs, strict=True):
                checks.parts(comm, "all_gather", taken, given)
                checks.writable(comm, "all_gather", taken)
            checks.calls(comm, "all_gather", [(flat(given), None) for given in inputs])
            handles = [comm.all_gather(flat(given)) for given in inputs]

        def finish() -> None:
            for handle, taken in zip(handles, outputs, strict=True):
                collectives.spread(handle.wait().view(len(taken), -1), taken)

        return self._pending(handles, [tensor for taken in outputs for tensor in taken], finish)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for taken in outputs:
            checks.paired(self.communicator, "all_gather", taken, inputs)
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        with self._locked as comm:
            given, taken = checks.only(comm, "gather", inputs), outputs[0] if outputs else []
            checks.dense(comm, inputs)
            handles, finish = collectives.gather(comm, given, taken, opts.rootRank)
        return self._pending(handles, taken, finish)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        with self._locked as comm:
            taken, given = checks.only(comm, "scatter", outputs), inputs[0] if inputs else []
            checks.dense(comm, outputs)
            handles, finish = collectives.scatter(comm, taken, given, opts.rootRank)
        return self._pending(handles, outputs, finish)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        with self._locked as comm:
            checks.dense(comm, (*inputs, *outputs))
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
        with self._locked as comm:
            checks.dense(comm, (input, output))
            if output_split_sizes or input_split_sizes:
                outputs = checks.split(comm, output, output_split_sizes)
                return self.alltoall(outputs, checks.split(comm, input, input_split_sizes), opts)
            return self._pending([comm.all_to_all(flat(input), checks.room(comm, output))], [output])

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        with self._locked as comm:
            checks.dense(comm, tensors)
            checks.calls(comm, "send", [(t, t) for t in tensors], to)
            return self._pending([comm.send(t, to, tag) for t in tensors], tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        with self._locked as comm:
            checks.dense(comm, tensors)
            checks.calls(comm, "recv", [(t, t) for t in tensors], source)
            return self._pending([comm.recv(t, source, tag) for t in tensors], tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        fix = "write recv(tensor, src=...)"
        raise Unsupported(f'rank {self.rank()}: the backend "sherd" cannot receive from an unnamed rank; {fix}')

    def barrier(self, opts: Any = None) -> dist.Work:
        with self._locked as comm:
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

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.world

    abort, getRank, getSize = shutdown, rank, size  # noqa: N815

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

        return Pending(self._locked, [], [], finish)

    # ---------------------------------------------------------------- private

    def _pending(
        self, handles: Sequence[Handle], outputs: Sequence[Tensor], finish: Callable[[], None] | None = None
    ) -> dist.Work:
        work = Pending(self._locked, handles, outputs, finish)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
