"""Which processes of this host still run: a handle (pidfd) per peer, which becomes readable when the process ends."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from pathlib import Path

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE = 60  # offset of exit_code in struct pidfd_info


class Peers:
    """The processes of some ranks."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._fds: dict[int, int] = {}
        self._rank_of: dict[int, int] = {}
        self._poll = select.poll()

    def add(self, rank: int, pid: int, pidfd: int) -> None:
        """Watch a process; takes over its pidfd."""
        self._pids[rank] = pid
        self._fds[rank] = pidfd
        self._rank_of[pidfd] = rank
        self._poll.register(pidfd, select.POLLIN)

    def __contains__(self, rank: int) -> bool:
        return rank in self._pids

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        return sorted(self._rank_of[fd] for fd, _ in self._poll.poll(0) if fd in self._rank_of)

    def how_it_ended(self, rank: int) -> str:
        """ "was killed by SIGKILL", "exited with code 3" or "ended", as far as it can still be found out."""
        status = _status_from_pidfd(self._fds[rank]) if rank in self._fds else None
        if status is None:
            status = _status_from_proc(self._pids[rank])
        return "ended" if status is None else describe_exit(os.waitstatus_to_exitcode(status))

    def renumbered(self, numbers: dict[int, int]) -> Peers:
        """Some of these processes under other numbers, with handles of their own."""
        some = Peers()
        for rank in numbers.keys() & self._fds.keys():
            some.add(numbers[rank], self._pids[rank], os.dup(self._fds[rank]))
        return some

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._rank_of.clear()
        self._poll = select.poll()


def describe_exit(code: int) -> str:
    """An exit code in words; as in multiprocessing, negative numbers are signals."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def _status_from_pidfd(fd: int) -> int | None:
    """The wait status of a process that its parent has already reaped (Linux 6.15 and later)."""
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    status: int = struct.unpack_from("<i", info, _EXIT_CODE)[0]
    return status


def _status_from_proc(pid: int) -> int | None:
    """The wait status of a process that has ended and is not reaped yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] in "ZX" else None
