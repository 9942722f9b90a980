"""`sherd run --hosts a,b`: a `sherd run` on each of these machines, started over ssh.

The token is sent to ssh's standard input, which then stays open: closing it, or sending the name of a signal, ends the
run there (see `attendance`). The output of a machine comes back over ssh's stdout and stderr, in whole lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from sherd.cli.launch.checks import check_directories
from sherd.cli.launch.request import Showing
from sherd.cli.launch.stopping import STOPPING, Stopped, signals_raise
from sherd.cli.machines.remote import Remote, command_for
from sherd.cli.messages import said_by, say
from sherd.cli.output.console import STDERR, STDOUT, Console, Writer
from sherd.cli.output.pieces import Pieces
from sherd.cli.output.watching import watched
from sherd.errors import ConfigError

POLL_SECONDS = 0.1
LONG_GRACE_SECONDS = 30.0  # for the other machines to end by themselves once one has failed: they report the cause
STOP_SECONDS = 25.0  # for machines that are told to end; ranks are killed after ten of them
SSH_FAILED, BAD_INPUT = 255, 2
GRACE_SECONDS = {SSH_FAILED: 0.0, BAD_INPUT: 5.0}  # a machine that never reached the rendezvous has told nobody


class Machine:
    """A `sherd run` at the other end of ssh."""

    def __init__(self, remote: Remote, number: int, command: str, console: Console) -> None:
        self.name = remote.hosts[number].name
        self._console = console
        pipe = subprocess.PIPE
        # In its own session: ^C in the terminal goes to this process, which forwards it.
        self._ssh = subprocess.Popen(
            [*remote.ssh, re.sub(r"[\[\]]", "", self.name), command],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        self._send(remote.token)
        self._threads = [
            threading.Thread(target=self._forward, args=(file.fileno(), stream), daemon=True)
            for file, stream in ((self._ssh.stdout, STDOUT), (self._ssh.stderr, STDERR))
            if file is not None
        ]
        for thread in self._threads:
            thread.start()

    def status(self) -> int | None:
        """None while it runs."""
        code = self._ssh.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self, number: signal.Signals) -> None:
        self._send(number.name)
        if self._ssh.stdin is not None:
            with contextlib.suppress(OSError):
                self._ssh.stdin.close()

    def kill(self) -> None:
        if self._ssh.poll() is None:  # or its pid may belong to another process by now
            os.killpg(self._ssh.pid, signal.SIGKILL)
        self._ssh.wait()

    def settle(self) -> None:
        """Wait for its last lines, but not for processes that still hold its output open."""
        for thread in self._threads:
            thread.join(1.0)

    def _send(self, word: str) -> None:
        if self._ssh.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                self._ssh.stdin.write(f"{word}\n".encode())
                self._ssh.stdin.flush()

    def _forward(self, pipe: int, stream: int) -> None:
        writer, pieces = Writer(stream), Pieces()
        while data := os.read(pipe, 1 << 16):
            self._console.put(writer, pieces.cut(data))
            self._console.flush()
        if rest := pieces.take():
            self._console.put(writer, [rest])
            self._console.flush()


def run_on_hosts(remote: Remote, words: Sequence[str], showing: Showing, *, strategy: str | None, layers: bool) -> int:
    """Run on all hosts until they end; the exit status."""
    if showing.needs_events and showing.events is None:
        check_directories(showing, machines=max(2, len(remote.hosts)))
    if showing.needs_events:
        # Once, before anything is written. Logs are written on the hosts, and so are events that are not read here.
        check_directories(dataclasses.replace(showing, log_dir=None), machines=1)
    console = Console()
    machines: list[Machine] = []
    try:
        with signals_raise(STOPPING), said_by(console.say), watched(showing, console) as watcher:
            status = 1
            try:
                for number in range(len(remote.hosts)):
                    command = command_for(remote, number, words, showing, strategy, layers)
                    machines.append(Machine(remote, number, command, console))
                status = _watch(machines)
            except OSError as error:
                raise ConfigError(
                    f"{remote.ssh[0]!r} cannot be run ({error.strerror}); --ssh names the command"
                ) from None
            except Stopped as stop:
                _stop(machines, stop.signal)
                raise
            finally:
                for machine in machines:
                    machine.kill()
                    machine.settle()
                if watcher is not None:
                    watcher.close(well=status == 0)
            return status
    except Stopped as stop:
        say(f"stopped by {stop.signal.name}; all hosts have ended")
        return 128 + stop.signal


def _watch(machines: list[Machine]) -> int:
    """Wait until all have ended. If one fails, the others are ended."""
    failed: dict[str, int] = {}
    end = float("inf")
    while running := [machine for machine in machines if machine.status() is None]:
        end = min(end, _look(machines, failed))
        if time.monotonic() >= end:
            _stop(running, signal.SIGTERM)
            break
        time.sleep(POLL_SECONDS)
    else:
        _look(machines, failed)  # those that have ended in the meantime
    statuses = [*failed.values(), *(machine.status() or 0 for machine in machines)]
    # A machine whose ranks were stopped because of another one ends with 1: the cause's status says more.
    return next((status for status in statuses if status > 1), max(statuses))


def _look(machines: list[Machine], failed: dict[str, int]) -> float:
    """Record new failures, and report those of ssh. Returns until when the others may go on."""
    end = float("inf")
    for machine in machines:
        status = machine.status()
        if status and machine.name not in failed:
            failed[machine.name] = status
            machine.settle()
            if status == SSH_FAILED:
                say(f"ssh to {machine.name} failed, or the connection was lost (status {SSH_FAILED})")
            end = min(end, time.monotonic() + GRACE_SECONDS.get(status, LONG_GRACE_SECONDS))
    return end


def _stop(machines: Sequence[Machine], number: signal.Signals) -> None:
    """End them. A second ^C does not wait."""
    for machine in machines:
        machine.stop(number)
    end = time.monotonic() + STOP_SECONDS
    while time.monotonic() < end and any(machine.status() is None for machine in machines):
        time.sleep(POLL_SECONDS)
