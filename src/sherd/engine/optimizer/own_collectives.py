"""Optimizers that communicate by themselves: found out without a byte being sent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""Of a process group. Every function of torch.distributed ends in one of them, under whatever name it was imported."""
_FUNCTIONAL = "torch.distributed._functional_collectives"
"""These go to C++ by another way, but not without asking Python for their group."""
_one_at_a_time = threading.RLock()


class OwnCollective(RuntimeError):
    """Raised in place of the collective."""


@contextmanager
def no_collectives() -> Iterator[list[str]]:
    """Collectives of torch.distributed that this thread calls inside raise, and send nothing. Gives their names."""
    called: list[str] = []
    if not (dist.is_available() and dist.is_initialized()):
        yield called
        return
    with _one_at_a_time, ExitStack() as stack:
        for kind in _with_subclasses(dist.ProcessGroup):
            for name in (name for name in _METHODS if name in vars(kind)):
                stack.enter_context(_refused(kind, name, called))
        if _FUNCTIONAL in sys.modules:
            stack.enter_context(_refused(sys.modules[_FUNCTIONAL], "_resolve_group", called))
        yield called


@contextmanager
def _refused(owner: Any, name: str, called: list[str]) -> Iterator[None]:
    original, thread = vars(owner)[name], threading.get_ident()

    def refuse(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:  # somebody else's, and none of our business
            return original(*arguments, **options)
        caller = sys._getframe(1).f_code
        public = caller.co_filename.endswith(("distributed_c10d.py", "_functional_collectives.py"))
        called.append(caller.co_name if public else name)
        raise OwnCollective(f"{called[-1]} inside step()")

    setattr(owner, name, refuse)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)
