"""From a request to an exit status: signals, token, rendezvous of the machines, output, ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

from sherd.cli.launch.request import Request
from sherd.cli.launch.stopping import STOPPING, Stopped, signals_raise
from sherd.cli.machines.attendance import attend
from sherd.cli.messages import say
from sherd.machine import check_files, check_loopback


def start(request: Request) -> int:
    """Run the ranks until they end; the exit status."""
    check_files(request.ranks)
    if request.machines == 1:
        check_loopback()
    with _ended_by_signals():
        if request.showing.attended:
            attend()
        return _launch(request)


def _launch(request: Request) -> int:
    # Late: importing torch takes seconds, and bad input should be answered at once. Quiet: its store warns about things
    # that do not concern the user (a name that does not resolve), or that we report ourselves.
    with _environ("TORCH_CPP_LOG_LEVEL", "ERROR"):
        from sherd.cli.launch.launcher import run_ranks
        from sherd.cli.launch.ranks import Ranks
        from sherd.cli.machines.news import Newsroom
        from sherd.cli.machines.rendezvous import meet, meet_alone
        from sherd.cli.machines.token import set_token
        from sherd.cli.output.forwarding import output_of

    seal = set_token(request.token_file, request.machines)
    try:
        with signals_raise(STOPPING):
            met = meet(request, seal) if request.machines > 1 else meet_alone(request.ranks, seal)
            with met as meeting, output_of(request.showing, meeting.ranks) as output:
                check_files(meeting.world_size)
                return run_ranks(Ranks(request.command, meeting, output), Newsroom(meeting))
    except Stopped as stop:
        say(f"stopped by {stop.signal.name}; all ranks have ended")
        return 128 + stop.signal


@contextlib.contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    """Set a variable for a while, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, a signal ends this process at once, and with it its ranks, which are tied to it.

    The launcher installs its own handlers while it has ranks. Afterwards signals are ignored: the exit status is set.
    """

    def stop(number: int, frame: object) -> NoReturn:
        # Not an exception: importing torch may swallow one, and the run would go on.
        os._exit(128 + number)

    for number in STOPPING:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
