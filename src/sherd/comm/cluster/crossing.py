"""Taking operations across the network: first the comparison of calls, then the messages of the operation itself.

The first messages of an operation are posted when it is started; what is left of it runs on the column's lane, so that
it goes on while the rank computes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sherd.comm.c10d.communicator import C10dCommunicator
from sherd.comm.c10d.lanes import Lane, LaneOperation, close_lanes
from sherd.comm.c10d.wire import COME_BACK, LINGER, Wire
from sherd.comm.calls import Call, Site
from sherd.comm.cluster.across import TAGS, Across, Column, Steps
from sherd.comm.handle import Handle
from sherd.comm.waiting.deadlock import COLLECTIVE, Stance
from sherd.comm.waiting.faults import LinkBroken
from sherd.comm.waiting.progress import move_everything
from sherd.errors import CommError

HEADER_TAG = 0
FINGERPRINTS, NUMBERS = 1 << 18, 1 << 10  # how many a tag tells apart: it has 31 bits
FINGERPRINT_BYTES = 8
MOVE_EVERY = 0.001  # seconds between looks while a neighbour may need this rank for something else
_EMPTY = torch.empty(0)


class Crossing:
    """Takes operations over `column`. `flat` watches the ranks meanwhile; with `check`, calls are compared first."""

    def __init__(self, flat: C10dCommunicator, column: Column, check: bool) -> None:
        self._flat = flat
        self._column = column
        self._check = check
        self.lane = Lane("sherd-across")

    def start(self, call: Call, site: Site, number: int, cross: Callable[[Across], Steps]) -> Handle:
        """Post the first messages of an operation, and put the rest of it on the lane."""
        header = self._flat.header(call, site) if self._check else None

        def watch(attempt: Callable[[float], bool]) -> None:
            def attempt_and_move(seconds: float) -> bool:
                deadline = time.monotonic() + seconds
                while not attempt(0):
                    left = deadline - time.monotonic()
                    if attempt(min(left, MOVE_EVERY) if move_everything() > 1 else left):
                        break
                    if time.monotonic() >= deadline:
                        return False
                return True

            self._flat.watch(attempt_and_move, self._column.ranks, self._column.waiting_for, stance)

        def stance() -> Stance | None:
            # With headers, nobody gets through before every rank of every host has reached this call.
            return self._flat.stance(COLLECTIVE, number, call.made_at(site)) if header is not None else None

        operation = LaneOperation(self._steps(call, number, header, cross), watch, lambda: None)
        operation.result = _EMPTY
        operation.start()
        self.lane.add(operation)
        return operation

    def _steps(self, call: Call, number: int, header: Tensor | None, cross: Callable[[Across], Steps]) -> Steps:
        try:
            agreed = iter(()) if header is None else self._agree(header)
            crossed = cross(Across(self._column, _tag(call, number)))
            first = [next(agreed, None), next(crossed, None)]
            for message, rest in zip(first, (agreed, crossed), strict=True):
                if message is not None:
                    yield message
                    yield from rest
        except (CommError, LinkBroken):
            raise
        except RuntimeError as error:  # no peer's fault
            raise CommError(f"{type(error).__name__}: {error}") from error

    def _agree(self, header: Tensor) -> Steps:
        """All ranks of this column make the same call, or all of them get an error."""
        hosts, mine = self._column.hosts, self._column.mine
        headers = [header if h == mine else torch.empty_like(header) for h in range(hosts)]
        yield from Across(self._column, HEADER_TAG).swap([header] * hosts, headers)
        self._column.wire.met = True
        if not all(torch.equal(header[:FINGERPRINT_BYTES], other[:FINGERPRINT_BYTES]) for other in headers):
            self._flat.compare(list(zip(self._column.ranks, headers, strict=True)))


def close_column(pid: int, lane: Lane, wire: Wire) -> None:
    """Release the column of process `pid`, once the operations on its lane have had a moment to complete. The other
    parts of the communicator release what they have themselves, and say goodbye."""
    if os.getpid() == pid:
        close_lanes([lane], 0.0 if wire.faulty else LINGER, wire.break_off, COME_BACK)
        wire.close()


def _tag(call: Call, number: int) -> int:
    """A tag for the messages of one call that no other call under way has, nor a different call of the same number."""
    return TAGS * (1 + call.fingerprint % FINGERPRINTS * NUMBERS + number % NUMBERS)
