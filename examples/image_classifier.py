"""A convolutional network that reads handwritten digits, on any number of ranks.

    sherd run -n 2 examples/image_classifier.py --strategy zero3

`image_classifier_plain.py` is the same script for one process, with the same curve; `diff` them.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import sherd


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        # Not BatchNorm: its statistics are those of the rows that a rank has, so half a batch gives another curve.
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(functional.relu(self.norm1(x)))
        return x + self.conv2(functional.relu(self.norm2(hidden)))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    def __init__(self, channels: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(channels), Residual(channels))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean(dim=(2, 3))))  # type: ignore[no-any-return]


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Images of 8 x 8 to learn from, and every fifth to be judged by."""
    found = load_digits()
    images = torch.as_tensor(found.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    labels = torch.as_tensor(found.target)
    held_out = torch.arange(len(images)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def decayed(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Two groups: weights decay, biases and the scales of norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def warm_up_then_cosine(step: int, warm_up: int, total: int) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, total - warm_up))))


@torch.no_grad()
def judged(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """The loss on these images, and how many of them are read rightly."""
    model.eval()
    output = model(images)
    model.train()
    right = (output.argmax(dim=1) == labels).double().mean()
    return functional.cross_entropy(output, labels).item(), right.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--patience", type=int, default=4, help="epochs without a better result until it stops")
    parser.add_argument("--strategy", default="zero2", help="ddp, zero1, zero2 or zero3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_default_dtype(getattr(torch, args.dtype))
    learned, held_out = digits()
    data = DataLoader(learned, batch_size=args.batch, shuffle=True)
    model = Classifier()
    optimizer = torch.optim.AdamW(decayed(model, 0.05), lr=args.lr)
    model, optimizer, data = sherd.distribute(model, optimizer, data, global_batch=args.batch, strategy=args.strategy)
    steps = len(data)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, steps, steps * args.epochs)
    )
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # type: ignore[no-untyped-call]

    best, since = 0.0, 0
    for epoch in range(1, args.epochs + 1):
        for images, labels in data:
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            averaged.update_parameters(model)
        held_out_loss, right = judged(averaged, *held_out)
        best, since = (right, 0) if right > best else (best, since + 1)
        lr = schedule.get_last_lr()[0]
        if os.environ.get("RANK", "0") == "0":  # under a launcher, one process speaks for all
            print(f"epoch {epoch:2d}  held out {held_out_loss:.3f}  right {right:.3f}  norm {norm:.2f}  lr {lr:.5f}")
        if since == args.patience:  # no better for so many epochs
            break


if __name__ == "__main__":
    main()
