"""Commands and other processes: started, watched and waited for."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

SHERD = [sys.executable, "-m", "sherd.cli"]
PATIENCE = 120  # seconds; of a run that hangs


def run(*command, seconds=PATIENCE, cwd=None, **environment):
    """A command that has ended, with what it wrote."""
    environ = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=seconds, check=False)


def python(code, *arguments, **options):
    return run(sys.executable, "-c", code, *arguments, **options)


def sherd(*arguments):
    return run(*SHERD, *arguments)


def eventually(condition, seconds=5.0):
    """Whether something becomes true within this time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(found)


def wait_for(condition, what="what the test waits for", seconds=PATIENCE):
    assert eventually(condition, seconds), f"{what} did not happen within {seconds} s"


def alive(pid):
    """Whether a process runs, or at least has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descriptors():
    """How many files and sockets this process has open."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def free_port():
    """A port that the kernel gives to nobody who asks for any, so that it is still free when the run has started."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, first), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
