"""What has to be in order on this machine before ranks are started, checked before they are.

Without it they fail in places that say nothing of the cause, or wait for minutes.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sherd.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    import torch

# Measured with torch 2.13: 4 files for an interpreter, about 12 for a communicator and 3 for every peer; imports and
# the store of the launcher come on top. Twice that, as scripts have files too.
BASE_FILES, FILES_PER_RANK = 48, 4
MOST_FILES = 65536  # an unlimited number makes programs slow that go through all of them
LOOPBACK = "127.0.0.1"

_HALF = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""By dtype: the instructions that multiply it, as torch.cpu.get_capabilities() calls those of Intel, AMD and ARM."""
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_BF16, _FP16 = ("avx512_bf16",), ("avx512_bf16", "avx512_fp16")
_UP_TO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"), ()),
    "AVX512_CORE_BF16": _BF16,
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), _FP16),
    **dict.fromkeys(("AVX512_CORE_AMX", "AVX10_1_512_AMX"), (*_FP16, "amx_bf16")),
}
"""By value of these variables: what is left of the above. Any other leaves everything."""


def files_needed(world_size: int) -> int:
    """About how many files a rank, or its launcher, has open at a time."""
    return BASE_FILES + FILES_PER_RANK * world_size


def most_files() -> int:
    """How many a process may have open, if it raises its limit as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST_FILES if hard == resource.RLIM_INFINITY else hard


def check_files(world_size: int) -> None:
    """Raise the limit of open files if it is too low for this many ranks and may be raised; what is started later
    inherits it."""
    needed = files_needed(world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if most_files() < needed:
        raise Unsupported(
            f"a process may open {soft} files on this machine, and {world_size} ranks need about {needed} in each; "
            f"write `ulimit -n {max(1024, needed)}` before, or have the administrator raise the limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(min(most_files(), MOST_FILES), needed), hard))


def check_loopback() -> None:
    """Ranks of a machine meet over loopback, which a container may have left down."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3.0).close()
    except OSError as error:
        raise unreachable(LOOPBACK, error) from error


def unreachable(address: str, error: OSError) -> Unsupported:
    """The error of a machine that does not get through to a socket of its own."""
    return Unsupported(
        f"this machine does not reach itself at {address} ({error.strerror or 'no answer'}), which ranks need: is the "
        "loopback interface down? See `ip address`; `ip link set lo up` brings it up"
    )


def native_half(
    dtype: torch.dtype, cpu: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> bool:
    """Whether this CPU has instructions for products of matrices of this 16-bit dtype, and torch uses them.

    Otherwise they are emulated. With AVX2 alone a product takes 8 times as long as in fp32 at 64 x 64 elements, and 50
    to 150 times at 512 x 512; with AVX-512 but without its BF16, bf16 takes about 3 times as long. `cpu` and
    `environment` are what torch.cpu.get_capabilities() and os.environ say.
    """
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in _HALF:
        raise ConfigError(f"native_half({dtype}): write torch.bfloat16 or torch.float16")
    cpu = torch.cpu.get_capabilities() if cpu is None else cpu
    environment = os.environ if environment is None else environment
    found = {each for each in _HALF[name] if cpu.get(each)}
    if cpu.get("architecture") != "x86_64":
        return bool(found)
    # There products are oneDNN's. ATEN_CPU_CAPABILITY is for other kernels: with "avx2" or "default", a bf16 product
    # takes as long as without it on a CPU that has AVX512_BF16.
    limit = next((environment[each] for each in _ISA_VARIABLES if environment.get(each)), "")
    present: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return present and bool(found.intersection(_UP_TO.get(limit.upper(), found)))


def half_kernels() -> str:
    """In words: which 16-bit dtypes the CPU multiplies by itself, and which are emulated."""
    import torch

    native = {name: native_half(dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))}
    if all(native.values()):
        return "native kernels for bf16 and fp16"
    slow = "emulated, with products 3 to 150 times slower than in fp32"
    if not any(native.values()):
        return f"no native kernels for bf16 and fp16: they are {slow}"
    own, other = sorted(native, key=lambda name: not native[name])
    return f"native kernels for {own}; {other} is {slow}"
