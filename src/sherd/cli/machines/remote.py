"""Where `sherd run --hosts` runs, and the command for each machine."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sherd.cli.launch.request import Showing
from sherd.errors import ConfigError

_HOST = re.compile(r"(?:[\w.-]+@)?(?:\w[\w.-]*|\[[0-9a-fA-F:.]+\])(?::(?P<ranks>[0-9]+))?")
# What the results or the speed of a rank depend on. Never a token: others can read the command lines of a machine.
_PASSED_ON = re.compile(r"SHERD_|GLOO_|NCCL_|OMP_|MKL_|TORCH|PYTHON")
_SECRET = ("SHERD_TOKEN", "SHERD_TOKEN_FILE")
_OF_HERE = ("SHERD_HOST",)  # the same name everywhere would make all hosts count as one


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Remote:
    """Where to run, and how to reach it."""

    hosts: list[Host]
    ssh: list[str]
    python: str
    address: str  # of the first host, for the others
    port: int
    wait: float
    token: str

    @classmethod
    def of(
        cls,
        hosts: str,
        ranks: int,
        ssh: str,
        python: str | None,
        address: str | None,
        port: int,
        wait: float,
        token_file: str | None,
    ) -> Remote:
        parsed = _parsed(hosts, ranks)
        try:
            words = shlex.split(ssh)
        except ValueError as error:
            raise ConfigError(
                f"--ssh {ssh!r} cannot be read ({error}); write a command, such as --ssh 'ssh -p 2222'"
            ) from None
        if not words:
            raise ConfigError("--ssh is empty; write a command, such as --ssh 'ssh -p 2222'")
        bare = parsed[0].name.rpartition("@")[2].strip("[]")
        return cls(parsed, words, python or sys.executable, address or bare, port, wait, _token(token_file))


def _parsed(hosts: str, ranks: int) -> list[Host]:
    found: dict[str, Host] = {}
    for word in hosts.split(","):
        match = _HOST.fullmatch(word.strip())
        if match is None:
            raise ConfigError(
                f"--hosts {hosts!r}: {word.strip()!r} is not a host; write names with commas, such as a,b:4,me@c"
            )
        count = match["ranks"]
        name = word.strip() if count is None else word.strip().removesuffix(f":{count}")
        if count is not None and int(count) < 1:
            raise ConfigError(f"--hosts {hosts!r}: {name} needs at least one rank, found {count}")
        if name in found:
            raise ConfigError(
                f"--hosts {hosts!r}: {name} is listed twice; write {name}:{2 * ranks} for more ranks there"
            )
        found[name] = Host(name, ranks if count is None else int(count))
    return list(found.values())


def _token(file: str | None) -> str:
    """The user's token, or a new one."""
    named = file if file is not None else None if os.environ.get(_SECRET[0]) else os.environ.get(_SECRET[1])
    if named is not None:
        try:
            return Path(named).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"the token file {named!r} cannot be read: {error}") from None
    return os.environ.get(_SECRET[0]) or secrets.token_hex(32)


def command_for(
    remote: Remote, number: int, words: Sequence[str], showing: Showing, strategy: str | None, layers: bool
) -> str:
    """The command for a machine's shell, as one word: ssh would join several with blanks."""
    host = remote.hosts[number]
    command = [remote.python, "-m", "sherd", "run", "--attended", "--ranks", str(host.ranks), "--label", host.name]
    command += ["--wait", f"{remote.wait:g}"]
    if len(remote.hosts) > 1:
        command += ["--nnodes", str(len(remote.hosts)), "--node-rank", str(number)]
        command += ["--master-addr", remote.address, "--master-port", str(remote.port)]
    for option, value in (("--events", showing.events), ("--log-dir", showing.log_dir)):
        command += [option, str(value)] if value is not None else []
    command += ["--strategy", strategy] if strategy is not None else []
    command += ["--layers"] if layers else []
    command += ["--quiet"] if showing.quiet else []
    command += words
    stays = (*_SECRET, *_OF_HERE)
    passed = [f"{name}={value}" for name, value in os.environ.items() if _PASSED_ON.match(name) and name not in stays]
    script = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*passed, *command])}"
    return f"exec sh -c {shlex.quote(script)}"
