"""The inside of a rank: execute the parent's commands, one byte each, and sleep in a blocking read between them.

Anything larger than a byte goes through memory files: the parent writes the *task* (one for all ranks) before it sends
RUN, and a rank writes its *result* before it sends RETURNED or RAISED. So a rank that is stopped or killed can never
leave the other side waiting for the rest of a message.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from sherd import observe
from sherd.comm.closing import leave_all

RUN, CLEAN, STOP = b"R", b"C", b"S"  # what the parent sends
READY, RETURNED, RAISED = b"+", b"r", b"x"  # what a rank answers
HERE = f"{Path(__file__).parent}{os.sep}"  # frames of files below this path are left out of reports


@dataclass(frozen=True)
class Task:
    """One run: what to call, and the environment to call it in. All ranks read the same one."""

    call: bytes  # pickled (fn, args), separately: a rank can only import fn once it has the caller's sys.path
    environ: dict[str, str]  # the caller's environment and the variables that all ranks share
    extra: dict[str, str]  # the caller's `env=`, which overrides everything
    threads: int | None  # for torch; None: its own choice when the process started
    sys_path: list[str] = field(default_factory=sys.path.copy)
    cwd: str = field(default_factory=os.getcwd)


def main(rank: int, control: socket.socket, parent: int) -> None:
    """The life of a rank, from its start to STOP. `parent` is a pipe that closes when the parent ends."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C in a terminal reaches idle ranks too, but is not for them
    _, (task, result, stacks), _, _ = socket.recv_fds(control, 1, 3)
    seed = torch.initial_seed()
    _show_stacks(stacks)
    control.sendall(READY)
    while (command := control.recv(1)) in (RUN, CLEAN):
        if command == RUN:
            _show_stacks(stacks)  # again: a function may have changed the handlers or the seed
            torch.manual_seed(seed)
            answer = _answer(lambda: _run(rank, task), result)
            observe.finish(answer == RETURNED)
            leave_all()  # its function has returned, so it takes part in nothing any more, though its process lives on
            control.sendall(answer)
        else:
            control.sendall(_answer(_destroy_process_group, result))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way.

    O_ASYNC turns the end of the pipe into a signal. Unlike a thread that waits for it, this also ends a rank that holds
    the GIL, and adds no thread to every reported stack. A rank that leads a process group takes the group with it.
    """
    whom = -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()
    fcntl.fcntl(parent, fcntl.F_SETOWN, whom)
    fcntl.fcntl(parent, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent, fcntl.F_SETFL, fcntl.fcntl(parent, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([parent], 0):  # the parent ended before we asked for the signal
        os._exit(1)


def _show_stacks(stacks: int) -> None:
    """Write the Python stacks of all threads to this file on SIGUSR1 and in a crash, even while the GIL is held."""
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)


def _answer(work: Callable[[], object], result: int) -> bytes:
    """Do `work` and leave its result, or the reason for its failure, in the result file."""
    try:
        value = work()
    except SystemExit as leaving:  # an exit code, not an error: let the process end with it
        if leaving.code not in (None, 0):
            leave_all(leaving)  # at exit nothing shows the code any more, and peers would take it for a good end
        raise
    except BaseException as error:
        leave_all(error)
        return _fail(f"raised {_headline(error)}\n{_traceback(error)}", result)
    try:
        write_file(cloudpickle.dumps(value), result)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return _fail(
            f"returned a {kind}, which cannot be pickled ({_headline(error)}); "
            "return tensors, numbers or containers of them\n",
            result,
        )
    finally:
        _flush()
    return RETURNED


def _run(rank: int, task_file: int) -> object:
    with mmap.mmap(task_file, 0, prot=mmap.PROT_READ) as view:
        task: Task = pickle.loads(view)
    own = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
    os.environ.clear()
    os.environ.update(task.environ | own | task.extra)
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fn, args = pickle.loads(task.call)
        return fn(*args)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _fail(story: str, result: int) -> bytes:
    write_file(pickle.dumps((time.monotonic(), story)), result)  # a clock that all ranks share: who failed first?
    _flush()
    return RAISED


def write_file(data: bytes, file: int) -> None:
    """Replace the content of a memory file."""
    os.ftruncate(file, 0)
    with open(file, "wb", closefd=False) as stream:
        stream.seek(0)
        stream.write(data)


def _headline(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def _traceback(error: BaseException) -> str:
    """The traceback from the called function on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename.startswith(HERE):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
