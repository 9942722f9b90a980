"""What a type checker makes of a script. It is never run: `test_types.py` has mypy read it.

Lines that end in `# error` must have one, and no others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import sherd


class Net(nn.Module):
    def generate(self) -> str:
        return "text"


def distributed(net: Net, adamw: AdamW, sgd: SGD, loader: DataLoader[tuple[Tensor, Tensor]]) -> None:
    assert_type(sherd.distribute(net), Net)
    assert_type(sherd.distribute(net, strategy="zero3").generate(), str)
    assert_type(sherd.distribute(net, adamw), tuple[Net, AdamW])
    assert_type(sherd.distribute(net, loader), tuple[Net, DataLoader[tuple[Tensor, Tensor]]])
    assert_type(sherd.distribute(net, sgd, loader, clip_norm=1.0)[1], SGD)
    assert_type(sherd.distribute(net, net, sgd, loader)[2], SGD)
    model, other, optimizer, train, test = sherd.distribute(net, nn.Linear(2, 3), adamw, loader, loader, accumulate=2)
    assert_type((model, other, optimizer), tuple[Net, nn.Linear, AdamW])
    assert_type((train, test), tuple[DataLoader[tuple[Tensor, Tensor]], DataLoader[tuple[Tensor, Tensor]]])
    sherd.distribute(net, net, net, sgd, loader, loader, global_batch=6)
    assert_type(sherd.distribute(net, adamw, sgd), tuple[Net, AdamW, SGD])
    assert_type(sherd.distribute(net, sgd, adamw, loader)[1:3], tuple[SGD, AdamW])


def options(net: Net, optimizer: Optimizer) -> None:
    sherd.distribute(net, strategy=sherd.ZeRO(stage=2), comm=sherd.CommOptions(timeout=60.0))
    sherd.distribute(net, accumulate_at="owner", nonfinite="raise", loss_reduction="sum", sync_buffers="leader")
    sherd.distribute(net, bucket_bytes=None, check="edits", iterable="split", groups={"experts.0.*": [0, 1]})
    sherd.distribute(net, groups={"experts.0.*": 1})  # error
    sherd.distribute(net, strategy="zero4")  # error
    sherd.distribute(net, clip_nrom=1.0)  # error
    sherd.distribute(net, clip_norm="1")  # error
    sherd.distribute(net, nonfinite="ignore")  # error
    sherd.distribute(net, accumulate=1.5)  # error
    sherd.distribute([net])  # error
    sherd.distribute(net, optimizer, 3)  # error
    sherd.distribute(net).generat()  # error


def helpers(loss: Tensor, loader: DataLoader[tuple[Tensor, Tensor]]) -> None:
    assert_type(sherd.rank(), int)
    assert_type(sherd.is_main(), bool)
    assert_type(sherd.broadcast("word"), str)
    assert_type(sherd.mean(loss), Tensor)
    assert_type(sherd.mean(0.5, n=3), float)
    assert_type(sherd.mean(loss, loader=loader), Tensor)
    assert_type(len(sherd.progress(loader)), int)
    for x in sherd.progress([loss], desc="epoch"):
        assert_type(x, Tensor)
    for x, y in sherd.progress(loader):
        sherd.print(x, y)
    with sherd.main_first():
        sherd.print("once", flush=True)
    assert_type(sherd.evaluate(nn.Linear(2, 3), loader, {"loss": nn.functional.cross_entropy}), dict[str, Any])
    sherd.map_reduce(len, ["a"], "mean", key=str, chunk=3)
    sherd.map_reduce(len, ["a"], max, key="pairs", retries=2)
    sherd.map_reduce(len, ["a"], "average")  # error
    sherd.map_reduce(len, ["a"], key="words")  # error
    sherd.evaluate(loader, nn.Linear(2, 3), {})  # error
    sherd.seed("1")  # error
    sherd.mean("loss")  # error
