"""Whether the host transport works on this machine."""

from __future__ import annotations

import functools
import os
import socket
import sys

from sherd.comm.host import futex
from sherd.comm.host.memory import MemfdKeeper, SharedBlock


@functools.cache
def unsupported_reason() -> str | None:
    """Why the host transport cannot work here, or None. Tries each thing it needs instead of guessing."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if not futex.available():
        return f"it knows no futex call for {os.uname().machine}"
    try:
        fd = MemfdKeeper().create("probe", 1)
        try:
            block = SharedBlock(fd)
        finally:
            os.close(fd)
        futex.wake(block.address)
        os.close(os.pidfd_open(os.getpid()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0sherd-probe-{os.getpid()}-{os.urandom(8).hex()}")
    except (OSError, AttributeError) as error:
        return f"memfd, pidfd or abstract sockets are not available: {error}"
    return None
