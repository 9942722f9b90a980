"""The ranks of one contender as processes, seen from the controller: start them, ask them, weigh them, end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from typing_extensions import Self

from benchmarks.serving import Failed

ROOT = Path(__file__).parents[1]
SAMPLE_EVERY = 0.02
LONGEST_GOODBYE = 10.0


class GroupFailed(Exception):
    """A contender cannot go on: the few words for its row, and all that is known."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details


class Processes:
    """Some ranks that run `main` of one module. A context manager: at its end no process of it is left."""

    def __init__(self, module: str, timeout: float) -> None:
        self.module, self.timeout = module, timeout
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.disturbance = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.end()
        else:
            self.kill()  # nobody waits for goodbyes after Ctrl-C

    def start_process(self, variables: Mapping[str, str], threads: int = 1, cores: Iterable[int] | None = None) -> None:
        """One more rank, with these variables; on these cores only, if any are given."""
        here, there = Pipe()
        # Not -m: both sides must know the messages by one name.
        confined = f"import os; os.sched_setaffinity(0, {sorted(cores)}); " if cores is not None else ""
        code = f"{confined}from {self.module} import main; main()"
        self.pipes.append(here)
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(there.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **variables},
                cwd=ROOT,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                start_new_session=True,  # Ctrl-C reaches the controller alone, which then ends its ranks
            )
        )
        there.close()

    def ask_all(self, command: Any, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """The same for every rank."""
        return self.ask([command] * len(self.pipes), meanwhile)

    def ask(self, commands: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """One answer per rank."""
        for pipe, command in zip(self.pipes, commands, strict=True):
            with suppress(OSError):  # a rank is gone: reading tells which one and why
                pipe.send(command)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < len(self.pipes):
            if time.monotonic() > deadline:
                late = [str(rank) for rank in range(len(self.pipes)) if rank not in answers]
                raise GroupFailed(f"no answer of rank {', '.join(late)} within {self.timeout:g} s", self._tail())
            pending = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for ready in wait(pending, SAMPLE_EVERY if meanwhile else 1.0):
                rank = self.pipes.index(ready)  # type: ignore[arg-type]
                answers[rank] = self._answer(rank)
            if meanwhile:
                meanwhile()
        return [answers[rank] for rank in range(len(self.pipes))]

    def ask_watched(self, commands: Sequence[Any]) -> list[Any]:
        """One answer per rank. `disturbance` says which part of the machine other processes had meanwhile."""
        start, busy, own = time.monotonic(), _busy_seconds(), self._cpu_seconds()
        answers = self.ask(commands)
        cores = (time.monotonic() - start) * (os.cpu_count() or 1)
        self.disturbance = max(0.0, (_busy_seconds() - busy) - (self._cpu_seconds() - own)) / cores
        return answers

    def weigh(self) -> int:
        """Proportional bytes of all ranks, without the pages of files.

        Every page is divided by the number of processes that have it, so what ranks share counts once. Pages of
        files are the code of libraries: how much of it a rank is charged depends on who else has torch loaded.
        """
        return sum(
            1024 * _kilobytes(process.pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for process in self.processes
        )

    def file_bytes(self) -> int:
        """Pages of files that the ranks have mapped, as if each were alone on the machine."""
        return sum(1024 * _kilobytes(process.pid, "status", "RssFile:") for process in self.processes)

    def end(self) -> None:
        """Ask, then kill. Each rank leads a session of its own, so that what it may have started goes with it."""
        for pipe in self.pipes:
            with suppress(OSError):  # it may be gone already
                pipe.send(None)
        deadline = time.monotonic() + LONGEST_GOODBYE
        try:
            with suppress(subprocess.TimeoutExpired):
                for process in self.processes:
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.returncode is None:  # not waited for, so the number is still its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for pipe in self.pipes:
            pipe.close()
        self.output.close()
        self.processes, self.pipes = [], []

    def _answer(self, rank: int) -> Any:
        try:
            answer = self.pipes[rank].recv()
        except (EOFError, OSError):
            code = self.processes[rank].wait()
            raise GroupFailed(f"rank {rank} died: exit code {code}", self._tail()) from None
        if isinstance(answer, Failed):
            raise GroupFailed(answer.reason, answer.details)
        return answer

    def _cpu_seconds(self) -> float:
        return sum(_cpu_seconds(process.pid) for process in self.processes)

    def _tail(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-4000:]


def _kilobytes(pid: int, file: str, *fields: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0  # it has just died, which the next answer tells
    return sum(int(line.split()[1]) for line in lines if line.startswith(fields))


def _cpu_seconds(pid: int) -> float:
    """Of all threads of a process, the ended ones too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """Of all cores, by anybody; what a hypervisor took away counts too."""
    user, nice, system, _, _, _, _, stolen, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
