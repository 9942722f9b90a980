"""The list of the classes that `torch.nn.utils` hands to torch's foreach functions, all tensors in one call.

Tensors of any other class are clipped one by one.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils import _foreach_utils

RELIES_ON = {"torch.utils._foreach_utils:_foreach_supported_types": None}
_added: list[type[Tensor]] = []


def install(kind: type[Tensor]) -> None:
    """Have `clip_grad_norm_` and `clip_grad_value_` hand over all tensors of this class together."""
    if kind not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(kind)
        _added.append(kind)


def uninstall() -> None:
    for kind in _added:
        _foreach_utils._foreach_supported_types.remove(kind)
    _added.clear()
