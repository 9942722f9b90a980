"""Objects as ranks send them to each other.

Plain data is sent as such (see `plain`). Anything else has to be pickled, and whoever writes a pickle can run any code
where it is read. So a pickle is read only where it must come from this user's processes (memory shared by the ranks of
a host), or where an HMAC by the job's key shows that a rank of this job made it, for this call. A rank that cannot send
such a pickle tells the others so, and all of them raise the same error and can go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sherd.comm.trust import plain
from sherd.comm.trust.seal import TOKEN, Seal
from sherd.errors import CommError, ConfigError

PLAIN, PICKLED, SEALED, REFUSED = b"0", b"1", b"2", b"3"


class ObjectCall(NamedTuple):
    """One call that sends objects. `number` counts such calls on all ranks: an old pickle does not fit a later one."""

    operation: str
    number: int
    world: int
    trusted: bool
    """whether pickles need no seal"""
    seal: Seal | None

    def packed(self, obj: Any, sender: int) -> Tensor:
        """What rank `sender`, which is this one, sends."""
        return torch.frombuffer(bytearray(self._bytes(obj, sender)), dtype=torch.uint8)

    def unpacked(self, packed: Sequence[Tensor], senders: Sequence[int]) -> list[Any]:
        """What they sent. If one of them is at fault, all ranks name the same one, and nothing is unpickled."""
        found = [self._opened(_bytes_of(data), sender) for data, sender in zip(packed, senders, strict=True)]
        return [plain.loads(data) if kind == PLAIN else pickle.loads(data) for kind, data in found]

    def _bytes(self, obj: Any, sender: int) -> bytes:
        try:
            return PLAIN + plain.dumps(obj)
        except plain.NotPlain as found:
            kind = found.kind
        if not self.trusted and self.seal is None:
            return REFUSED + plain.dumps((kind, ""))
        try:
            data = pickle.dumps(obj)
        except Exception as error:  # of any kind: the object may run code of its own
            return REFUSED + plain.dumps((kind, f"{type(error).__name__}: {error}"))
        if self.trusted or self.seal is None:
            return PICKLED + data
        return SEALED + self.seal.sealed(self._label(sender), data)

    def _opened(self, packed: bytes, sender: int) -> tuple[bytes, bytes]:
        """Kind and data of what may be read."""
        kind, data = packed[:1], packed[1:]
        if kind == PLAIN or (kind == PICKLED and self.trusted):
            return kind, data
        if kind == REFUSED:
            raise self._refusal(sender, plain.loads(data))
        opened = self.seal.opened(self._label(sender), data) if self.seal and kind == SEALED else None
        if opened is None:
            raise CommError(
                f"{self.operation} got something from rank {sender} that is neither plain data nor sealed by this "
                f"job's key for this call, and did not read it; someone else may have sent it, or {TOKEN} is not the "
                f"same on all hosts",
                (sender,),
            )
        return kind, opened

    def _refusal(self, sender: int, found: Any) -> ConfigError:
        kind, why = found if isinstance(found, tuple) and len(found) == 2 else ("?", "")
        if why:
            return ConfigError(
                f"{self.operation}: rank {sender} passed a {kind}, which cannot be pickled ({why}); pass plain data "
                f"or objects that pickle"
            )
        return ConfigError(
            f"{self.operation}: rank {sender} passed a {kind}, which has to be pickled, and a pickle from the network "
            f"can run any code: without a token it is not known who made it. Set {TOKEN} to the same secret on "
            f"every host, such as `python -c 'import secrets; print(secrets.token_hex())'` prints, or pass plain data: "
            f"numbers, strings, bytes, tensors on the CPU, and lists, tuples, sets and dicts of those"
        )

    def _label(self, sender: int) -> str:
        return f"{self.operation} {self.number} of rank {sender} of {self.world}"


def _bytes_of(tensor: Tensor) -> bytes:
    data = bytearray(tensor.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)
