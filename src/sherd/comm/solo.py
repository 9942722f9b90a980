"""A world of one: the same interface, no communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm.base import Communicator
from sherd.comm.calls import Call
from sherd.comm.codec import Codec, decoded, encoded
from sherd.comm.handle import EMPTY, Done, Handle
from sherd.config import CommOptions
from sherd.errors import ConfigError


class SoloCommunicator(Communicator):
    """One rank. Every operation is a local copy, through the codec where there is one."""

    transport = "solo"
    shares_memory = True
    trusts_memory = True

    def __init__(self, options: CommOptions | None = None) -> None:
        super().__init__(0, 1, options or CommOptions())

    def shared_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def shared_buffers(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype)]

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        if any(rank != 0 for rank in ranks):
            raise ConfigError(f"subgroup({list(ranks)}): a world of one has only rank 0")
        return SoloCommunicator(self.options) if ranks else None

    def _close(self, error: BaseException | None) -> None:
        pass

    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        # Whatever the reduction, that of one contribution is itself.
        return self.start_all_gather(call, source if own is None else own, target, codec)

    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        if codec is not None:  # what other ranks would receive
            source = decoded(codec, encoded(codec, source), source.numel(), source.dtype)
        if source is not target:
            target.copy_(source)
        self.counters.add(call.operation, 0, 0)
        return Done(target)

    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        return self.start_all_gather(call, source, target, codec)

    def start_reduce(
        self, call: Call, source: Tensor, target: Tensor, root: int, op: str, own: Tensor | None = None
    ) -> Handle:
        return self.start_all_gather(call, source if own is None else own, target, None)

    def start_broadcast(self, call: Call, target: Tensor, root: int, source: Tensor | None = None) -> Handle:
        return self.start_all_gather(call, target if source is None else source, target, None)

    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        target.copy_(source)
        return self._count(call, target)

    def start_send(self, call: Call, source: Tensor, to: int) -> Handle:
        raise AssertionError("a world of one has no peer; the base class refuses this call")

    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle:
        raise AssertionError("a world of one has no peer; the base class refuses this call")

    def start_barrier(self, call: Call) -> Handle:
        return self._count(call, EMPTY)

    def _count(self, call: Call, target: Tensor) -> Handle:
        self.counters.add(call.operation, 0, 0)
        return Done(target)
