"""Your first script: digits are read, with everything that a script has around its loop. docs/first-script.md walks
through it.

    python examples/first_script.py
    sherd run -n 2 examples/first_script.py --strategy zero3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import sherd


def digits() -> TensorDataset:
    found = load_digits()
    images = torch.as_tensor(found.images, dtype=torch.get_default_dtype()).flatten(1) / 16
    return TensorDataset(images, torch.as_tensor(found.target))


@torch.no_grad()
def judged(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> tuple[float, float, int]:
    """Loss and accuracy over all samples of all ranks, and how many these are."""
    model.eval()
    loss, right, seen = 0.0, 0, 0
    for x, y in loader:
        output, labels = sherd.gather((model(x), y))  # of all ranks, each sample once
        loss += functional.cross_entropy(output, labels, reduction="sum").item()
        right += int((output.argmax(1) == labels).sum())
        seen += len(labels)
    model.train()
    return loss / seen, right / seen, seen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", help="ddp, zero1, zero2 or zero3; default: that of sherd run, else zero2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=96, help="samples per step, on all ranks together")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--checkpoint", type=Path, help="a file to go on from if it is there, and to save to")
    parser.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard")
    return parser.parse_args()


def main() -> None:
    args = arguments()

    # 1. The same on every rank: seeds, data, model.
    sherd.seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    with sherd.main_first():  # the place for a download: one rank of each host fetches, the others find it there
        data = digits()
    train_set, test_set = random_split(data, [1501, len(data) - 1501], torch.Generator().manual_seed(0))
    train = DataLoader(train_set, batch_size=args.batch, shuffle=True)
    test = DataLoader(test_set, batch_size=32)
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # 2. The one line.
    model, optimizer, train, test = sherd.distribute(
        model, optimizer, train, test, strategy=args.strategy, global_batch=args.batch
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))

    # 3. Load: every rank reads the file.
    first = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"]
        sherd.print(f"goes on after epoch {first} of {args.checkpoint.name}")

    # 4. Log once: a writer on the main rank.
    writer = None
    if args.tensorboard and sherd.is_main():
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(args.tensorboard))

    for epoch in range(first + 1, args.epochs + 1):
        total, samples = 0.0, 0
        for x, y in sherd.progress(train, desc=f"epoch {epoch}"):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step_samples = len(sherd.gather(y))  # of all ranks, each sample once
            total += sherd.mean(loss.item()) * step_samples
            samples += step_samples
        test_loss, accuracy, seen = judged(model, test)
        sherd.print(
            f"epoch {epoch}  loss {total / samples:.9f} of {samples}  test {test_loss:.9f}  "
            f"accuracy {accuracy:.9f} of {seen}"
        )
        if writer is not None:
            writer.add_scalar("loss/train", total / samples, epoch)
            writer.add_scalar("accuracy", accuracy, epoch)

        # 5. Save: all ranks put the state together, one writes it.
        if args.checkpoint:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "epoch": epoch,
            }
            if sherd.is_main():
                torch.save(state, args.checkpoint)
            sherd.barrier()  # nobody goes on before the file is there
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    main()
