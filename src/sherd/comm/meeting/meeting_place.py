"""The store in which ranks meet, from the variables that torchrun and `sherd run` set.

Torch's own listens on every interface whatever the address, and has the server wait for the others without naming who
is missing. This one listens at the address it is given, and does not wait.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from sherd.comm.meeting import network
from sherd.comm.waiting.patience import Stopwatch
from sherd.comm.waiting.side_thread import SideThread
from sherd.errors import CommError, ConfigError
from sherd.machine import check_files

WARN_AFTER, LOOK_EVERY = 30.0, 0.1  # seconds
log = logging.getLogger("sherd")
_times = itertools.count()
_served: dict[tuple[str, int], TCPStore] = {}  # by this process, for as long as it lives: others may arrive late


def from_environment(timeout: float) -> tuple[Store, int, int]:
    """The store to meet in, and which rank of how many this is: what MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
    say."""
    rank, world, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    check_files(world)
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise ConfigError("WORLD_SIZE is set, but MASTER_ADDR is not; `sherd run` and torchrun set both")
    limit = timedelta(seconds=timeout)
    try:
        # A launcher may serve the store: then every rank is a client of it.
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            store = _serve(address, port, limit)
        else:
            store = _reach(address, port, rank, timeout)
    except (DistError, ValueError) as error:
        raise CommError(
            f"rank {rank} could not join the others at MASTER_ADDR:MASTER_PORT = {address}:{port} within {timeout:g} "
            f"s: {error}. They may have given up already; look at their output first. "
            "`sherd run` and torchrun set these variables."
        ) from error
    # A new prefix for every time that ranks meet, and every time that a launcher restarts them: nothing from before is
    # found there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"sherd/meeting/{attempt}/{next(_times)}", store), rank, world


def _reach(address: str, port: int, rank: int, timeout: float) -> TCPStore:
    """The store that rank 0 or a launcher serves. On a thread: torch would wait silently, and ignore an interrupt."""
    make = partial(TCPStore, address, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    thread, watch, warn_at = SideThread(make, "sherd-meeting"), Stopwatch(), WARN_AFTER
    while not thread.attempt(LOOK_EVERY):
        waited = watch.seconds()
        if waited > timeout + LOOK_EVERY:
            raise DistError("there is no answer")
        if waited > warn_at:
            server = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
            log.warning("Rank %d has waited %.0f s for the store of %s at %s:%d", rank, waited, server, address, port)
            warn_at = 2 * waited
    return thread.result()


def _serve(address: str, port: int, limit: timedelta) -> TCPStore:
    if (address, port) not in _served:
        make = partial(TCPStore, address, port, is_master=True, timeout=limit, wait_for_workers=False)
        try:
            listener = network.listen(network.place_to_listen(address, others=several_hosts()), port)
            _served[address, port] = make(master_listen_fd=listener.detach(), multi_tenant=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CommError(f"rank 0 cannot listen at port {port} for {address}: {error}") from error
            _served[address, port] = make(multi_tenant=True)  # perhaps torch serves one in this process already
    return _served[address, port]


def several_hosts() -> bool:
    """Whether ranks may be on other hosts: a launcher says how many are on this one, and an address may be explicitly
    loopback."""
    alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
    return not alone and not network.means_loopback(os.environ.get("MASTER_ADDR", ""))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number; `sherd run` and torchrun set it")
    return int(text)
