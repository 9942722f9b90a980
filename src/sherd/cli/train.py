"""`sherd train`: train a recipe on this machine, and write a report."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import typer

from sherd import recipes
from sherd.cli.launch.checks import make_directory
from sherd.cli.options import check_strategy, rank_count
from sherd.errors import ConfigError, SherdError, nearest

STRATEGY = "zero3"  # the default for recipes
_INVALID = re.compile(r"invalid (int|float) value: ('.*')")
_KINDS = {"int": "a whole number", "float": "a number"}


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="The name of a recipe; without it, all are listed.",
            show_default=False,
            autocompletion=lambda: _names(),  # noqa: PLW0108  # it is defined below
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its options: sherd train RECIPE --help.", show_default=False)
    ] = None,
) -> None:
    """Train one of the recipes that come with sherd, and write a report."""
    if recipe is None:
        print(_listing())
        return
    if recipe.startswith("-"):
        raise ConfigError(f"the recipe comes before its options; write sherd train {_names()[0]} {recipe} ...")
    if recipe not in _names():
        raise ConfigError(f"there is no recipe {recipe!r}; {nearest(recipe, _names())}")
    raise typer.Exit(_train(recipe, arguments or []))


def _names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def _listing() -> str:
    """All recipes, each with the first line of its file. They are read, not imported: torch takes seconds."""
    lines = []
    for name in _names():
        source = (Path(recipes.__path__[0]) / f"{name}.py").read_text()
        lines.append(f"  {name:10}{(ast.get_docstring(ast.parse(source)) or '').partition(chr(10))[0]}")
    return "\n".join(["sherd train RECIPE [OPTIONS] runs one of these; RECIPE --help shows its options:", *lines])


def _train(name: str, words: Sequence[str]) -> int:
    recipe = importlib.import_module(f"sherd.recipes.{name}")
    arguments, own = _parse(name, recipe, words)
    check_strategy(arguments.strategy)
    recipe.check(arguments, arguments.ranks)
    run = arguments.run or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_directory(run, "--run", unused="*")

    from sherd.cli.run import run_command

    command = ["-m", recipe.__name__, *own]
    strategy = arguments.strategy or os.environ.get("SHERD_STRATEGY") or STRATEGY
    quiet = arguments.quiet
    status = run_command(command, arguments.ranks, strategy=strategy, live=not quiet, events=run, quiet=quiet)
    if status == 0:
        # Running ranks leaves signals ignored; a report may take a while, and Ctrl-C should end it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _report(run)
    return status


def _parse(name: str, recipe: ModuleType, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """All options, and the arguments for the recipe itself."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser: argparse.ArgumentParser = recipe.parser()
    parser.prog = f"sherd train {name}"
    for each in (ours, parser):
        _add_options(each.add_argument_group("the run"))
        each.error = _refuse  # type: ignore[method-assign]
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        raise ConfigError(
            f"{unknown[0]!r} is not an option of {name}; {nearest(unknown[0].partition('=')[0], options)}"
        )
    return arguments, ours.parse_known_args(words)[1]


def _add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n",
        "--ranks",
        type=_ranks,
        default=rank_count("auto"),
        metavar="COUNT",
        help="ranks on this machine (default: one per core, at most 8: %(default)s)",
    )
    group.add_argument("--run", type=Path, metavar="DIR", help="where events and the report go (default: runs/...)")
    group.add_argument("--quiet", action="store_true", help="no live display")


def _ranks(text: str) -> int:
    try:
        return rank_count(text)
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _refuse(message: str) -> NoReturn:
    words = _INVALID.sub(lambda found: f"found {found[2]}, expected {_KINDS[found[1]]}", message)
    raise ConfigError(words.removeprefix("argument "))


def _report(run: Path) -> None:
    """Write the report; its path is the last line printed."""
    try:
        from sherd.report.html import report

        path = report([run])
    except (ImportError, SherdError) as error:  # the training succeeded, and its events are kept
        print(f"sherd: no report: {error}; later: sherd report {run}", file=sys.stderr)
        return
    print(path)
