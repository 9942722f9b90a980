"""What is sent to the ranks for one run: the function, and the surroundings that torchrun would give it."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from sherd.errors import ConfigError
from sherd.testing._worker import Task

HOST = "127.0.0.1"


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """The port of a store for one run, on the loopback. The caller hosts it, so that any rank may die, rank 0 too.

    A new one for every run is what keeps runs apart: nothing that an earlier run left behind can be found in it.
    """
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield port
    finally:
        del store  # now, and not when the last one forgets the traceback


def task(
    fn: Callable[..., object], args: tuple[Any, ...], world_size: int, port: int, env: Mapping[str, str] | None
) -> bytes:
    """The run in bytes, by value: plain pickle leaves no shared-memory handles of torch.multiprocessing behind."""
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    work = Task(
        call=_pickled_call(fn, args),
        environ={**os.environ, **_torchrun_environ(world_size, port), "OMP_NUM_THREADS": str(threads)},
        extra=_checked_env(env),
        sys_path=list(sys.path),
        cwd=str(Path.cwd()),
        threads=threads,
    )
    return pickle.dumps(work)


def _torchrun_environ(world_size: int, port: int) -> dict[str, str]:
    """The variables of torchrun that all ranks share. With an agent's store, `env://` makes every rank a client."""
    world = str(world_size)
    return {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # a host's own name may not resolve
    }


def _pickled_call(fn: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not callable(inner):
        raise ConfigError(f"the first argument must be a function for every rank to call, not {inner!r}")
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if "<lambda>" in name or "<locals>" in name:
        raise ConfigError(
            f"{name} cannot be sent to the ranks: they import the function by its name, and a lambda or a function "
            "inside a function has none. Write it as a `def` at the top level of a module, and pass what it closed "
            "over as arguments: run_ranks(fn, world_size, a, b) or functools.partial(fn, a, b)"
        )
    try:
        return pickle.dumps((fn, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kinds = ", ".join(type(arg).__name__ for arg in args) or "none"
        raise ConfigError(
            f"{name} and its arguments (types: {kinds}) cannot be sent to the ranks: {type(error).__name__}: {error}. "
            "Use a function at the top level of a module and arguments that pickle"
        ) from error


def _checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    extra = dict(env or {})
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"env must map strings to strings, got {name!r}: {value!r}; write {str(name)!r}: {str(value)!r}"
            )
    return extra
