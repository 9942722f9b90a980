"""sherd as a backend of torch.distributed: `torch.distributed.init_process_group("sherd")`.

Torch's own DDP, FSDP2, DeviceMesh, functional collectives and checkpoints then run on sherd's transports, unchanged.
Read in this order: `group` (torch's calls), `checks` (of what they are given), `works` (what they return),
`collectives` (those that the communicator lacks), `creation`.
"""

from __future__ import annotations

from sherd.comm.backend.creation import create
from sherd.comm.backend.group import Group

__all__ = ["Group", "create"]
