"""Random numbers inside a map: the same for a chunk whichever rank computes it, and none of the program's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def untouched() -> Iterator[None]:
    """Afterwards the generators of Python, torch and numpy are where they were."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])
        if numpy is not None:
            numpy.random.set_state(kept[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def begin(seed: int, chunk: int) -> None:
    """From here on numbers are those of this chunk."""
    digest = hashlib.blake2b(f"{seed} {chunk}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    random.seed(value)
    torch.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % (1 << 32))
