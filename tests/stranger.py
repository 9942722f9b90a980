"""A stranger: somebody without rights who reaches the ports of a job, and what he sends there.

`python -m tests.stranger` measures what he can do to the two things of torch's that listen: a store and gloo.
"""

from __future__ import annotations

import base64
import contextlib
import encodings.idna  # noqa: F401 - of sockets, who would look for it when they are nobody's, and may not read it
import ipaddress
import itertools
import json
import os
import pickle
import random
import socket
import struct
import traceback
from pathlib import Path

import psutil

from sherd.testing import _namespaces

NOBODY = 65534
ACCEPTS = 0x10000  # __SO_ACCEPTCON in the flags of /proc/net/unix
LISTENS = "0A"  # the state in /proc/net/tcp
VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # how a client of a TCPStore begins
SET, LIST = b"\1", b"\x11"
LIE = json.dumps(
    {"kind": "lost", "rank": 0, "ranks": [1], "text": "planted", "how": "planted", "machine": "x", "pid": 1}
).encode()


class Touch:
    """Leaves a directory at `path` where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


# ---------------------------------------------------------------- what there is to attack


def family(pid):
    """A process and all that it started, and they in turn."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def tcp_ports(pids):
    """Where they listen, in whichever namespace: (address, port)."""
    found = set()
    for pid in pids:
        for name in ("tcp", "tcp6"):
            for _, local, _, state, *rest in _sockets(pid, name):
                if state == LISTENS and rest[5] in _inodes(pid):
                    address, port = local.split(":")
                    found.add((_address(bytes.fromhex(address)), int(port, 16)))
    return sorted(found)


def abstract_sockets(pids):
    """The names in the kernel, which no file shows, at which they listen."""
    found = set()
    for pid in pids:
        for _, _, _, flags, _, _, inode, *name in _sockets(pid, "unix"):
            if name and name[0][0] == "@" and int(flags, 16) & ACCEPTS and inode in _inodes(pid):
                found.add(name[0][1:])
    return sorted(found)


def _sockets(pid, kind):
    """The table of a process's namespace; psutil reads that of the caller."""
    with contextlib.suppress(OSError):
        return [line.split() for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    return []


def _inodes(pid):
    """Of all sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _address(words):
    """As people write it. The kernel shows words of 4 bytes, in the machine's order."""
    raw = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    address = ipaddress.ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address)


# ---------------------------------------------------------------- being nobody


def as_nobody(job, *args, namespace=None):
    """What `job` returns in a process without rights, in another namespace if one is given. JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if namespace:
                _namespaces.enter(namespace)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = [job(*args), ""]
        except BaseException:
            answer = [None, traceback.format_exc()]
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        data = answer.read()
    os.waitpid(pid, 0)
    result, error = json.loads(data)
    assert not error, f"the stranger's {job.__name__} failed: {error}"
    return result


# ---------------------------------------------------------------- attacks


def reach(addresses):
    """Those of the addresses that answer."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError):
            socket.create_connection(tuple(address), timeout=1).close()
            found.append(address)
    return found


def bodies(path, seed=0):
    """What is sent to each port, by name."""
    noise = random.Random(seed)
    touch = pickle.dumps(Touch(path))
    header = struct.pack("<Q", len(touch))
    return {
        "garbage": [noise.randbytes(size) for size in (1, 7, 64, 4096, 100_000)],
        "huge headers": [
            *(bytes([byte]) * 64 for byte in (0, 127, 128, 255)),
            *(VALIDATE + SET + struct.pack("<Q", size) + b"x" for size in (1 << 20, 1 << 40, (1 << 64) - 1)),
            *(VALIDATE + bytes([query]) + b"\xff" * 64 for query in range(20)),
            json.dumps({"label": "x" * 1000, "rank": 1 << 70}).encode(),
            b"[" * 50_000,
        ],
        "pickles": [touch, header + touch, b"1" + touch, b"2" + bytes(32) + touch, base64.b64encode(touch)],
    }


def send_all(address, path, seed=0):
    """Each of the bodies over a connection of its own."""
    for body in itertools.chain.from_iterable(bodies(path, seed).values()):
        with contextlib.suppress(OSError):
            try:
                connection = connected(address, timeout=0.02)
            except TimeoutError:
                return  # its queue is full: the kernel takes nothing more for it
            with connection:
                connection.sendall(body)
                connection.recv(64)


def connected(address, timeout=0.05):
    """To a (host, port), or to the name of an abstract socket."""
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout)
        connection.connect("\0" + address)
        return connection
    connection = socket.create_connection(tuple(address), timeout=1)
    connection.settimeout(timeout)
    return connection


def hold(addresses, count):
    """Slow clients: connections that say one byte and never end. They last as long as what this returns."""
    held = []
    for address in addresses:
        with contextlib.suppress(OSError):  # there is no more room
            for _ in range(count):
                held.append(connected(address))
                held[-1].sendall(b"\1")
    return held


def plant(address, run_id, path, seed=0, lies_only=False):
    """Write into the store at `address`, if there is one: over all that sherd keeps there, as anybody can list it, and
    where torch's launchers and sherd look for something; or only lies about faults. How many keys he found."""
    with contextlib.suppress(OSError), connected(address, timeout=0.5) as connection:
        connection.sendall(VALIDATE + LIST)
        found = _keys(connection)
        own = [key for key in found if "sherd" in key and "gloo" not in key]
        folders = {"/".join(parts[:end]) for parts in (key.split("/") for key in own) for end in range(1, len(parts))}
        faults = [f"{folder}/fault" for folder in folders]
        keys = faults if lies_only else [*own, *planted_keys(run_id), *faults]
        for value in [LIE] if lies_only else planted_values(path, seed):
            connection.sendall(b"".join(_set(key, value) for key in keys))
        connection.sendall(b"".join(_set(key, LIE) for key in faults) + LIST)
        assert set(keys) <= set(_keys(connection))
        return len(found)
    return 0


def _set(key, value):
    return SET + _text(f"/{key}".encode()) + _text(value)


def _text(data):
    return struct.pack("<Q", len(data)) + data


def _keys(connection):
    """The answer of a store that was asked for its keys."""
    count = struct.unpack("<Q", _exactly(connection, 8))[0]
    sizes_and_keys = (_exactly(connection, struct.unpack("<Q", _exactly(connection, 8))[0]) for _ in range(count))
    return [key.decode().removeprefix("/") for key in sizes_and_keys]


def _exactly(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("it has hung up")
        data += more
    return data


def planted_values(path, seed=0):
    """What he writes into a store: what others would unpickle, believe or stumble over."""
    touch = pickle.dumps(Touch(path))
    seal = random.Random(seed).randbytes(32)
    return [b"", b"[" * 5000, LIE, seal + LIE, touch, base64.b64encode(touch)]  # the last one stays


def planted_keys(run_id):
    """Where torch's launchers and sherd have looked for something, now or once."""
    sherd = ["fault", "card", "activity", "door", "hello", "come", "group", "leader", "reads", "launch"]
    own = [f"sherd/{number}/{key}" for number in (0, 1, "hello", "launch") for key in sherd]
    own += [f"{key}/{rank}" for key in own for rank in (0, 1)]
    own += ["sherd/launch/plan", "sherd/launch/off", "sherd/launch/fault", "sherd/launch/done/0"]
    elastic = [f"torch.rendezvous.{run_id}", f"torch.rendezvous.{run_id}/0/0", "torchelastic/agent/workers_exit/0"]
    elastic += [f"torchelastic/{kind}/{rank}" for kind in ("role_info", "assigned_ranks") for rank in (0, 1)]
    return ["fault", "MASTER_ADDR", "MASTER_PORT", *own, *elastic]
