"""What somebody who reaches torch's own ports can do to them: `python -m tests.measure_stranger`, for docs/security.md.

Two ranks of plain torch.distributed over gloo, and a store in a process of its own, with 256 descriptors each so that
few connections exhaust them. Everything is on loopback, and the stranger is nobody.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import re
import resource
import socket
import struct
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from tests import stranger

HOST = "127.0.0.1"
DESCRIPTORS = 256


def client(port, seconds=3):
    return dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def quiet():
    """What torch says of every wrong message would hide the rest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def small():
    quiet()
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def serve(says):
    small()
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    says.put(port)
    time.sleep(600)
    del store


def rank(number, port, says, stop):
    small()
    try:
        store = client(port, 15)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=5))
        says.put(os.getpid())
        ended = torch.zeros(1)
        while not ended:
            ended, total = torch.tensor([float(stop.is_set())]), torch.ones(10)
            dist.all_reduce(ended)
            dist.all_reduce(total)
            assert total.tolist() == [2.0] * 10, f"wrong sums: {total}"
            time.sleep(0.005)
        says.put("right sums")
    except Exception as error:
        words = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0]  # without the file in which it was raised
        says.put(f"{type(error).__name__} ({words[:60]})")


@contextlib.contextmanager
def process(target, *args):
    started = multiprocessing.Process(target=target, args=args, daemon=True)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


@contextlib.contextmanager
def server():
    says = multiprocessing.Queue()
    with process(serve, says) as started:
        yield started, says.get(timeout=30)


def answers(port, store=None):
    start = time.monotonic()
    try:
        store = store or client(port)
        store.set("mine", "yes")
        return f"answers ({store.get('mine').decode()})"
    except dist.DistError as error:
        return f"{type(error).__name__} after {time.monotonic() - start:.0f} s"


def measure_store(path):
    with server() as (process, port):
        old = client(port)
        stranger.as_nobody(stranger.send_all, (HOST, port), path)
        tell("store", "garbage, huge headers, pickles", answers(port, old))
        old.set("sherd/secret", "x")
        found = stranger.as_nobody(stranger.plant, (HOST, port), "run", path)
        tell("store", "its keys listed and overwritten", f"{found} found, now {old.get('sherd/secret')[:12]!r}...")
        counting = client(port)
        counting.add("count", 1)
        old.set("count", "many")
        with contextlib.suppress(dist.DistError):
            counting.add("count", 1)
        tell("store", "a counter overwritten by words", f"who counts next: {answers(port, counting)}")
        held = stranger.hold([(HOST, port)], 4 * DESCRIPTORS)
        tell("store", f"{len(held)} connections held", f"old client: {answers(port, old)}; new one: {answers(port)}")
        for each in held:
            each.close()
        time.sleep(1)
        tell("store", "and released", f"old client: {answers(port, client(port))}")
        before = psutil.Process(process.pid).memory_info().rss
        with stranger.connected((HOST, port), timeout=5) as connection:
            connection.sendall(stranger.VALIDATE)
            for number in range(20):
                connection.sendall(stranger._set(f"big{number}", bytes(8 << 20)))
            time.sleep(1)
        grown = (psutil.Process(process.pid).memory_info().rss - before) >> 20
        tell("store", "20 values of 8 MB", f"it grows by {grown} MB")


def measure_gloo(path):
    for name, attack in {
        "garbage, huge headers, pickles": lambda port: stranger.send_all(port, path),
        "sequence numbers of other ranks": lambda port: [number(port, n) for n in range(100)],
        f"{2 * DESCRIPTORS} connections held": lambda port: stranger.hold([port], 2 * DESCRIPTORS),
    }.items():
        with server() as (_, port):
            says, stop = multiprocessing.Queue(), multiprocessing.Event()
            with process(rank, 0, port, says, stop) as zero, process(rank, 1, port, says, stop) as one:
                ports = stranger.tcp_ports([says.get(timeout=30) for _ in range(2)])
                held = [attack(each) for each in ports]
                time.sleep(1)
                stop.set()
                tell("gloo", name, outcome(says, zero, one))
                del held


def number(port, sequence):
    connection = stranger.connected(port)
    connection.sendall(struct.pack("<q", sequence) + b"\xff" * 256)
    return connection


def measure_addresses():
    """gloo reads the addresses of its peers from the store. Rank 1 is late, so there is time to change one."""
    for name, change in {
        "random bytes": lambda value: os.urandom(len(value)),
        "nothing": lambda value: b"",
        "its first 10 bytes": lambda value: value[:10],
    }.items():
        with server() as (_, port):
            says, stop, store = multiprocessing.Queue(), multiprocessing.Event(), client(port)
            with process(rank, 0, port, says, stop) as zero:
                while not (keys := store.list_keys()):
                    time.sleep(0.1)
                time.sleep(0.5)
                for key in keys:
                    store.set(key, change(store.get(key)))
                with process(rank, 1, port, says, stop) as one:
                    tell("gloo", f"rank 0's address in the store becomes {name}", outcome(says, zero, one))


def outcome(says, *processes):
    found = []
    for _ in processes:
        with contextlib.suppress(queue.Empty):
            while isinstance(said := says.get(timeout=8), int):
                pass  # it has begun
            found.append(said)
    codes = [each.exitcode for each in processes]
    return "; ".join([*found, *(f"a rank ends by signal {-code}" for code in codes if code and code < 0)])


def tell(what, attack, found):
    print(f"| {what} | {attack} | {found} |", flush=True)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    quiet()
    folder = Path(tempfile.mkdtemp())
    measure_store(folder / "ran")
    measure_gloo(folder / "ran")
    measure_addresses()
    print("what he sent was RUN" if (folder / "ran").exists() else "nothing of it was run")
    folder.rmdir()
