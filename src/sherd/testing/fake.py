"""Large worlds without machines: one rank of a world in which the other ranks do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator, SoloCommunicator
from sherd.comm.calls import Call
from sherd.comm.codec import Codec
from sherd.comm.handle import Done, Handle
from sherd.config import CommOptions


class FakeCommunicator(Communicator):
    """Rank `rank` of `world`, where all others contribute what this one does.

    For shapes, order, memory and set-up time at any size, never for values. Meta tensors work, so a model need not fit
    into memory.
    """

    transport = "fake"
    dry = True
    trusts_memory = True

    def __init__(self, rank: int, world: int, options: CommOptions | None = None) -> None:
        super().__init__(rank, world, options or CommOptions())

    @property
    def host(self) -> Communicator:
        return SoloCommunicator(self.options)

    def all_gather_object(self, obj: Any, what: str = "") -> list[Any]:
        return [obj] * self.world

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        return obj

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_group(ranks)
        return FakeCommunicator(list(ranks).index(self.rank), len(ranks)) if self.rank in ranks else None

    def _close(self, error: BaseException | None) -> None:
        pass

    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle:
        mine = source.view(self.world, -1)[self.rank] if own is None else own
        target.copy_(mine * self.world if op == "sum" else mine)
        return self._count(call, target)

    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle:
        target.view(self.world, -1).copy_(source.expand(self.world, -1))
        return self._count(call, target)

    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle:
        target.copy_(source * self.world if op == "sum" else source)
        return self._count(call, target)

    def start_reduce(
        self, call: Call, source: Tensor, target: Tensor, root: int, op: str, own: Tensor | None = None
    ) -> Handle:
        if self.rank == root:
            mine = source if own is None else own
            target.copy_(mine * self.world if op == "sum" else mine)
        return self._count(call, target)

    def start_broadcast(self, call: Call, target: Tensor, root: int, source: Tensor | None = None) -> Handle:
        if source is not None:
            target.copy_(source)
        return self._count(call, target)

    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        target.copy_(source)
        return self._count(call, target)

    def start_send(self, call: Call, source: Tensor, to: int) -> Handle:
        return self._count(call, source)

    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle:
        return self._count(call, target)

    def start_barrier(self, call: Call) -> Handle:
        return self._count(call, torch.empty(0))

    def _count(self, call: Call, target: Tensor) -> Handle:
        self.counters.add(call.operation, 0, 0)
        return Done(target)
