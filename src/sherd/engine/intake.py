"""Gradients as autograd hands them over: taken out of `p.grad` by a hook, refused or made dense."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sherd.engine.trained import Trained
from sherd.errors import SherdError
from sherd.patches.gathered import raw_grad, set_raw_grad

log = logging.getLogger("sherd")


class Intake:
    """Calls `arrive` with the entry and each gradient that autograd makes for a parameter that is trained.

    `arrive` is a method, whose object is not kept alive: torch keeps hooks where the garbage collector sees no cycle.
    """

    def __init__(self, trained: Trained, rank: int, arrive: Callable[[int, Tensor], None]) -> None:
        self._trained = trained
        self._rank = rank
        self._arrive: Any = weakref.WeakMethod(arrive)
        self._sparse: set[int] = set()
        self._hooked = 0
        self.grow()

    def grow(self) -> None:
        """Take the gradients of parameters that are trained since."""
        for entry in range(self._hooked, len(self._trained.parameters)):
            hook = self._hook(entry)
            self._trained.parameters[entry].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._hooked = len(self._trained.parameters)

    def _hook(self, entry: int) -> Callable[[Tensor], None]:
        intake = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            gradient, owner = raw_grad(parameter), intake()
            if gradient is not None and owner is not None:
                set_raw_grad(parameter, None)
                owner._take(entry, gradient)

        return take

    def _take(self, entry: int, gradient: Tensor) -> None:
        arrive = self._arrive()
        if arrive is None:
            return
        if gradient.requires_grad:
            raise SherdError(
                f"rank {self._rank}: backward(create_graph=True) on a distributed model would lose the graph of its "
                f"gradients; take the inner gradient with torch.autograd.grad(..., create_graph=True)"
            )
        if gradient.layout is not torch.strided:
            self._warn_sparse(entry)
            gradient = gradient.to_dense()
        arrive(entry, gradient)

    def _warn_sparse(self, entry: int) -> None:
        if entry not in self._sparse:
            self._sparse.add(entry)
            name = self._trained.names[entry]
            log.warning("the gradient of %r is sparse; it is reduced as a dense one, which takes more memory", name)
