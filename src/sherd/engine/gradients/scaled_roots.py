"""The loss scale of this process, as it enters every backward: at its roots.

A scale on the outputs of a model would miss what is added to the loss, such as a penalty on parameters, and would count
twice where loss and logits are both returned. So the outermost backward starts from the scale instead of from 1.
Gradients that sherd sums are divided when they are (see `Reductions`). Those of all other leaves, such as inputs and
the parameters of a model that is not distributed, are divided before they are added to `.grad`: the leaves are found by
a walk through the graph, which takes half a microsecond per node. A backward that leads to no scaled model is left
alone.

Reentrant checkpointing runs backwards inside a backward, whose roots have the scale already. The leaves that it makes
of a checkpoint's inputs pass their gradients on to the graph outside and keep it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction
from torch.optim import Optimizer

from sherd.config import LossScale
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.loss_scale import DynamicScale
from sherd.errors import ConfigError
from sherd.patches import backward, grad_scaler

LARGEST_IN_FLOAT16 = 2.0**15
"""The largest power of two that a float16 holds."""
_LEAF: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class Follower(Protocol):
    """Divides the gradients of its parameters by the scale."""

    rank: int

    @property
    def over(self) -> bool:
        """Whether it can train no more."""

    @property
    def followed(self) -> Iterable[TrackedParameter]:
        """Those parameters."""


class RootScaling:
    """One loss scale, and the models whose gradients have it."""

    def __init__(self, options: LossScale) -> None:
        self.scale = DynamicScale(options)
        self.entered = 1.0
        """What the roots of the current backward were multiplied by."""
        self._followers: WeakSet[Follower] = WeakSet()

    def follow(self, follower: Follower) -> None:
        """Scale what leads to the parameters of `follower` from now on."""
        self._followers.add(follower)

    def leave(self, follower: Follower) -> None:
        """Undo `follow`."""
        self._followers.discard(follower)

    @property
    def followed(self) -> bool:
        """Whether there is any model to scale for."""
        return any(not follower.over for follower in self._followers)

    @contextmanager
    def __call__(self, roots: Any, given: Any, outermost: bool) -> Iterator[Any]:
        """A backward runs inside: from these roots, and from the gradients that it yields instead of those `given`."""
        followers = [*self._followers]  # held: what the garbage collector takes in the middle divides nothing any more
        if not followers or not (outermost or self.entered != 1.0):
            yield given
            return
        single = isinstance(roots, GradientEdge) or not isinstance(roots, Sequence)  # an edge is a tuple itself
        tensors = (roots,) if single else roots
        strangers = self._strangers(tensors, outermost)
        if strangers is None:
            yield given
            return
        if outermost:
            self.entered = min([self.scale.value, *map(_largest, tensors)])
            given = _times(tensors, given, self.entered)
        handles = [leaf.register_prehook(_divided_by(self.entered)) for leaf in strangers]
        del strangers
        try:
            yield given
        finally:
            for handle in handles:
                handle.remove()
            if outermost:
                self.entered = 1.0

    def _strangers(self, roots: Sequence[Any], outermost: bool) -> list[Any] | None:
        """The leaves whose gradients are to be divided here; None if this backward is not to be scaled."""
        nodes, leaves = _walk(roots)
        ours = self._ours()
        found = [leaf for leaf in leaves if id(leaf.variable) not in ours]
        if not outermost:
            return [leaf for leaf in found if isinstance(leaf.variable, nn.Parameter)]
        reached = len(found) < len(leaves)
        if any(isinstance(root, Tensor) and grad_scaler.is_scaled(root) for root in roots):
            if reached:
                raise self._scaled_twice("this loss was scaled by a GradScaler")
            return None
        return found if reached or any(map(_may_hide, nodes)) else None

    def _ours(self) -> set[int]:
        """The ids of the parameters of all followers."""
        return {id(member.parameter) for follower in self._followers for member in follower.followed}

    def refuse_scaler(self, optimizer: Optimizer) -> None:
        """Raise if a GradScaler is to unscale gradients that have this scale, or had it."""
        ours = self._ours()
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise self._scaled_twice("a GradScaler was given this optimizer")

    def _scaled_twice(self, what: str) -> ConfigError:
        rank = next(iter(self._followers)).rank
        return ConfigError(
            f"rank {rank}: {what}, and sherd.distribute(...) was told to scale losses itself; write loss.backward() "
            f"and optimizer.step() without the GradScaler, or distribute without loss scaling"
        )


_process: RootScaling | None = None


def shared(options: LossScale) -> RootScaling:
    """The loss scale of this process; a new one if no model uses it any more."""
    global _process
    if _process is not None and _process.followed:
        gc.collect()  # models and what trains them refer to each other, and so outlive a run that is over
    if _process is None or not _process.followed:
        _process = RootScaling(options)
        backward.scale_with(_process)
    elif _process.scale.options != options:
        raise ConfigError(
            f"another model of this process has {_process.scale.options}, and this one {options}: a backward may lead "
            f"to both, so they share one scale; pass the same loss_scale= for both, or delete the other one and its "
            f"optimizer first"
        )
    grad_scaler.install()
    grad_scaler.install_refusal(_refuse_scaler)
    return _process


def _refuse_scaler(optimizer: Optimizer) -> None:
    if _process is not None:
        _process.refuse_scaler(optimizer)


def _walk(roots: Iterable[Any]) -> tuple[set[Any], list[Any]]:
    """The nodes of the graph of these roots, and those among them that add to the `.grad` of a leaf."""
    nodes = {_node(root) for root in roots}
    nodes.discard(None)
    leaves = [node for node in nodes if type(node) is _LEAF]
    ahead = list(nodes)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)  # held, as its Python object would be another one the next time
                (leaves if type(node) is _LEAF else ahead).append(node)
    return nodes, leaves


def _may_hide(node: Any) -> bool:
    """Whether there may be parameters behind this node that a walk does not see: as behind a reentrant checkpoint.

    That is a function in Python which runs a backward of its own. Hooks of modules are such functions too, and do not.
    """
    return isinstance(node, BackwardCFunction) and getattr(node, "_forward_cls", None) is not BackwardHookFunction


def _node(root: Any) -> Any:
    if isinstance(root, GradientEdge):
        return root.node
    if not isinstance(root, Tensor) or not root.requires_grad:
        return None  # torch says what it thinks of that
    return root.grad_fn or get_gradient_edge(root).node


def _largest(root: Any) -> float:
    """The largest scale that a gradient of `root` holds."""
    dtype = root.node._input_metadata[root.output_nr].dtype if isinstance(root, GradientEdge) else root.dtype
    return LARGEST_IN_FLOAT16 if dtype is torch.float16 else float("inf")


def _times(roots: Sequence[Any], given: Any, scale: float) -> Any:
    """The gradients of these roots that were `given`, or 1 where none was, times `scale`."""
    gradients = [given] * len(roots) if given is None else [given] if isinstance(given, Tensor) else list(given)
    if len(gradients) != len(roots):
        return given  # torch refuses it
    return [_first(root, gradient, scale) for root, gradient in zip(roots, gradients, strict=True)]


def _first(root: Any, gradient: Any, scale: float) -> Any:
    if gradient is not None:
        return gradient * scale
    if isinstance(root, GradientEdge):
        kind = root.node._input_metadata[root.output_nr]
        one = torch.ones(tuple(kind.shape), dtype=kind.dtype, device=kind.device)
    elif root.requires_grad:
        one = torch.ones_like(root, memory_format=torch.preserve_format)
    else:
        return None
    # Of a root with more elements, or complex, torch says that it needs a gradient.
    return one * scale if one.numel() == 1 and one.dtype.is_floating_point else None


def _divided_by(scale: float) -> Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]]:
    factor = 1.0 / scale

    def divide(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient * factor for gradient in gradients)

    return divide
