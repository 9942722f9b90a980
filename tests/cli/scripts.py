"""A script that ranks run, those that run it, and a terminal for the command."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

from tests.helpers.processes import PATIENCE, SHERD, wait_for

RANK = """
import json, os, pathlib, signal, sys, time
rank, here = os.environ["RANK"], pathlib.Path(__file__).parent
for name in sys.argv[2:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "LOGLEVEL")
note = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
partial = here / f"partial-{rank}"
partial.write_text(json.dumps(note))
partial.rename(here / f"note-{rank}.json")
what = sys.argv[1] if len(sys.argv) > 1 else "pass"
if what in ("raise", "kill", "record"):
    while len(list(here.glob("note-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == "1":
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "record":
            about = {"message": "Boom", "extraInfo": {"py_callstack": "recorded by rank 1", "timestamp": "1"}}
            pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": about}))
            sys.exit(7)
        raise ValueError("the weather is bad")
if what != "pass":
    time.sleep(600)
"""


def ranks_alive(here):
    """Processes, of any parent, that run the script of this directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().split(b"\0")
                if bytes(here / "rank_script.py") in command and not {b"sherd", b"sherd.cli"} & set(command):
                    found.append(int(process.name))
    return found


def notes(here):
    return [json.loads(path.read_text()) for path in sorted(here.glob("note-*.json"))]


@contextlib.contextmanager
def two_ranks_that_sleep(here, *arguments, under=()):
    command = [*under, *SHERD, "run", "-n", "2", str(here / "rank_script.py"), "sleep", *arguments]
    # Into a file: a rank that is left behind would hold a pipe open, and this test with it.
    with (here / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        wait_for(lambda: len(notes(here)) == 2)
        assert len(ranks_alive(here)) == 2  # or the check below could not fail
        yield process
    finally:
        process.kill()
        process.wait()


def in_terminal(command, answers=()):
    """Run in a terminal of its own, type each answer once its question has come; what it showed, and its status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {**os.environ, "TERM": "xterm"})
    shown, seen, answers, end = b"", 0, list(answers), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the last process that had it has ended
            break
        shown += data
        if answers and answers[0][0] in shown[seen:]:
            seen = len(shown)
            os.write(terminal, answers.pop(0)[1])
    else:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert not answers, shown.decode(errors="replace")
    return shown.decode(errors="replace"), status
