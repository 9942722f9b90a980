"""Asynchronous training from scratch: rank 0 keeps the weights, workers send it gradients, and nobody waits for a peer.

    sherd run -n 3 examples/from_scratch/async_update.py

The price is *staleness*: while a worker computes a gradient, others update the weights that it is for. A little of it
acts like momentum, too much makes training diverge. DDP and ZeRO have none, as all ranks wait for the mean.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from problem import batch, distance
from torch import Tensor

from sherd import comm

TRUTH = torch.arange(1.0, 16.0)  # the weights to be found


def gradient_of(weights: Tensor, step: int, rank: int) -> Tensor:
    """Of a linear model's squared error."""
    x, _ = batch(step, rank)
    return 2 * x.T @ (x @ (weights - TRUTH)) / len(x)


def serve(ranks: comm.Communicator, steps: int, lr: float) -> tuple[Tensor, Counter[int]]:
    """Rank 0: apply gradients in the order in which they arrive. The weights, and how often each staleness was seen."""
    weights, version, staleness = torch.zeros(15), 0, Counter[int]()
    read = dict.fromkeys(range(1, ranks.world), 0)  # which version each worker has
    left = dict.fromkeys(read, steps)
    mail = {worker: ranks.recv(torch.empty(15), worker) for worker in read}
    while mail:
        time.sleep(0)  # let workers have the core
        for worker in [worker for worker, message in mail.items() if message.done()]:
            weights -= lr * mail.pop(worker).wait()
            staleness[version - read[worker]] += 1
            version, left[worker] = version + 1, left[worker] - 1
            if left[worker]:
                ranks.send(weights.clone(), worker).wait()
                read[worker] = version
                mail[worker] = ranks.recv(torch.empty(15), worker)
    return weights, staleness


def work(ranks: comm.Communicator, steps: int, pause: float = 0.0) -> None:
    """The other ranks: the newest weights in, one gradient out."""
    weights = torch.zeros(15)
    for step in range(steps):
        time.sleep(pause * (ranks.rank - 1))  # the last worker is the slowest, and holds up nobody
        ranks.send(gradient_of(weights, step, ranks.rank), 0).wait()
        if step < steps - 1:
            ranks.recv(weights, 0).wait()


def delayed(staleness: int, steps: int, lr: float) -> Tensor:
    """The same in one process, exactly `staleness` updates late: what it does to learning, without the chance."""
    seen = [torch.zeros(15)]
    for step in range(steps):
        seen.append(seen[-1] - lr * gradient_of(seen[max(0, step - staleness)], step, rank=1))
    return seen[-1]


def main() -> None:
    with comm.connect() as ranks:
        if ranks.rank:
            work(ranks, steps=400, pause=0.001)
        else:
            weights, staleness = serve(ranks, steps=400, lr=0.01)
            print(f"{ranks.world - 1} workers: error {distance(weights, TRUTH):.3g}, by staleness {dict(staleness)}")
            for late in (0, 4, 16, 64):
                found = distance(delayed(late, 400, lr=0.01), TRUTH)
                print(f"in one process, every gradient {late:2d} updates late: error {found:.3g}")


if __name__ == "__main__":
    main()
