"""The methods of torch's process groups, while an optimizer is tried: one that communicates on its own is found without
sending a byte."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from sherd.patches.replacing import Replacements, with_subclasses

_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""Methods of a process group. Every function of torch.distributed calls one of them, however it was imported."""
_FUNCTIONAL = "torch.distributed._functional_collectives"
"""These reach C++ by another path, but ask Python for their group first."""
_one_at_a_time = threading.RLock()
_replacements = Replacements()
RELIES_ON: dict[str, str | None] = {
    **{f"torch.distributed:ProcessGroup.{name}": None for name in ("allreduce", "broadcast", "barrier", "allgather")},
    **{f"torch.distributed:ProcessGroup.{name}": None for name in ("reduce_scatter", "alltoall", "send", "recv")},
    f"{_FUNCTIONAL}:_resolve_group": "group tag ...",
}


class OwnCollective(RuntimeError):
    """Raised in place of the collective."""


def install(called: list[str]) -> None:
    """Have collectives of torch.distributed that this thread calls raise without sending anything; `called` gets their
    names."""
    make = functools.partial(_refusing, called, threading.get_ident())
    for kind in with_subclasses(dist.ProcessGroup):
        for name in (name for name in _METHODS if name in vars(kind)):
            _replacements.replace(kind, name, functools.partial(make, name))
    if _FUNCTIONAL in sys.modules:
        _replacements.replace(sys.modules[_FUNCTIONAL], "_resolve_group", functools.partial(make, "_resolve_group"))


uninstall = _replacements.restore


@contextmanager
def no_collectives() -> Iterator[list[str]]:
    """Collectives of torch.distributed that this thread calls inside raise without sending. Yields their names."""
    called: list[str] = []
    if not (dist.is_available() and dist.is_initialized()):
        yield called
        return
    with _one_at_a_time:
        install(called)
        try:
            yield called
        finally:
            uninstall()


def _refusing(called: list[str], thread: int, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:  # not the optimizer's
            return original(*arguments, **options)
        caller = sys._getframe(1).f_code
        public = caller.co_filename.endswith(("distributed_c10d.py", "_functional_collectives.py"))
        called.append(caller.co_name if public else name)
        raise OwnCollective(f"{called[-1]} inside step()")

    return refuse
