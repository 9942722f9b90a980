"""A small network trained on several ranks with nothing but the communicator.

    sherd run -n 2 examples/regression.py

Every rank sees its own part of each batch; the mean of the ranks' gradients is the gradient of the whole batch.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from sherd import comm


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The same global batch on every rank: noisy samples of a wave."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(size, 1, generator=generator) * 6 - 3
    return x, torch.sin(2 * x) + 0.05 * torch.randn(size, 1, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256, help="samples per step, over all ranks")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with comm.connect() as ranks:
        for parameter in model.parameters():
            ranks.broadcast(parameter.data).wait()
        for step in range(arguments.steps):
            x, y = batch(step, arguments.batch)
            loss = nn.functional.mse_loss(model(x.chunk(ranks.world)[ranks.rank]), y.chunk(ranks.world)[ranks.rank])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            # Issue all, then wait for all: the ranks work on every gradient at once.
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            for handle in [ranks.all_reduce(g, g, op="mean") for g in gradients]:
                handle.wait()
            optimizer.step()
            if step % 50 == 0 or step == arguments.steps - 1:
                mean = ranks.all_reduce(loss.detach(), op="mean").wait()
                if ranks.rank == 0:
                    print(
                        f"step {step:4d}  loss {mean.item():.5f}  ({ranks.world} ranks, {ranks.transport})", flush=True
                    )


if __name__ == "__main__":
    main()
