"""What has to be in order on this machine before ranks are started, checked before they are.

Without it they fail in places that say nothing of the cause, or wait for minutes.
"""

from __future__ import annotations

import resource
import socket

from sherd.errors import Unsupported

# Measured with torch 2.13: 4 files for an interpreter, about 12 for a communicator and 3 for every peer; imports and
# the store of the launcher come on top. Twice that, as scripts have files too.
BASE_FILES, FILES_PER_RANK = 48, 4
MOST_FILES = 65536  # an unlimited number makes programs slow that go through all of them
LOOPBACK = "127.0.0.1"


def files_needed(world_size: int) -> int:
    """About how many files a rank, or its launcher, has open at a time."""
    return BASE_FILES + FILES_PER_RANK * world_size


def most_files() -> int:
    """How many a process may have open, if it raises its limit as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST_FILES if hard == resource.RLIM_INFINITY else hard


def check_files(world_size: int) -> None:
    """Raise the limit of open files if it is too low for this many ranks and may be raised; what is started later
    inherits it."""
    needed = files_needed(world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if most_files() < needed:
        raise Unsupported(
            f"a process may open {soft} files on this machine, and {world_size} ranks need about {needed} in each; "
            f"write `ulimit -n {max(1024, needed)}` before, or have the administrator raise the limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(min(most_files(), MOST_FILES), needed), hard))


def check_loopback() -> None:
    """Ranks of a machine meet over loopback, which a container may have left down."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3.0).close()
    except OSError as error:
        raise unreachable(LOOPBACK, error) from error


def unreachable(address: str, error: OSError) -> Unsupported:
    """The error of a machine that does not get through to a socket of its own."""
    return Unsupported(
        f"this machine does not reach itself at {address} ({error.strerror or 'no answer'}), which ranks need: is the "
        "loopback interface down? See `ip address`; `ip link set lo up` brings it up"
    )
