"""`p.grad` where a rank keeps only a part of the gradient: a tensor without elements that is gathered on use.

`p.grad is None`, `zero_grad()` and everything else that reads no elements costs nothing. Every other torch call gets
the whole gradient, which all ranks gather together. Multiplying by a number changes only what this rank keeps, without
communication. So does what `torch.amp.GradScaler` does to gradients, but for one number that ranks exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import SherdError

_T = torch.Tensor
_METADATA: frozenset[Any] = frozenset(
    getattr(_T, name)
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "itemsize"),
        *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized"),
        *("is_mkldnn", "is_nested", "nbytes", "_version", "output_nr", "name", "retains_grad", "grad", "_base"),
    )
)
_ASKING: frozenset[Any] = frozenset(
    {
        *(_T.size, _T.stride, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.get_device, _T.__len__),
        *(_T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.requires_grad_, _T.is_same_size),
        *(_T._is_view, _T.is_neg, _T.is_conj, torch.is_neg, torch.is_conj, _T.storage_offset, _T._is_zerotensor),
        *(torch.numel, torch.is_complex, torch.is_floating_point, torch.is_same_size, _T.is_inference),
    }
)
"""Calls that read no elements."""
_SCALING: dict[Any, str] = {
    **dict.fromkeys((_T.mul_, _T.__imul__, _T.multiply_), "mul"),
    **dict.fromkeys((_T.div_, _T.__itruediv__, _T.divide_, _T.true_divide_), "div"),
    _T.zero_: "zero",
}
"""Calls that can be applied to a part alone, if the other operand is a number."""
_SCALING_EACH: dict[Any, str] = {torch._foreach_mul_: "mul", torch._foreach_div_: "div", torch._foreach_zero_: "zero"}
"""The same for all tensors of a list."""

_READING = frozenset({torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, _T.norm})
"""Calls that write nothing, and whose results share no memory with what they read."""

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
"""What a GradScaler calls for all gradients of an optimizer."""


class Source(Protocol):
    """Where the gradient comes from."""

    def read(self, member: TrackedParameter, lend: bool = True) -> Tensor:
        """The whole gradient, to be read, and to be written if it is lent. Collective."""

    def norms(self, members: Sequence[TrackedParameter], order: Any) -> tuple[Tensor, ...] | None:
        """The norms of these gradients; None if each has to be read for that. Collective."""

    def scale(self, members: Sequence[TrackedParameter], how: str, by: tuple[Any, ...]) -> list[bool]:
        """Scale what there is of these on this rank; for each, False if the whole has to be scaled instead."""

    def unscale(self, members: Sequence[TrackedParameter], found_inf: Tensor, inverse: Tensor) -> bool:
        """Multiply this rank's parts of these by `inverse`, and set `found_inf` to 1 if any rank's part of them is not
        finite; return False if the whole has to be unscaled instead. Collective if it returns True."""


class ShardedGradient(Tensor):
    """The gradient of one parameter over all ranks."""

    # Weak: the garbage collector would not see the cycle through `p.grad`.
    _member: weakref.ref[TrackedParameter]
    _source: weakref.ref[Source] | None
    _kept: Callable[[], Tensor]

    @staticmethod
    def __new__(cls: type[ShardedGradient], member: TrackedParameter, source: Source) -> ShardedGradient:
        parameter = member.parameter
        with bypass_torch_function():
            gradient: ShardedGradient = _T._make_wrapper_subclass(
                cls,
                member.entry.shape,
                strides=member.entry.strides,
                dtype=member.bucket.sum_dtype,
                device=parameter.device,
            )
        gradient._member, gradient._source = weakref.ref(member), weakref.ref(source)
        return gradient

    def keep(self, whole: Callable[[], Tensor]) -> None:
        """The program keeps it after the gradient was dropped: read its elements from `whole` from now on."""
        self._source, self._kept = None, whole

    @property
    def whole(self) -> Tensor:
        """All elements, which may be written. Collective."""
        return self.read()

    def read(self, lend: bool = True) -> Tensor:
        """All elements, which may be written if they are lent. Collective."""
        if self._source is None:
            return self._kept()
        source, member = self._source(), self._member()
        if source is None or member is None:
            raise SherdError("this p.grad is gathered from all ranks, but its model no longer exists")
        return source.read(member, lend)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _ASKING or (getattr(func, "__name__", "") == "__get__" and func.__self__ in _METADATA):
            with bypass_torch_function():
                return func(*args, **options)
        if func is _UNSCALE and not options and _unscaled(*args):
            return None
        if func is torch._foreach_norm and len(args) < 3 and not options and (norms := _norms(*args)) is not None:
            return norms
        if func in _SCALING and not _not_scaled(args[:1], _SCALING[func], args[1:], options):
            return args[0]
        rest = args
        if func in _SCALING_EACH and args:
            rest = (_not_scaled(args[0], _SCALING_EACH[func], args[1:], options), *args[1:])
            if not rest[0]:
                return args[0]
        gathered = _gathered(rest, lend=func not in _READING or options.get("out") is not None)
        result = func(*gathered, **_gathered(options))
        return args[0] if args and (result is gathered[0] or func in _SCALING_EACH) else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_gathered(args), **_gathered(kwargs or {}))

    def _origin(self) -> tuple[Source, TrackedParameter] | None:
        """Where it comes from; None if the program keeps it after it was dropped."""
        source, member = None if self._source is None else self._source(), self._member()
        return None if source is None or member is None else (source, member)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = self.read(lend=False).clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.read(lend=False).clone()
        return plain.__reduce_ex__(protocol)


def _not_scaled(gradients: Sequence[Tensor], how: str, by: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Scale what can be scaled in parts; gives the rest."""
    if options or not all(map(_is_number, by)):
        return [*gradients]
    rest, found = [], dict[Source, list[tuple[TrackedParameter, Tensor]]]()
    for each in gradients:
        origin = each._origin() if isinstance(each, ShardedGradient) else None
        if origin is None:
            rest.append(each)
        else:
            found.setdefault(origin[0], []).append((origin[1], each))
    for source, its in found.items():
        scaled = source.scale([member for member, _ in its], how, by)
        rest.extend(each for (_, each), done in zip(its, scaled, strict=True) if not done)
    return rest


def _is_number(value: Any) -> bool:
    # Whether torch takes a complex one, it says where there is a gradient: a rank may own no part of it.
    return isinstance(value, int | float) or (type(value) is Tensor and not value.dim() and not value.is_complex())


def _unscaled(gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> bool:
    """Unscale gradients of one model in parts, if all of them can be."""
    source, members = _of_one_model(gradients)
    return source is not None and source.unscale(members, found_inf, inverse)


def _norms(gradients: Sequence[Tensor], order: Any = 2) -> tuple[Tensor, ...] | None:
    """The norms of gradients of one model, without gathering all of them if that can be."""
    source, members = _of_one_model(gradients)
    return None if source is None else source.norms(members, order)


def _of_one_model(gradients: Sequence[Tensor]) -> tuple[Source | None, list[TrackedParameter]]:
    """If these are current gradients of one model: where they come from, and of which parameters they are."""
    origins = [each._origin() if isinstance(each, ShardedGradient) else None for each in gradients]
    found = [origin for origin in origins if origin is not None]
    if len(found) < len(origins) or len({id(source) for source, _ in found}) != 1:
        return None, []
    return found[0][0], [member for _, member in found]


def _gathered(things: Any, lend: bool = True) -> Any:
    """The same with whole gradients, in containers of any depth; they may be written if they are lent."""
    if isinstance(things, ShardedGradient):
        return things.read(lend)
    if isinstance(things, dict):
        return {key: _gathered(thing, lend) for key, thing in things.items()}
    if type(things) in (tuple, list):
        return type(things)([_gathered(thing, lend) for thing in things])
    return things
