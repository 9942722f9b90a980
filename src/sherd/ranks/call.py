"""What is sent to the ranks for one run: the call, and the environment that torchrun would give it."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import uuid
from collections.abc import Iterator, Mapping

from torch.distributed import TCPStore

from sherd.comm.meeting import network
from sherd.comm.trust.seal import TOKEN, TOKEN_FILE
from sherd.machine import check_loopback
from sherd.ranks.worker import Task

HOST = "127.0.0.1"


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """The port of a store for one run, on loopback. The caller hosts it, so that any rank may die, even rank 0.

    Every run gets a new store, so nothing that an earlier run left behind can be found in it.
    """
    check_loopback()
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield port
    finally:
        del store  # now, and not when the last reference to a traceback goes


def fair_threads(world_size: int) -> int:
    """Threads per rank: with one per core in every rank, they would compete for the cores."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def task(
    call: bytes,
    world_size: int,
    port: int,
    *,
    environ: Mapping[str, str],
    extra: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> bytes:
    """The run as bytes. `call` is a pickled `(fn, args)`; torchrun's variables override `environ`, `extra` both."""
    return pickle.dumps(Task(call, {**environ, **_torchrun_environ(world_size, port)}, dict(extra or {}), threads))


def _torchrun_environ(world_size: int, port: int) -> dict[str, str]:
    """The variables of torchrun that all ranks share. With an agent's store, `env://` makes every rank a client."""
    world, loopback = str(world_size), network.loopback()
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
        # A host's own name may not resolve, or resolve to an interface that others can reach.
        network.IFNAME: os.environ.get(network.IFNAME) or (loopback.name if loopback else "lo"),
        **_token(),
    }


def _token() -> dict[str, str]:
    """The token by which ranks recognise each other: the user's, or a new one for every run."""
    if os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE):
        return {}
    return {TOKEN: secrets.token_hex(32)}
