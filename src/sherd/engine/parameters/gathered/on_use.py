"""Tensors whose memory exists only while it is used: using them gathers it.

Every torch call on such a tensor passes through here first. So does every call on a *view* of one, which shares its
memory. What autograd saves for backward is saved as an address, and touched when it is unpacked. Memory that is read
outside torch's dispatch (by a trace, a transform of torch.func, a graph of gradients) is pinned or held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.parameters.gathered.gathering import Gathering
from sherd.patches import gathered
from sherd.patches.gathered import GatheredParameter, GatheredView, mark_view, store_of

_T = torch.Tensor
_hooks: Any = torch._C._autograd
_ASKING: frozenset[Any] = frozenset(
    {
        *(_T.size, _T.stride, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.storage_offset),
        *(_T.data_ptr, _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device, _T.__len__),
        *(_T.is_shared, _T.is_pinned, _T.is_inference, _T._is_view, _T.requires_grad_, _T.retain_grad, _T.is_set_to),
        *(_T.register_hook, _T.register_post_accumulate_grad_hook, _T.dim_order, torch.numel, torch.is_complex),
        *(torch.is_floating_point, torch.is_inference, torch.is_same_size, _T.is_same_size, torch.result_type),
    }
)
"""Calls that read no elements."""
_VIEWS: frozenset[Any] = frozenset({_T.T, _T.mT, _T.H, _T.mH, _T.real, _T.imag})
"""Attributes that are views: they need the memory to exist."""
_DETACHING: frozenset[Any] = frozenset({_T.detach, torch.detach})
_EXPORTING: frozenset[Any] = frozenset({_T.numpy, _T.__array__, _T.__dlpack__, _T.share_memory_})
"""Calls whose result is read outside torch's dispatch: they get a copy."""
_STORAGES: frozenset[Any] = frozenset({_T.untyped_storage, _T.storage, _T._typed_storage})

_REASON = "zero3 gathers parameters on use, between graphs; without fullgraph=True it works"


class Store(Protocol):
    """Where such tensors live."""

    gathering: Gathering

    def bucket_of(self, tensor: Tensor) -> Bucket | None:
        """The bucket whose memory contains the tensor, if it is in the store."""


def gather_on_use(parameter: nn.Parameter, store: Store) -> None:
    """Have a parameter whose data is in `store` gathered on use."""
    gathered.install(_call, pin)
    gathered.gather_on_use(parameter, store)


def pin(things: Any) -> None:
    """Pin the memory of tensors among these, which is read outside torch's dispatch."""
    for tensor in _on_use(things):
        for store, buckets in _places([tensor]).items():
            for bucket in buckets:
                store.gathering.pin(bucket)


def plain_copies(state: dict[str, Any]) -> None:
    """Replace tensors that are gathered on use by copies, in place. Tied tensors stay tied."""
    copies: dict[Any, Tensor] = {}
    for name, value in state.items():
        if type(value) is GatheredView:
            with torch._C.DisableTorchFunctionSubclass():
                where = value.untyped_storage()._cdata, value.storage_offset()
            key = where, value.shape, value.stride(), value.dtype
            if key not in copies:
                copies[key] = value.clone()
            state[name] = copies[key]


@torch.compiler.disable(reason=_REASON)  # type: ignore[no-untyped-call, untyped-decorator]
def _call(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    found = list(_on_use((args, options)))
    stores = {id(store): store for store in map(store_of, found)}.values()
    attribute = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") and func.__self__ not in _VIEWS
    if attribute or func in _ASKING or func in _DETACHING:
        if (func in _DETACHING or attribute) and _hooks._top_saved_tensors_default_hooks(True) is not None:
            _pin_if_saved(func, found)
        with torch._C.DisableTorchFunctionSubclass():
            return _mark(func(*args, **options), stores)
    if func is torch.autograd.grad:
        return _differentiate(*args, **options)
    if func is _T.backward:
        return torch.autograd.backward(*args, **options)
    if func in _EXPORTING:
        return _read_only(func(*(_copied(arg) for arg in args), **options))
    if func in _STORAGES:
        pin(found)
    return _mark(_used(func, args, options, found), stores)


def _used(func: Any, args: tuple[Any, ...], options: dict[str, Any], found: list[Tensor]) -> Any:
    """Call with these tensors gathered, and track what is saved for backward."""
    places = _places(found)
    begun: list[tuple[Store, list[Bucket]]] = []
    try:
        for store, buckets in places.items():
            store.gathering.use(buckets)
            begun.append((store, buckets))
        if torch._C._get_tracing_state() is not None:
            _hold(places)
        with torch._C.DisableTorchFunctionSubclass():
            versions = [tensor._version for tensor in found]
            hooked = torch.is_grad_enabled() and _hook(places)
            try:
                result = func(*args, **options)
            finally:
                if hooked:
                    _hooks._pop_saved_tensors_default_hooks()
            for tensor, version in zip(found, versions, strict=True):
                if tensor._version != version:
                    _edited(tensor)
            return result
    finally:
        for store, buckets in begun:
            store.gathering.leave(buckets)


def _hook(places: dict[Store, list[Bucket]]) -> bool:
    """Push hooks for what autograd saves, which the caller pops; where hooks are disabled, pin everything."""
    if _hooks._saved_tensors_hooks_is_enabled():
        saving = _Saving(list(places), _hooks._top_saved_tensors_default_hooks(True))
        _hooks._push_saved_tensors_default_hooks(saving.pack, _unpack)
        return True
    for store, buckets in places.items():
        for bucket in buckets:
            store.gathering.pin(bucket)
    return False


class _Saving:
    """What one call saves. Tensors outside the stores go to the hooks that were already in force."""

    def __init__(self, stores: list[Store], outer: Any) -> None:
        self._stores = stores
        self._outer = outer

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        for store in self._stores:
            bucket = store.bucket_of(tensor)
            if bucket is not None:
                return _Saved(tensor, store.gathering, bucket)
        if self._outer is not None:
            pack, unpack = self._outer
            packed = pack(tensor)
            return lambda: unpack(packed)
        return _Saved(tensor, None, None)


class _Saved:
    """A tensor that autograd saved. Torch compares no versions of tensors saved through hooks, so this does."""

    def __init__(self, tensor: Tensor, gathering: Gathering | None, bucket: Bucket | None) -> None:
        self._tensor = tensor.detach()  # an output would otherwise keep itself alive
        self._version = tensor._version
        self._gathering = gathering
        self._bucket = bucket

    def __call__(self) -> Tensor:
        tensor, version = self._tensor, self._tensor._version
        if version != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {self._version} "
                f"instead"
            )
        if self._gathering is not None and self._bucket is not None:
            self._gathering.touch_for_node(self._bucket)
        return tensor


def _unpack(saved: Callable[[], Tensor]) -> Tensor:
    return saved()


def _differentiate(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """`torch.autograd.grad`, which needs the identity of its inputs and not their elements."""
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    found = torch.autograd.grad(
        [_edge(output) for output in outputs],
        [_edge(each) for each in inputs],
        grad_outputs,
        retain_graph,
        create_graph,
        only_inputs,
        True if materialize_grads else allow_unused,
        is_grads_batched,
    )
    if not materialize_grads:
        return found
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True))


def _edge(tensor: Any) -> Any:
    on_use = isinstance(tensor, GatheredParameter | GatheredView)
    return torch.autograd.graph.get_gradient_edge(tensor) if on_use else tensor


def _pin_if_saved(func: Any, found: list[Tensor]) -> None:
    """Pin for third-party hooks that save `x.detach()` or `x.data`, which loses the tensor's class."""
    if func in _DETACHING or getattr(func, "__self__", None) is _T.data:
        pin(found)


def _places(found: Iterable[Tensor]) -> dict[Store, list[Bucket]]:
    """The buckets that contain these tensors, each once, by store. Tensors lent out of their store have none."""
    places: dict[Store, list[Bucket]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in found:
            store: Store = store_of(tensor)
            bucket = store.bucket_of(tensor)
            if bucket is not None and bucket not in places.setdefault(store, []):
                places[store].append(bucket)
    return places


def _hold(places: dict[Store, list[Bucket]]) -> None:
    """Hold these buckets: a trace reads parameters at their addresses on every call."""
    for store, buckets in places.items():
        for bucket in buckets:
            store.gathering.hold(bucket)


def _edited(tensor: Tensor) -> None:
    for store, buckets in _places([tensor]).items():
        store.gathering.edited(buckets)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, GatheredParameter | GatheredView) else value


def _read_only(exported: Any) -> Any:
    """Make an exported array read-only: a write to the copy would be lost."""
    if hasattr(exported, "flags"):
        exported.flags.writeable = False
    return exported


def _on_use(things: Any) -> Iterator[Tensor]:
    """The tensors among these that are gathered on use, in containers of any depth."""
    if isinstance(things, GatheredParameter | GatheredView):
        yield things
    elif isinstance(things, tuple | list):
        for thing in things:
            yield from _on_use(thing)
    elif isinstance(things, dict):
        yield from _on_use(list(things.values()))


def _mark(result: Any, stores: Iterable[Store]) -> Any:
    """Mark as views the results that share the memory of a store."""
    if type(result) is Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            for store in stores:
                if store.bucket_of(result) is not None:
                    mark_view(result, store)
    elif isinstance(result, tuple | list):
        for each in result:
            _mark(each, stores)
    return result
