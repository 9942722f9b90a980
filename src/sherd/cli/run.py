"""`sherd run`: run a script on several ranks, with one clear message when one of them fails."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from sherd.cli import options
from sherd.cli.launch.checks import check_directories, check_module, check_syntax, warnings_at_start
from sherd.cli.launch.request import Request, Showing
from sherd.cli.launch.start import start
from sherd.cli.launch.stopping import STOPPING
from sherd.cli.launch.variables import check_values
from sherd.cli.messages import say, speak_as
from sherd.cli.options import check_strategy
from sherd.errors import ConfigError

LATE = ("-n", "--ranks", "--nproc-per-node", "--nproc_per_node", "--live", "--hosts")  # rarely options of the script


def run(
    script: options.Script,
    arguments: options.Arguments = None,
    *,
    ranks: options.Ranks = 1,
    module: options.Module = False,
    strategy: options.Strategy = None,
    live: options.Live = False,
    events: options.Events = None,
    csv: options.Csv = None,
    tensorboard: options.Tensorboard = None,
    layers: options.Layers = False,
    log_dir: options.LogDir = None,
    quiet: options.Quiet = False,
    hosts: options.Hosts = None,
    ssh: options.Ssh = None,
    python: options.RemotePython = None,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    master_addr: options.MasterAddr = None,
    master_port: options.MasterPort = 29500,
    token_file: options.TokenFile = None,
    wait: options.Wait = 600,
    standalone: options.Standalone = False,
    attended: options.Attended = False,
    label: options.Label = "",
) -> None:
    """Run a script on several ranks. Options of sherd come before the script, its own after it."""
    speak_as(label)
    _check_nodes(nnodes, node_rank, master_addr, standalone)
    if ranks == 1 and not quiet and (late := next((word for word in arguments or () if word in LATE), None)):
        say(f"note: {late} comes after the script, so it is passed to the script; options of sherd come before it")
    words = [*(["-m"] if module else []), script, *(arguments or [])]
    showing = Showing(*_paths(log_dir, events, csv, tensorboard), live and not quiet, quiet, label, attended)
    if layers and not (showing.needs_events or showing.events or os.environ.get("SHERD_EVENTS")):
        raise ConfigError("--layers adds to the events; also write --events DIR, --live, --csv or --tensorboard")
    if hosts is not None:
        if nnodes > 1 or node_rank > 0:
            raise ConfigError("--hosts starts every machine itself; leave out --nnodes and --node-rank")
        over = (ranks, "ssh" if ssh is None else ssh, python, master_addr, master_port, wait, token_file)
        raise typer.Exit(_run_on_hosts(hosts, over, words, showing, strategy, layers))
    _check_local(python, ssh)
    machines = (nnodes, node_rank, master_addr or "", master_port, token_file, wait)
    raise typer.Exit(_run(words, ranks, showing, strategy, layers, machines))


def run_command(
    command: Sequence[str],
    ranks: int,
    *,
    strategy: str | None = None,
    live: bool = False,
    quiet: bool = False,
    events: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    layers: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Run ranks on this machine, as `sherd run` does; the exit status. For other commands of sherd.

    `command` is what would follow `python`: a script and its arguments, or "-m", a module and its arguments. Call it
    from the main thread: it handles signals until it returns, and sets environment variables. Bad input raises
    `ConfigError`.
    """
    showing = Showing(*_paths(log_dir, events, csv, tensorboard), live and not quiet, quiet)
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        return _run(list(command), ranks, showing, strategy, layers, (1, 0, "", 29500, None, 600))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    words: list[str],
    ranks: int,
    showing: Showing,
    strategy: str | None,
    layers: bool,
    machines: tuple[int, int, str, int, str | None, float],
) -> int:
    """Check everything, set the ranks' environment, and start."""
    _check_script(words)
    check_strategy(strategy)
    check_values(os.environ if strategy is None else {})
    request = Request([sys.executable, "-u", *words], ranks, *machines, showing)
    check_directories(showing, request.machines)
    if not showing.quiet:
        for warning in warnings_at_start(ranks):
            say(f"warning: {warning}")
    # With a thread per core in every rank, they would compete for the cores; torchrun's default is 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, options.cores() // ranks)))
    if strategy is not None:
        os.environ["SHERD_STRATEGY"] = strategy
    if layers:
        os.environ["SHERD_LAYERS"] = "1"
    return start(request)


def _run_on_hosts(
    hosts: str,
    over: tuple[int, str, str | None, str | None, int, float, str | None],
    words: list[str],
    showing: Showing,
    strategy: str | None,
    layers: bool,
) -> int:
    """Run on each of the hosts; `over` are the other arguments of `Remote.of`."""
    from sherd.cli.machines.hosts import run_on_hosts
    from sherd.cli.machines.remote import Remote

    check_strategy(strategy)
    return run_on_hosts(Remote.of(hosts, *over), words, showing, strategy=strategy, layers=layers)


def _check_local(python: str | None, ssh: str | None) -> None:
    if python is not None:
        raise ConfigError("--python is for --hosts; here the interpreter is the one that runs sherd")
    if ssh is not None:
        raise ConfigError("--ssh is for --hosts; also write the hosts, such as --hosts a,b")


def _paths(*texts: str | os.PathLike[str] | None) -> tuple[Path | None, Path | None, Path | None, Path | None]:
    log_dir, events, csv, tensorboard = (None if text is None else Path(text) for text in texts)
    return log_dir, events, csv, tensorboard


def _check_nodes(nnodes: int, node_rank: int, master_addr: str | None, standalone: bool) -> None:
    if node_rank >= nnodes:
        raise ConfigError(f"--node-rank {node_rank} must be below --nnodes {nnodes}: machines are numbered from 0")
    if nnodes > 1 and standalone:
        raise ConfigError(f"--standalone is for one machine, but --nnodes is {nnodes}; leave one of them out")
    if nnodes > 1 and not master_addr:
        raise ConfigError(f"--nnodes {nnodes} needs --master-addr: write the address of machine 0")


def _check_script(words: list[str]) -> None:
    if words[0] != "-m":
        if not Path(words[0]).is_file():
            found = "is a directory" if Path(words[0]).is_dir() else "does not exist"
            raise ConfigError(f"the script {words[0]!r} {found}; write the path of a Python file, or -m and a module")
        check_syntax(Path(words[0]))
    else:
        check_module(words[1])
