"""Small values between ranks that cannot talk yet, through the store of torch.distributed."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store

from sherd.errors import TimedOut


class StoreExchange:
    """Every rank sets a key and reads everybody else's; a rank that does not come is named."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout = timeout

    def __call__(self, key: str, value: Any) -> list[Any]:
        """Every rank's JSON value for `key`, in rank order. Collective; each key may be used once."""
        self._store.set(f"{key}/{self._rank}", json.dumps(value))
        deadline = time.monotonic() + self._timeout
        values, missing = [], []
        for rank in range(self._world):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self._store.wait([f"{key}/{rank}"], timedelta(seconds=left))
            except (RuntimeError, DistError):
                missing.append(rank)
                continue
            values.append(json.loads(self._store.get(f"{key}/{rank}")))
        if missing:
            raise TimedOut(
                f"rank {self._rank}: ranks {missing} did not come to the handshake ({key!r}) within "
                f"{self._timeout:g} s. All ranks must connect; look at those ranks' own output first.",
                tuple(missing),
            )
        return values
