"""The options of `sherd run`: names, help, and what may be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer

from sherd.errors import ConfigError, nearest

MOST = 1 << 30
MOST_AUTO = 8  # ranks that `-n auto` starts

# Asking the registry would import torch, which takes seconds. A test compares the two.
STRATEGIES = ("ddp", "diloco", "gossip", "local", "local-sgd", "zero1", "zero2", "zero3")

# torchrun's names for our options. They are accepted but not listed.
_ELSEWHERE = {"nproc-per-node": "ranks"}


def normalised(name: str) -> str:
    """An option as we spell it."""
    dashed = name.replace("_", "-")
    return _ELSEWHERE.get(dashed, dashed)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def number(least: int, most: int = MOST, more: str = "") -> Callable[[str | int], int]:
    """A parser of whole numbers, with an error that shows what was found."""

    def parse(text: str | int) -> int:
        if not str(text).isdecimal() or not least <= int(text) <= most:
            upper = f" to {most}" if most < MOST else " up"
            raise typer.BadParameter(f"found {text!r}, expected a whole number from {least}{upper}{more}")
        return int(text)

    return parse


def rank_count(text: str | int) -> int:
    if text == "auto":
        return min(cores(), MOST_AUTO)
    return number(1, more=", or auto")(text)


def check_strategy(name: str | None) -> None:
    if name is not None and name not in STRATEGIES:
        raise ConfigError(f"--strategy {name!r} is not known; {nearest(name, STRATEGIES)}")


_COUNT = {"parser": number(1), "metavar": "COUNT"}

Script = Annotated[str, typer.Argument(help="A Python file; with -m, a module.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)]
Ranks = Annotated[
    int,
    typer.Option(
        "-n",
        "--ranks",
        parser=rank_count,
        metavar="COUNT",
        help=f"Ranks on this machine; auto: one per core, at most {MOST_AUTO}.",
    ),
]
Module = Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"For every distribute without strategy=: {', '.join(STRATEGIES)}.",
        show_default=False,
        autocompletion=lambda: list(STRATEGIES),
    ),
]
Nnodes = Annotated[int, typer.Option(help="Machines in the run; start sherd run on each.", **_COUNT)]
NodeRank = Annotated[int, typer.Option(parser=number(0), metavar="RANK", help="The number of this machine.")]
MasterAddr = Annotated[str | None, typer.Option(help="Address of machine 0.", show_default=False)]
MasterPort = Annotated[int, typer.Option(parser=number(1, 65535), metavar="PORT", help="A free port of machine 0.")]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A file with the secret that the machines share; also SHERD_TOKEN_FILE or SHERD_TOKEN.",
        show_default=False,
    ),
]
Wait = Annotated[int, typer.Option(metavar="SECONDS", parser=number(1), help="How long machines wait for each other.")]
Standalone = Annotated[bool, typer.Option("--standalone", hidden=True)]  # torchrun's; here one machine is the default
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="A,B:4",
        help="Start the run on these machines over ssh; a number after a name sets its ranks.",
        show_default=False,
    ),
]
Ssh = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="The command that --hosts calls with a host and a command; default: ssh.",
        show_default=False,
    ),
]
RemotePython = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="FILE",
        help="The interpreter on --hosts; default: the same path as here.",
        show_default=False,
    ),
]
LogDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Write the output of each rank to its own file.", show_default=False),
]
Events = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Write events there, for sherd report.", show_default=False),
]
Csv = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write a line per step.", show_default=False)]
Tensorboard = Annotated[
    str | None, typer.Option("--tensorboard", metavar="DIR", help="Write figures for TensorBoard.", show_default=False)
]
Layers = Annotated[bool, typer.Option("--layers", help="Add norms and update ratios per layer to the events.")]
Live = Annotated[bool, typer.Option("--live", help="Show the progress of the training in the terminal.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="No display and no warnings; only the output of ranks, and errors.")
]
Attended = Annotated[bool, typer.Option("--attended", hidden=True)]
Label = Annotated[str, typer.Option("--label", hidden=True)]
