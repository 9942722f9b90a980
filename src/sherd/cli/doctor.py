"""`sherd doctor`: what this machine offers to ranks."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sherd.errors import Unsupported
from sherd.machine import check_loopback, files_needed, most_files, native_half

Facts = dict[str, Any]

GIB = 1 << 30


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print what this machine offers: torch, backends, memory, and the transport that ranks would use."""
    facts = {**_machine(), **_torch(), **_shared_memory(), **_network(), **_transport()}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_table(facts)


def _machine() -> Facts:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "open_files": most_files(),
    }


def _torch() -> Facts:
    import torch
    import torch.distributed as dist

    present = dist.is_available()
    return {
        "torch": str(torch.__version__),
        "gloo": present and dist.is_gloo_available(),
        "nccl": present and dist.is_nccl_available(),
        "mpi": present and dist.is_mpi_available(),
        "accelerators": torch.accelerator.device_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bf16": native_half(torch.bfloat16),
        "native_fp16": native_half(torch.float16),
    }


def _shared_memory() -> Facts:
    from sherd.comm.host import futex

    shm = Path("/dev/shm")
    return {
        "memfd": _works(lambda: os.close(os.memfd_create("sherd-doctor"))),
        "futex": futex.available(),
        "pidfd": _works(lambda: os.close(os.pidfd_open(os.getpid()))),
        "abstract_socket": _works(_bind_abstract_socket),
        "dev_shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
    }


def _network() -> Facts:
    try:
        check_loopback()
    except Unsupported as error:
        return {"loopback": False, "loopback_problem": str(error)}
    return {"loopback": True, "loopback_problem": None}


def _transport() -> Facts:
    from sherd.comm.host.joining.rendezvous import unsupported_reason

    reason = unsupported_reason()
    return {"transport": "host" if reason is None else "c10d", "host_unsupported": reason}


def _works(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except (OSError, AttributeError):  # the kernel does not allow it, or this Python does not have it
        return False
    return True


def _bind_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0sherd-doctor-{os.getpid()}")


def _print_table(facts: Facts) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="What this machine offers to sherd", title_justify="left")
    table.add_column("what")
    table.add_column("found", overflow="fold")
    for name, value in facts.items():
        if name not in ("host_unsupported", "loopback_problem"):
            label = name.removesuffix("_bytes").replace("_", " ").replace("dev shm", "/dev/shm")
            table.add_row(label, escape(_shown(name, value, facts)))
    Console().print(table)


def _shown(name: str, value: Any, facts: Facts) -> str:
    if name == "transport":
        reason = facts["host_unsupported"]
        if reason is None:
            return "host between ranks of this machine (shared memory), cluster or c10d across machines"
        return f"c10d (torch.distributed); not host: {reason}"
    if name == "loopback" and not value:
        return str(facts["loopback_problem"])
    if name == "open_files" and value < files_needed(facts["cores"]):
        return f"{value} (too few for a rank per core: write `ulimit -n 1024`)"
    if name in ("native_bf16", "native_fp16") and not value:
        return "no: emulated on this CPU, with products 3 to 150 times slower than in fp32"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "dev_shm_bytes":
        size = "absent" if value is None else f"{value / GIB:.2f} GiB"
        return f"{size} (irrelevant: sherd does not use it)"
    return f"{value / GIB:.1f} GiB" if name.endswith("_bytes") else str(value)
