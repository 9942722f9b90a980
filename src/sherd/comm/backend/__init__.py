"""sherd as a backend of torch.distributed: `torch.distributed.init_process_group("sherd")`.

Torch's own DDP, FSDP2, DeviceMesh, functional collectives and checkpoints then run on sherd's transports, unchanged.
Read in this order: `group` (torch's calls), `checks` (of what they are given), `works` (what they return),
`collectives` (those that the communicator lacks). `create`, here, is what torch calls for a new group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from sherd.comm.backend.group import Group
from sherd.comm.connect import join
from sherd.config import CommOptions
from sherd.errors import ConfigError
from sherd.patches.process import heap

__all__ = ["Group", "create"]


def create(place: Any, options: CommOptions | None) -> Group:
    """Called by torch on every member of a new group. `place` says where they meet; `options` are its `pg_options`."""
    if options is None:
        options = _default_options(place.timeout)
    elif not isinstance(options, CommOptions):
        raise ConfigError(
            f'the backend "sherd" takes pg_options=sherd.CommOptions(...), got a {type(options).__name__}'
        )
    # A store can outlive its group: the next group of that name must not read what the last one wrote. The groups are
    # counted in the store, as not every rank is in every group; all members join one before any of them joins the next.
    size = place.group_size
    earlier = (place.store.add(f"sherd/{size}", 1) - 1) // size
    store = PrefixStore(f"sherd/{size}/{earlier}", place.store)
    ranks = place.global_ranks_in_group or range(size)
    heap.install()
    return Group(place.store, join(store, place.group_rank, ranks, options))


def _default_options(timeout: timedelta) -> CommOptions:
    """From the SHERD_* variables; a timeout that was given to torch takes precedence."""
    if timeout == dist.constants.default_pg_timeout:
        return CommOptions.from_env()
    return CommOptions.from_env(timeout=timeout.total_seconds())
