"""`sherd run`: ranks of a script, and one clear message when one of them fails."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sherd.cli.messages import say
from sherd.cli.request import Request
from sherd.errors import ConfigError
from sherd.machine import check_files, check_loopback

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _number(least: int, most: int = 1 << 30) -> Callable[[str | int], int]:
    """A parser of whole numbers whose error shows what was found."""

    def parse(text: str | int) -> int:
        if not str(text).isdecimal() or not least <= int(text) <= most:
            upper = f" to {most}" if most < 1 << 30 else " up"
            raise typer.BadParameter(f"found {text!r}, expected a whole number from {least}{upper}")
        return int(text)

    return parse


_COUNT = {"parser": _number(1), "metavar": "COUNT"}


def run(
    script: Annotated[str, typer.Argument(help="A Python file; with -m, a module.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)] = None,
    *,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Ranks on this machine.", **_COUNT)] = 1,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    nnodes: Annotated[int, typer.Option(help="Machines of the run; each starts sherd run.", **_COUNT)] = 1,
    node_rank: Annotated[
        int, typer.Option(parser=_number(0), metavar="RANK", help="Which of the machines this is.")
    ] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Address of machine 0.", show_default=False)] = None,
    master_port: Annotated[
        int, typer.Option(parser=_number(1, 65535), metavar="PORT", help="A free port of machine 0.")
    ] = 29500,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A secret that the machines of a run share; also SHERD_TOKEN_FILE or SHERD_TOKEN.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        int, typer.Option(metavar="SECONDS", parser=_number(1), help="How long machines wait for each other.")
    ] = 600,
) -> None:
    """Start ranks of a script. Options of sherd come before the script, its own after it."""
    _check_nodes(nnodes, node_rank, master_addr)
    _check_script(script, module)
    # Every rank with a thread per core would make them wait for each other; torch's own default here is 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    command = [sys.executable, "-u", *(["-m"] if module else []), script, *(arguments or [])]
    request = Request(command, ranks, nnodes, node_rank, master_addr or "", master_port, token_file, wait)
    check_files(ranks)
    if nnodes == 1:
        check_loopback()
    with _ended_by_signals():
        raise typer.Exit(_launch(request))


def _check_nodes(nnodes: int, node_rank: int, master_addr: str | None) -> None:
    if node_rank >= nnodes:
        raise ConfigError(f"--node-rank {node_rank} must be below --nnodes {nnodes}: machines count from 0")
    if nnodes > 1 and not master_addr:
        raise ConfigError(f"--nnodes {nnodes} needs --master-addr: write the address of machine 0")


def _check_script(script: str, module: bool) -> None:
    if not module and not Path(script).is_file():
        found = "is a directory" if Path(script).is_dir() else "does not exist"
        raise ConfigError(f"the script {script!r} {found}; write the path of a Python file, or -m and a module")
    if module and not importlib.machinery.PathFinder.find_spec(script.partition(".")[0], [os.curdir, *sys.path]):
        raise ConfigError(f"there is no module {script!r} here or among the installed ones; write -m package.module")


def _launch(request: Request) -> int:
    """Run the ranks to their end; the exit status."""
    # Late: importing torch takes seconds, and bad input should be answered at once. Quiet: its store has warnings for
    # what is no concern of the user (a name that is not found), and for what we say ourselves.
    with _environ("TORCH_CPP_LOG_LEVEL", "ERROR"):
        from sherd.cli.launcher import run_ranks
        from sherd.cli.news import Newsroom
        from sherd.cli.ranks import Ranks, Stopped, signals_raise
        from sherd.cli.rendezvous import meet, meet_alone
        from sherd.cli.token import set_token

    seal = set_token(request.token_file, request.machines)
    try:
        with signals_raise(STOPPING):
            met = meet(request, seal) if request.machines > 1 else meet_alone(request.ranks, seal)
            with met as meeting:
                check_files(meeting.world_size)
                return run_ranks(Ranks(request.command, meeting), Newsroom(meeting))
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

    The launcher puts its own handlers in their place while it has ranks. Afterwards the exit status stands.
    """

    def stop(number: int, frame: object) -> NoReturn:
        # Not an exception: while torch is imported there are places that swallow one, and the run would go on.
        os._exit(128 + number)

    for number in STOPPING:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
