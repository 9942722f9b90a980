"""The communicator: the one seam between sherd and every transport.

Every operation returns a `Handle` at once; what a rank contributes is on its way when the call returns, and the result
is complete when `handle.wait()` returns. Do not touch the tensors of a call until then.

    total = comm.all_reduce(gradient).wait()

A transport implements the `start_` methods on flat contiguous tensors. This class checks the arguments, describes the
call (see `calls`) and shapes the results; checked calls are remembered, so a repeated call costs one look-up.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from sherd.comm.calls import Call, Site, call_site
from sherd.comm.checked_call import CheckedCall, Detail, check_call, check_kinds, check_rank, refuse_expanded
from sherd.comm.codec import Codec
from sherd.comm.counters import Counters
from sherd.comm.flat import FLAT, flat_input, flat_output
from sherd.comm.handle import CopyBack, Handle
from sherd.comm.memo import Memo
from sherd.comm.trust.objects import ObjectCall
from sherd.comm.trust.seal import Seal
from sherd.config import CommOptions
from sherd.errors import ConfigError, Unsupported
from sherd.layout.tree import SummationTree

if TYPE_CHECKING:
    from typing_extensions import Self

_BARRIER = Call("barrier", "barrier()")


class Backing(NamedTuple):
    """The file that shared memory is mapped from, and where in it."""

    fd: int
    offset: int


class Communicator(ABC):
    """A group of ranks that communicate. `rank` and `world` number its members from 0.

    Only one thread may use it, unless several threads hold its `lock` in turn. Input and output of a call must be the
    same tensor, where that is allowed, or not overlap.
    """

    #: The transport's name, as in `CommOptions.transport`.
    transport: str
    #: Whether `shared_tensor` and `shared_buffers` work.
    shares_memory: bool = False
    #: Whether what arrives can only come from this user's own processes, so that a pickle needs no `seal`.
    trusts_memory: bool = False
    #: Whether nothing is communicated and values do not matter: tensors may be on the meta device.
    dry: bool = False

    def __init__(self, rank: int, world: int, options: CommOptions) -> None:
        self.rank = rank
        self.world = world
        self.options = options
        self.tree = SummationTree(world, min(options.group or world, world))
        self.counters = Counters()
        #: What messages call each rank: its number among all ranks of the job, of which these may be some.
        self.numbers: Sequence[int] = range(world)
        #: The ranks of each host, where that is known; else all on one.
        self.hosts: Sequence[Sequence[int]] = [list(range(world))]
        self.closed = False
        #: Where all these ranks can write, and others perhaps too: see `meeting`. None where there is no such place.
        self.store: Store | None = None
        #: What proves that a pickle comes from one of these ranks; None where none is needed, or pickles are not sent.
        self.seal: Seal | None = None
        #: To be held for each call and each wait by whoever lets several threads use it. See `use_here`.
        self.lock = threading.RLock()
        self._checked_calls = Memo[tuple[object, ...], CheckedCall]()
        self._agreed = Memo[str, Call]()
        self.site: Site = (0, 0)  # of the call that is being made
        self._objects = 0  # calls that sent objects

    # ---------------------------------------------------------------- operations

    def reduce_scatter(
        self,
        input: Tensor,
        output: Tensor | None = None,
        *,
        op: str = "sum",
        codec: Codec | None = None,
        dtype: torch.dtype | None = None,
        own: Tensor | None = None,
    ) -> Handle:
        """Reduce over ranks and keep this rank's slice: the first dimension of `input` is cut into `world` parts.

        With `own`, this rank's contribution to its own slice is taken from there, and that part of `input` is scratch:
        it saves copying what no other rank reads.
        """
        call, source, result, flat = self._prepared("reduce_scatter", input, output, dtype, codec, op)
        mine = None if own is None else self._own(own, input, input.numel() // self.world)
        return self._finish(self.start_reduce_scatter(call, source, flat, op, codec, mine), result, flat)

    def all_gather(
        self,
        input: Tensor,
        output: Tensor | None = None,
        *,
        codec: Codec | None = None,
        dtype: torch.dtype | None = None,
        what: str = "",
    ) -> Handle:
        """Concatenate every rank's `input` along the first dimension, in rank order, on every rank.

        `what` names what is gathered, where ranks might gather different things of the same shape: it is compared too.
        """
        call, source, result, flat = self._prepared("all_gather", input, output, dtype, codec, what)
        return self._finish(self.start_all_gather(call, source, flat, codec), result, flat)

    def all_reduce(
        self,
        input: Tensor,
        output: Tensor | None = None,
        *,
        op: str = "sum",
        codec: Codec | None = None,
        dtype: torch.dtype | None = None,
    ) -> Handle:
        """Reduce over ranks, on every rank. `output=input` works in place."""
        call, source, result, flat = self._prepared("all_reduce", input, output, dtype, codec, op)
        return self._finish(self.start_all_reduce(call, source, flat, op, codec), result, flat)

    def reduce(
        self, input: Tensor, output: Tensor | None = None, *, root: int, op: str = "sum", own: Tensor | None = None
    ) -> Handle:
        """Reduce over ranks, on rank `root`; on the others the result is empty, and so is an `output`.

        With `own`, the contribution of `root` is taken from there, and its `input` is scratch.
        """
        call, source, result, flat = self._prepared("reduce", input, output, None, None, (root, op))
        mine = None if own is None else self._own(own, input, input.numel())
        return self._finish(self.start_reduce(call, source, flat, root, op, mine), result, flat)

    def broadcast(self, tensor: Tensor, root: int = 0, *, source: Tensor | None = None, what: str = "") -> Handle:
        """Overwrite `tensor` with that of rank `root`, on every rank.

        With `source`, which only `root` may give, it is overwritten with that, on `root` too. Where `tensor` is a
        `shared_tensor`, nothing is written before every rank of the host has made this call. `what` is compared, as in
        `all_gather`.
        """
        detail = (root, what) if what else root
        call, given, result, flat = self._prepared("broadcast", tensor, tensor, None, None, detail)
        mine = None if source is None else self._own(source, tensor, tensor.numel())
        if flat.data_ptr() != result.data_ptr():
            flat.copy_(given)
        return self._finish(self.start_broadcast(call, flat, root, mine), result, flat)

    def all_to_all(self, input: Tensor, output: Tensor | None = None) -> Handle:
        """Send the i-th part of `input` (cut along its first dimension) to rank i, and receive one part from each."""
        call, source, result, flat = self._prepared("all_to_all", input, output, None, None)
        if flat.numel() and flat.data_ptr() == input.data_ptr():
            fix = "write all_to_all(x, torch.empty_like(x))"
            raise ConfigError(f"rank {self.rank}: all_to_all cannot work in place; {fix}")
        return self._finish(self.start_all_to_all(call, source, flat), result, flat)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Handle:
        """Send to one rank. Complete when `tensor` may be reused, which can be before it is received.

        Messages are not matched by `tag`: it is compared, as the shape is.
        """
        checked = self._checked("send", tensor, tensor, None, None, (to, tag) if tag else to)
        handle = self.start_send(checked.call, flat_input(tensor), to)
        handle.result = tensor
        return handle

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Handle:
        """Receive into `tensor` what `source` sent, in the order in which it was sent."""
        call, _, result, flat = self._prepared("recv", tensor, tensor, None, None, (source, tag) if tag else source)
        return self._finish(self.start_recv(call, flat, source), result, flat)

    def barrier(self) -> Handle:
        """Complete when every rank has made this call."""
        if self.world > 1:
            self.site = call_site()
        return self.start_barrier(_BARRIER)

    def check(self, operation: str, input: Tensor, output: Tensor | None = None, detail: str | int = "") -> None:
        """Refuse a call that cannot be right; nothing is sent. For callers that make several calls as one.

        `detail` is the reduction, the root or the other rank.
        """
        checked = self._checked(operation, input, output, None, None, detail)
        if output is not None and not output.is_contiguous():
            refuse_expanded(checked.call.text, output)

    def publish(self, part: Tensor, whole: Tensor) -> Handle:
        """Every rank has updated its own slice of `whole`, which is `part`: make all of them visible on every rank.

        The first dimension of `whole` is cut into `world` slices. No rank may still read their old values: a slice may
        be overwritten as soon as its own rank has made this call. Where `whole` is a `shared_tensor`, slices travel
        between hosts only.
        """
        call, source, result, flat = self._prepared("publish", part, whole, None, None)
        return self._finish(self.start_publish(call, source, flat), result, flat)

    def agree(self, text: str) -> Handle:
        """A barrier that all ranks must enter with the same text: `operation(what, how)`."""
        self.site = call_site()
        call = self._agreed.get(text)
        if call is None:
            call = self._agreed[text] = Call(text.partition("(")[0], text)
        return self.start_barrier(call)

    # ---------------------------------------------------------------- small Python objects

    # Plain data (see `plain`) and, among ranks that share memory or a token, anything that can be pickled. What cannot
    # be sent raises a `ConfigError` on every rank, and the communicator can still be used.

    def all_gather_object(self, obj: Any, what: str = "") -> list[Any]:
        """Every rank's small object, in rank order. `what` is compared, as in `all_gather`."""
        call = self.object_call("all_gather_object")
        data = call.packed(obj, self.rank)
        sizes = self.all_gather(torch.tensor([data.numel()]), what=what).wait().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.all_gather(padded).wait().view(self.world, -1)
        return call.unpacked([row[:size] for row, size in zip(rows, sizes, strict=True)], range(self.world))

    def compare_object(self, obj: Any) -> tuple[list[Any], int]:
        """Every rank's small object, and the first rank whose differs from rank 0's; 0 if none does."""
        with self.counters.agreeing():
            everybody = self.all_gather_object(obj)
        return everybody, next((rank for rank, theirs in enumerate(everybody) if theirs != everybody[0]), 0)

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Rank `root`'s small object, on every rank."""
        call = self.object_call("broadcast_object")
        data = call.packed(obj, root) if self.rank == root else torch.empty(0, dtype=torch.uint8)
        size = int(self.broadcast(torch.tensor([data.numel()]), root).wait())
        payload = data if self.rank == root else torch.empty(size, dtype=torch.uint8)
        return call.unpacked([self.broadcast(payload, root).wait()], [root])[0]

    def object_call(self, operation: str) -> ObjectCall:
        """How this rank packs and reads the objects of a call that all ranks make."""
        self._objects += 1
        return ObjectCall(operation, self._objects, self.world, self.trusts_memory, self.seal)

    # ---------------------------------------------------------------- memory shared by the ranks of a host

    def shared_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One zeroed allocation mapped by all ranks of this host: what one writes, the others see after a barrier.

        Collective.
        """
        raise self._no_shared_memory()

    def backing(self, tensor: Tensor) -> Backing | None:
        """Where a `shared_tensor` is mapped from, so that it can be mapped again; None if no other rank maps it."""
        return None

    def shared_buffers(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """One zeroed buffer per rank of `host`, each visible to all of these ranks. Collective.

        An operation whose input lies in this rank's buffer is read in place by the others: nothing is copied in.
        """
        raise self._no_shared_memory()

    # ---------------------------------------------------------------- groups and life

    @property
    def host(self) -> Communicator:
        """The communicator among the ranks that share memory with this one: those of its host, or it alone."""
        return self

    @property
    def ranks_per_host(self) -> int | None:
        """The same for every host, with consecutive numbers; None where hosts differ, or it is not known."""
        return self.host.world

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator among `ranks`, None on ranks outside it. All ranks of this communicator must call it."""

    @property
    def number(self) -> int:
        """What messages call this rank."""
        return self.numbers[self.rank]

    def use_here(self) -> None:  # noqa: B027 - alone, nothing is ever under way
        """Calls now come from this thread, whose waits then move operations on. It must hold the `lock`."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Ranks that still need this one get an error that says so, and why. Safe to call twice."""
        self.closed, self.store = True, None
        self._close(error)

    @abstractmethod
    def _close(self, error: BaseException | None) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    # ---------------------------------------------------------------- implemented by transports, on flat tensors

    @abstractmethod
    def start_reduce_scatter(
        self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None, own: Tensor | None = None
    ) -> Handle: ...

    @abstractmethod
    def start_all_gather(self, call: Call, source: Tensor, target: Tensor, codec: Codec | None) -> Handle: ...

    def start_publish(self, call: Call, source: Tensor, target: Tensor) -> Handle:
        return self.start_all_gather(call, source, target, None)

    @abstractmethod
    def start_all_reduce(self, call: Call, source: Tensor, target: Tensor, op: str, codec: Codec | None) -> Handle: ...

    @abstractmethod
    def start_reduce(
        self, call: Call, source: Tensor, target: Tensor, root: int, op: str, own: Tensor | None = None
    ) -> Handle: ...

    @abstractmethod
    def start_broadcast(self, call: Call, target: Tensor, root: int, source: Tensor | None = None) -> Handle: ...

    @abstractmethod
    def start_all_to_all(self, call: Call, source: Tensor, target: Tensor) -> Handle: ...

    @abstractmethod
    def start_send(self, call: Call, source: Tensor, to: int) -> Handle: ...

    @abstractmethod
    def start_recv(self, call: Call, target: Tensor, source: int) -> Handle: ...

    @abstractmethod
    def start_barrier(self, call: Call) -> Handle: ...

    # ---------------------------------------------------------------- private

    def _no_shared_memory(self) -> Unsupported:
        me = f"rank {self.rank} of {self.world} ({self.transport})"
        return Unsupported(f"{me} does not share memory between ranks; check `comm.shares_memory` first")

    def _checked(
        self,
        operation: str,
        input: Tensor,
        output: Tensor | None,
        dtype: torch.dtype | None,
        codec: Codec | None,
        detail: Detail = "",
        depth: int = 3,
    ) -> CheckedCall:
        """Check a call, once: a call that was right before is right again. Its site is `depth` frames up."""
        if self.world > 1:  # alone, no message needs it
            self.site = call_site(depth)
        try:
            there = None if output is None else (output.shape, output.dtype, output.device, output.layout)
            key = (operation, input.shape, input.dtype, input.device, input.layout, there, dtype, codec, detail)
            checked = self._checked_calls.get(key)
        except (AttributeError, TypeError):
            check_kinds(self.rank, operation, input, output)
            raise
        if checked is None:
            checked = check_call(self, operation, input, output, dtype, codec, detail)
            self._checked_calls[key] = checked
        return checked

    def _prepared(
        self,
        operation: str,
        input: Tensor,
        output: Tensor | None,
        dtype: torch.dtype | None,
        codec: Codec | None,
        detail: Detail = "",
    ) -> tuple[Call, Tensor, Tensor, Tensor]:
        """Check a call: the call, the flat input, the tensor to return and the flat contiguous tensor to write, which
        is another one where `output` has gaps."""
        checked = self._checked(operation, input, output, dtype, codec, detail, 4)
        source = input if input.stride() == FLAT and not input.requires_grad else flat_input(input)
        if output is None:
            output = input.new_empty(checked.shape, dtype=checked.dtype)
        if output.stride() == FLAT and not output.requires_grad:
            return checked.call, source, output, output
        return checked.call, source, output, flat_output(output, checked)

    def _own(self, own: Tensor, input: Tensor, numel: int) -> Tensor:
        """What a rank gives instead of a part of its `input`, flat."""
        if (own.dtype, own.numel()) != (input.dtype, numel):
            expected = f"{numel} elements of {input.dtype}"
            raise ConfigError(f"rank {self.rank}: own has {own.numel()} elements of {own.dtype}, expected {expected}")
        return flat_input(own)

    def _put_own(self, source: Tensor, own: Tensor | None) -> None:
        """Copy `own` to where it belongs in `source`, for transports that read it there."""
        if own is not None:
            source.view(self.world, -1)[self.rank].copy_(own)

    def _finish(self, handle: Handle, result: Tensor, flat: Tensor) -> Handle:
        """The handle as the caller sees it: its result has the caller's shape, strides and identity."""
        if flat is not result and flat.data_ptr() != result.data_ptr():
            return CopyBack(handle, flat, result)
        handle.result = result
        return handle

    def check_rank(self, rank: object, operation: str, name: str, peer: bool = False) -> None:
        """Refuse what is not a rank of this communicator, and with `peer` this rank itself."""
        check_rank(self, rank, operation, name, peer)

    def _check_group(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.check_rank(rank, "subgroup", "ranks with")
        if list(ranks) != sorted(set(ranks)):
            raise ConfigError(f"rank {self.rank}: subgroup needs ascending ranks without repeats, got {list(ranks)}")
