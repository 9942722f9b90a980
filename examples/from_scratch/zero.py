"""ZeRO from scratch: data parallelism in which no two ranks keep the same optimizer state, gradient or weight.

    sherd run -n 2 examples/from_scratch/zero.py

Each parameter is cut into one slice per rank, and a rank updates only its own. Stage 1 cuts the optimizer state,
stage 2 gradients too, stage 3 the parameters as well: they are whole only while a layer uses them.
"""

from __future__ import annotations

import torch
from problem import loss_of, memory, network, padded, state
from torch import Tensor, nn

from sherd import comm


class Sliced:
    """A parameter: the `whole` that layers use, and the slice of it that is `mine` and that the optimizer steps."""

    def __init__(self, ranks: comm.Communicator, layer: nn.Module, parameter: Tensor, stage: int) -> None:
        self.ranks, self.stage = ranks, stage
        length = -(-parameter.numel() // ranks.world)  # rounded up: the last slices may end in padding
        self.slice = slice(ranks.rank * length, (ranks.rank + 1) * length)
        self.whole = padded(ranks.broadcast(parameter.data, root=0).wait(), ranks.world * length)
        parameter.data = self.whole[: parameter.numel()].view(parameter.shape)
        self.mine = self.whole[self.slice].clone() if stage == 3 else self.whole[self.slice]
        if stage == 3:
            self.forget()
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.after_forward)
        parameter.register_post_accumulate_grad_hook(self.reduce)  # type: ignore[no-untyped-call]

    def reduce(self, parameter: Tensor) -> None:  # when backward has this rank's gradient
        gradient, parameter.grad = padded(parameter.grad, self.whole.numel()), None  # type: ignore[arg-type]
        if self.stage == 1:
            self.mine.grad = self.ranks.all_reduce(gradient, op="mean").wait()[self.slice]
        else:  # no more than the slice that this rank will step, and half of what an all-reduce sends
            self.mine.grad = self.ranks.reduce_scatter(gradient, op="mean").wait()
        if self.stage == 3:
            self.forget()

    def gather(self, *_: object) -> None:  # stage 3: before a layer's forward, and again before its backward
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.ranks.all_gather(self.mine, self.whole).wait()

    def forget(self) -> None:  # stage 3: the memory goes; the tensor and what autograd saved of it stay
        self.whole.untyped_storage().resize_(0)

    def after_forward(self, _layer: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(self.gather)  # type: ignore[no-untyped-call]  # called when backward comes to this layer
        self.forget()


def train(ranks: comm.Communicator, stage: int, steps: int) -> tuple[nn.Module, list[int]]:
    """The model, and the bytes of parameters, gradients and state that this rank holds at the end of a step."""
    model = network()
    slices = [Sliced(ranks, layer, parameter, stage) for layer in model for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW([one.mine for one in slices], lr=0.01)  # so that its state is of the slices alone
    for step in range(steps):
        loss_of(model, step, ranks.rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for one in slices if stage < 3 else ():
            ranks.publish(one.mine, one.whole).wait()  # stages 1 and 2: everybody needs what this rank updated
    held = [memory(t for one in slices for t in (one.mine, one.whole)), memory(one.mine.grad for one in slices)]
    for one in slices if stage == 3 else ():
        one.gather()  # for whoever looks at the model next
    return model, [*held, memory(state(optimizer))]


def main() -> None:
    with comm.connect() as ranks:
        for stage in (1, 2, 3):
            _, held = train(ranks, stage, steps=2)
            if ranks.rank == 0:
                print(f"stage {stage}: bytes of parameters {held[0]}, gradients {held[1]}, optimizer state {held[2]}")


if __name__ == "__main__":
    main()
