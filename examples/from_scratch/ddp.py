"""Data parallelism from scratch: every rank has the whole model and its own part of the batch.

    sherd run -n 2 examples/from_scratch/ddp.py

Three rules keep the copies of the model the same to the last bit: they start the same (a broadcast), they get the same
gradient (the mean over the ranks), and they make the same update of it. Gradients are averaged, not weights.
"""

from __future__ import annotations

import torch
from problem import loss_of, network, weights
from torch import Tensor, nn

from sherd import comm


class AverageGradients:
    """Makes a model's gradients the mean over all ranks, while backward still computes the rest of them."""

    def __init__(self, ranks: comm.Communicator, model: nn.Module) -> None:
        self.ranks = ranks
        self.under_way: list[comm.Handle] = []
        for parameter in model.parameters():
            ranks.broadcast(parameter.data, root=0).wait()  # rule 1: all start with rank 0's weights
            parameter.register_post_accumulate_grad_hook(self.start)  # type: ignore[no-untyped-call]

    def start(self, parameter: Tensor) -> None:
        """Backward goes from the last layer to the first, and calls this as soon as one gradient is complete.

        The call returns at once: the gradient travels while earlier layers are still at work. Real implementations
        collect several gradients in a bucket first, as a few large messages are cheaper than many small ones.
        """
        assert parameter.grad is not None
        self.under_way.append(self.ranks.all_reduce(parameter.grad, parameter.grad, op="mean"))  # rule 2, in place

    def finish(self) -> None:
        for handle in self.under_way:
            handle.wait()
        self.under_way.clear()


def train(ranks: comm.Communicator, steps: int, average: bool = True) -> tuple[nn.Module, list[float]]:
    """The model, and the loss of this rank's rows at every step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients = AverageGradients(ranks, model) if average else None
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, ranks.rank)
        loss.backward()  # type: ignore[no-untyped-call]
        if gradients is not None:
            gradients.finish()
        optimizer.step()  # rule 3: the same optimizer, the same weights, the same gradient
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def apart(ranks: comm.Communicator, model: nn.Module) -> float:
    """How far the copies are from rank 0's: the largest difference of any weight on any rank."""
    mine = weights(model)
    first = ranks.broadcast(mine.clone(), root=0).wait()
    return ranks.all_reduce((mine - first).abs().max(), op="max").wait().item()


def main() -> None:
    with comm.connect() as ranks:
        for average in (True, False):
            model, losses = train(ranks, steps=100, average=average)
            last, difference = ranks.all_gather(torch.tensor([losses[-1]])).wait(), apart(ranks, model)
            if ranks.rank == 0:
                print("gradients averaged:" if average else "each rank for itself:")
                print("  last loss of each rank's own rows:", [round(loss, 3) for loss in last.tolist()])
                print(f"  largest difference between the ranks' weights: {difference:.3g}")


if __name__ == "__main__":
    main()
