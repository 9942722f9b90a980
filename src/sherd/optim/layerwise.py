"""Optimizers that scale the update of a layer by norms of the whole layer. A layer is one parameter.

A step passes over the elements twice, in pieces that stay in the cache:

    1. state moves on by the gradient, and the norms of the blocks of parameter and direction are taken;
       then blocks are added up to the norms of layers
    2. the direction is computed again from the state, and applied with its layer's ratio

All layers are measured before any is changed, and no more directions are kept than one piece has elements: a step needs
no memory for updates. Reading the state again takes as long as writing and reading them would.

A step may have parts of layers only. `Layers` then says what they are parts of, and adds up the blocks of all ranks.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.errors import ConfigError
from sherd.layout.entry import memory_order
from sherd.layout.norms import added, block_norms
from sherd.layout.placement import BLOCK

PIECE = 1024 * BLOCK
"""Elements of a piece: parameter, gradient, two moments and the direction are 5 MB in fp32. A cut between blocks
changes no bit."""

Norms = dict[Tensor, tuple[float, float]]
"""By tensor, the norms of the parameter that it is or is a part of, and of that one's direction."""


class Layers:
    """What the tensors of a step are. Here each is a whole layer."""

    def dimensions(self, tensor: Tensor) -> int:
        """How many dimensions its layer has."""
        return tensor.dim()

    def norms(self, blocks: Mapping[Tensor, Tensor]) -> Norms:
        """The norms of layers; `blocks` has those of the blocks of a tensor in two rows, of its values and of its
        direction."""
        return totals(blocks)


def totals(blocks: Mapping[Any, Tensor]) -> dict[Any, tuple[float, float]]:
    """By the same keys, the norms of what consists of these blocks."""
    if not blocks:
        return {}
    found = torch.stack([added(each) for each in blocks.values()])
    return {key: (value, direction) for key, (value, direction) in zip(blocks, found.tolist(), strict=True)}


@dataclass
class Piece:
    """Consecutive elements of one tensor in a step, flat, in the dtype in which they are computed."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    group: Mapping[str, Any]
    step: float
    """how many steps the tensor has taken, this one included; 0 if that is not counted"""


class Layerwise(Optimizer):
    """The base class: a subclass says what it keeps for every element, and how elements move.

    Its four methods must be elementwise. Parameters of 16 bits are computed in fp32 and rounded when they are stored.
    """

    keys: tuple[str, ...] = ()
    """What is kept for every element."""
    counts = False
    """Whether the steps of each parameter are counted, in `step`."""

    @abstractmethod
    def _check(self, group: Mapping[str, Any]) -> None:
        """Refuse options that make no sense."""

    def _move_on(self, piece: Piece) -> None:
        """Change the state of a piece by its gradient, before anything is measured."""

    @abstractmethod
    def _direction(self, piece: Piece) -> Tensor:
        """What is measured besides the parameter."""

    @abstractmethod
    def _ratio(self, group: Mapping[str, Any], value: float, direction: float) -> float:
        """By what a layer with these two norms, which are not zero, is scaled."""

    @abstractmethod
    def _apply(self, piece: Piece, direction: Tensor, ratio: float) -> None:
        """Change the values of a piece, and the state that depends on the ratio. `direction` may be overwritten."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters."""
        group = {**self.defaults, **param_group}
        if group["lr"] < 0:
            raise ConfigError(f"{self._name}: lr={group['lr']}; write a rate of at least 0")
        if group["weight_decay"] < 0:
            raise ConfigError(f"{self._name}: weight_decay={group['weight_decay']}; write one of at least 0")
        if group["eps"] < 0:
            raise ConfigError(f"{self._name}: eps={group['eps']}; write a number of at least 0")
        if group["adapt"] not in (None, True, False):
            raise ConfigError(
                f"{self._name}: adapt={group['adapt']!r}; write True, False, or None for parameters of two or more "
                "dimensions only"
            )
        self._check(group)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; `closure` evaluates the loss before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.advance(Layers())
        return loss

    @torch.no_grad()
    def advance(self, layers: Layers) -> None:
        """The update itself, of tensors that are what `layers` says."""
        adapted: list[tuple[_Stepped, Tensor | None]] = []
        blocks: dict[Tensor, Tensor] = {}
        room = PIECE
        for each in self._stepped():
            adapts = each.group["adapt"]
            if adapts is None:
                adapts = layers.dimensions(each.tensor) > 1
            measured, direction = [], None
            for piece in each.pieces():
                self._move_on(piece)
                each.store(piece)
                direction = self._direction(piece)
                if adapts:
                    measured.append(torch.stack([block_norms(piece.value), block_norms(direction)]))
                else:
                    self._apply(piece, direction, 1.0)
                    each.store(piece)
            if adapts:
                room -= each.tensor.numel()
                adapted.append((each, direction if room >= 0 else None))
                blocks[each.tensor] = _side_by_side(measured)
            else:
                each.settle()
        norms = layers.norms(blocks)
        for each, kept in adapted:
            value, of_direction = norms[each.tensor]
            ratio = self._ratio(each.group, value, of_direction) if value and of_direction else 1.0
            for piece in each.pieces():
                self._apply(piece, self._direction(piece) if kept is None else kept, ratio)
                each.store(piece)
            each.settle()

    def _stepped(self) -> Iterator[_Stepped]:
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                if tensor.grad.layout is not torch.strided or tensor.is_complex():
                    kind = "is complex" if tensor.is_complex() else "has a sparse gradient"
                    raise ConfigError(
                        f"{self._name}: a parameter of shape {tuple(tensor.shape)} {kind}; it steps real parameters "
                        f"with dense gradients, so give this one to another optimizer"
                    )
                keys = self._kept(group)
                state = self.state[tensor] if keys or self.counts else {}
                if self.counts:
                    if "step" not in state:
                        state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    state["step"] += 1
                for key in keys:
                    if key not in state:
                        state[key] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
                yield _Stepped(tensor, group, state, keys)

    def _kept(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """What is kept for every element of a group's parameters."""
        return self.keys

    @property
    def _name(self) -> str:
        return type(self).__name__


class _Stepped:
    """One tensor in a step, with its gradient and state, all flat and in the order of its memory."""

    def __init__(
        self, tensor: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], keys: tuple[str, ...]
    ) -> None:
        self.tensor, self.group = tensor, group
        self._step = float(state.get("step", 0.0))
        self._order = None if tensor.is_contiguous() else memory_order(tensor)
        self._homes = [tensor.detach(), *(state[key] for key in keys)]
        self._keys = keys
        self._flat = [*map(self._flattened, self._homes)]
        self._grad = self._flattened(tensor.grad.detach())  # type: ignore[union-attr]
        if self._grad.dtype != tensor.dtype:
            self._grad = self._grad.to(tensor.dtype)
        self._dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype

    def pieces(self) -> Iterator[Piece]:
        """All elements, in order. A piece that is of another dtype than the tensor must be stored."""
        numel, every = self._grad.numel(), [*self._flat, self._grad]
        for start in range(0, numel, PIECE):
            cut = every if numel <= PIECE else [flat[start : start + PIECE] for flat in every]
            wide = [each.to(self._dtype) for each in cut] if self._dtype is not self.tensor.dtype else cut
            self._now = cut[:-1]
            value, *state, grad = wide
            grad = grad.neg() if self.group["maximize"] else grad
            yield Piece(value, grad, dict(zip(self._keys, state, strict=True)), self.group, self._step)

    def store(self, piece: Piece) -> None:
        """Round what was computed in fp32, and go on with what is stored."""
        if self._dtype is not self.tensor.dtype:
            for home, wide in zip(self._now, (piece.value, *piece.state.values()), strict=True):
                wide.copy_(home.copy_(wide))

    def settle(self) -> None:
        """All pieces are stored: bring them back where memory had to be rearranged."""
        for home, flat in zip(self._homes, self._flat, strict=True):
            if home.data_ptr() != flat.data_ptr():
                arranged = home if self._order is None else home.permute(self._order)
                arranged.copy_(flat.view(arranged.shape))

    def _flattened(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1 and tensor.is_contiguous():
            return tensor
        return (tensor if self._order is None else tensor.permute(self._order)).reshape(-1)


def _side_by_side(blocks: list[Tensor]) -> Tensor:
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks, 1) if blocks else torch.zeros(2, 0, dtype=torch.float64)


def is_layerwise(optimizer: Optimizer) -> bool:
    """Whether `advance` is the whole step of this optimizer. A class that overrides `step` may do anything there."""
    if not isinstance(optimizer, Layerwise):
        return False
    step: Any = optimizer.__class__.step  # a distributed one says here which class it was
    return inspect.unwrap(step) is inspect.unwrap(Layerwise.step)
