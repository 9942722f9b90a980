"""`sherd run`: ranks of a script, started by torch's own launcher, and one clear message when one of them fails."""

from __future__ import annotations

import contextlib
import importlib.machinery
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
import typer

from sherd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

# The launcher names the first failure it sees. A dying rank takes its peers along within tenths of a second, so it has
# to look more often than that to see the cause before the consequences.
POLL_SECONDS = 0.02
GRACE_SECONDS = 10
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOPBACK = "127.0.0.1"


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
) -> None:
    """Start ranks of a script. Options of sherd come before the script, its own after it."""
    _check_nodes(nnodes, node_rank, master_addr)
    _check_script(script, module)
    # Every rank with a thread per core would make them wait for each other; torch's own default here is 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    command = ["-u", *(["-m"] if module else []), script, *(arguments or [])]
    with tempfile.TemporaryDirectory(prefix="sherd-run-") as errors, _no_rank_left(errors):
        rendezvous = _one_node() if nnodes == 1 else _many_nodes(node_rank, f"{master_addr}:{master_port}")
        raise typer.Exit(_launch(_launch_config(ranks, nnodes, errors, rendezvous), command))


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


def _one_node() -> dict[str, Any]:
    # Port 0: any free one, so that two runs on a machine do not meet. Loopback: no name has to resolve.
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"{LOOPBACK}:0",
        "local_addr": LOOPBACK,
        "run_id": uuid.uuid4().hex,
    }


def _many_nodes(node_rank: int, endpoint: str) -> dict[str, Any]:
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"rank": node_rank},
        "run_id": "sherd",
    }


def _launch_config(ranks: int, nnodes: int, errors: str, rendezvous: dict[str, Any]) -> LaunchConfig:
    # Late: importing torch takes seconds, and bad input should be answered at once.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=ranks,
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=errors),
        shutdown_timeout=GRACE_SECONDS,
        **rendezvous,
    )


def _launch(config: LaunchConfig, command: list[str]) -> int:
    """Run the ranks to their end; the exit status."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if "LOGLEVEL" not in os.environ:
        logging.disable()  # the launcher's own lines, in this process alone; LOGLEVEL is torch's way to ask for them
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return _report(error.failures)
    except SignalException as stop:
        _say(f"stopped by {stop.sigval.name}; all ranks have ended")
        return 128 + stop.sigval
    except Exception as error:
        _say(f"the ranks could not be started: {type(error).__name__}: {error}")
        return 1
    return 0


def _report(failures: dict[int, ProcessFailure]) -> int:
    """Say which rank failed first, and what became of the others; the exit status."""
    (first, cause), *others = failures.items()  # in the order in which the launcher saw them
    traceback = _recorded_traceback(cause)
    where = "" if traceback or cause.exitcode < 0 else "; what it wrote is above"
    _say(f"rank {first} failed first (pid {cause.pid}): {_ending(cause)}{where}")
    if traceback:
        print(traceback, file=sys.stderr)
    endings: dict[str, list[int]] = {}
    for rank, failure in others:
        endings.setdefault(_ending(failure), []).append(rank)
    for ending, ranks in endings.items():
        _say(f"after it, rank {', '.join(map(str, sorted(ranks)))}: {ending}")
    return cause.exitcode if cause.exitcode > 0 else 128 - cause.exitcode


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out"
    return f"ended by {failure.signal_name()}"


def _recorded_traceback(failure: ProcessFailure) -> str:
    """The traceback that the rank left in its error file, where it wrote one."""
    message: Any = failure.message
    return str(message.get("extraInfo", {}).get("py_callstack", "")).rstrip() if isinstance(message, dict) else ""


@contextlib.contextmanager
def _no_rank_left(errors: str) -> Iterator[None]:
    """End whatever is still alive below this process: a signal can reach the launcher before it knows its ranks."""

    def stop(number: int, frame: object) -> NoReturn:
        # Not an exception: while torch is imported there are places that swallow one, and the run would go on.
        shutil.rmtree(errors, ignore_errors=True)
        os._exit(128 + number)

    for number in STOPPING:  # the launcher puts its own handlers in their place before it starts ranks
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_SECONDS)


def _say(text: str) -> None:
    print(f"sherd run: {text}", file=sys.stderr, flush=True)
