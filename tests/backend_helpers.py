"""torch.distributed with sherd's backend as the default group, and one of gloo to compare with."""

from __future__ import annotations

from contextlib import contextmanager

import torch.distributed as dist

import sherd  # noqa: F401 - makes the backend known
from sherd import CommOptions


@contextmanager
def backend(transport="host", timeout=40, gloo=True):
    """The default group is sherd's; yields one of gloo with the same ranks."""
    dist.init_process_group("sherd", pg_options=CommOptions.from_env(transport=transport, timeout=timeout))
    try:
        assert dist.get_backend() == "sherd"
        assert dist.group.WORLD.communicator.transport == transport
        # Not where groups are started again: gloo then reads what its last one left in the store, and waits for ever.
        yield dist.new_group(backend="gloo") if gloo else None
    finally:
        dist.destroy_process_group()
