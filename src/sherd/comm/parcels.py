"""A small object for each rank: what `all_to_all` is for tensors, with parts of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm.base import Communicator
from sherd.comm.trust.objects import REFUSED, ObjectCall

WHAT = "exchange_objects"


def exchange_objects(comm: Communicator, parcels: Sequence[Any]) -> list[Any]:
    """Send `parcels[r]` to rank r, and return what each rank sent here, in rank order. Collective.

    What cannot be sent raises a `ConfigError` on every rank, as in `all_gather_object`. A rank receives one parcel at a
    time, and only bytes that are meant for it.
    """
    # The receiver is part of what is sealed: a parcel is of no use to another rank.
    calls = [comm.object_call(f"{WHAT} to rank {rank}") for rank in range(comm.world)]
    others = [rank for rank in range(comm.world) if rank != comm.rank]
    packed = {rank: calls[rank].packed(parcels[rank], comm.rank) for rank in others}
    refused = next(((rank, data) for rank, data in packed.items() if _is_refusal(data)), None)
    sizes = torch.tensor([0 if rank == comm.rank else packed[rank].numel() for rank in range(comm.world)])
    told = comm.all_gather_object((refused, sizes), what=WHAT)
    for sender, (refusal, _) in enumerate(told):
        if refusal is not None:
            calls[refusal[0]].unpacked([refusal[1]], [sender])  # raises it, here as there
    received: list[Any] = [None] * comm.world
    received[comm.rank] = parcels[comm.rank]
    for step in range(1, comm.world):
        to, source = (comm.rank + step) % comm.world, (comm.rank - step) % comm.world
        data = _swap(comm, packed.pop(to), to, int(told[source][1][comm.rank]), source)
        received[source] = _opened(calls[comm.rank], data, source)
    return received


def _swap(comm: Communicator, data: Tensor, to: int, size: int, source: int) -> Tensor:
    arriving = torch.empty(size, dtype=torch.uint8)
    handles = [comm.send(data, to), comm.recv(arriving, source)]
    for handle in handles:
        handle.wait()
    return arriving


def _opened(call: ObjectCall, data: Tensor, source: int) -> Any:
    return call.unpacked([data], [source])[0]


def _is_refusal(packed: Tensor) -> bool:
    return bytes(packed[:1].tolist()) == REFUSED
