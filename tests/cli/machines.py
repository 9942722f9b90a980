"""Machines for the launcher: hosts in network namespaces, named and configured as a fresh Debian is."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time

from tests.helpers.processes import PATIENCE, SHERD

NAMES = ("host-a", "host-b", "host-c")

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
        return self.command(number, *SHERD, "run", *arguments, env=environ, **pipes)

    def close(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


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
    raise AssertionError(f"{pattern!r} was not printed:\n{''.join(seen)}")
