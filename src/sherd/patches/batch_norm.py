"""Gives the user's `nn.SyncBatchNorm` modules our `forward`: torch's own refuses CPUs and needs a process group."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

RELIES_ON = {
    "torch.nn:SyncBatchNorm.forward": "self input",
    "torch.nn:SyncBatchNorm.__init__": "self num_features eps momentum affine track_running_stats process_group ...",
    "torch.nn.modules.batchnorm:_BatchNorm.forward": "self input",
    "torch.nn.modules.batchnorm:_BatchNorm.__setstate__": "self state",
    "torch.nn:SyncBatchNorm._check_input_dim": "self input",
}

Forward = Callable[["SyncedBatchNorm", Tensor], Tensor]
_forwards: weakref.WeakKeyDictionary[nn.Module, Callable[[], Forward | None]] = weakref.WeakKeyDictionary()


class SyncedBatchNorm(nn.SyncBatchNorm):
    """Batch norm over the batches of all ranks; without ranks, or in eval mode, that of `nn.BatchNorm`.

    It is pickled as a plain `nn.SyncBatchNorm`; a copy does not exchange statistics.
    """

    def forward(self, input: Tensor) -> Tensor:
        find = _forwards.get(self)
        forward = None if find is None else find()
        if forward is None or not self.training:
            return super(nn.SyncBatchNorm, self).forward(input)
        return forward(self, input)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedBatchNorm:
        twin = memo[id(self)] = SyncedBatchNorm.__new__(SyncedBatchNorm)
        twin.__setstate__(copy.deepcopy(vars(self), memo))  # type: ignore[no-untyped-call]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.SyncBatchNorm,), vars(self)


def install(module: nn.SyncBatchNorm, find: Callable[[], Forward | None]) -> None:
    """In training, `module` runs the forward that `find()` returns, as long as it returns one."""
    module.__class__ = SyncedBatchNorm
    _forwards[module] = find


def uninstall() -> None:
    """Does nothing: no part of torch was replaced, and modules keep their class."""


def forget(module: nn.Module) -> None:
    """Stop exchanging statistics."""
    _forwards.pop(module, None)
