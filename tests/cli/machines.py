"""Machines for the launcher: hosts in network namespaces, named and configured as a fresh Debian is."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest

from sherd.errors import Unsupported
from sherd.testing import Hosts

NAMES = ("host-a", "host-b", "host-c")
PATIENCE = 120  # seconds; of a run that hangs

# In a mount and a host name of its own: the machine's own name leads to loopback, those of the others do not.
_SET_UP = 'hostname "$1" && mount --bind "$2" /etc/hosts && cd "$3" && shift 3 && exec "$@"'


class Machines:
    """`count` machines. `run(0, ...)` is `sherd run ...` on machine 0."""

    def __init__(self, hosts, directory):
        self.hosts = hosts
        self.directory = directory
        self.started = []
        for number, name in enumerate(NAMES):
            others = [f"{hosts[n].address} {other}" for n, other in enumerate(NAMES[: len(hosts._network.hosts)])]
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *(o for o in others if not o.endswith(name))]
            (directory / f"hosts-{number}").write_text("\n".join(lines) + "\n")

    def command(self, number, *command, **options):
        """Start a command on a machine."""
        inside = [
            "nsenter",
            f"--net={self.hosts[number].namespace}",
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            _SET_UP,
        ]
        place = ["sh", NAMES[number], str(self.directory / f"hosts-{number}"), str(self.directory)]
        process = subprocess.Popen([*inside, *place, *command], text=True, **options)
        self.started.append(process)
        return process

    def run(self, number, *arguments, **variables):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environ = {**os.environ, **variables}
        return self.command(number, sys.executable, "-m", "sherd.cli", "run", *arguments, env=environ, **pipes)

    def close(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """`machines(2)`; where none can be made, a skip."""
    for name in list(os.environ):
        if re.match("RANK$|WORLD_SIZE|MASTER_|GLOO_|SHERD_|OMP_", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in map(os.path.abspath, sys.path) if path))
    with contextlib.ExitStack() as stack:

        def make(count):
            try:
                hosts = stack.enter_context(Hosts(count))
            except Unsupported as error:
                pytest.skip(str(error))
            found = Machines(hosts, tmp_path)
            stack.callback(found.close)
            return found

        yield make


def finished(processes):
    """Exit statuses, and what each wrote to stdout and stderr."""
    return [(*process.communicate(timeout=PATIENCE), process.returncode) for process in processes]


def lines_until(stream, pattern):
    """What is written to a stream up to a line with this pattern, and the time at which that line came."""
    seen = []
    while line := stream.readline():
        seen.append(line)
        if re.search(pattern, line):
            return "".join(seen), time.monotonic()
    raise AssertionError(f"{pattern!r} did not come:\n{''.join(seen)}")
