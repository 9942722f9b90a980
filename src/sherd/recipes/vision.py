"""ResNet-18 or ResNet-50 that classifies images: Fashion-MNIST, handwritten digits, or your own folder.

    sherd train vision                              # as many ranks as cores, a live display, a report
    sherd train vision --images photos --size 96    # a folder with a folder per class
    python vision.py --model resnet50               # a copy of this file, on one process

Fashion-MNIST is Debian's package dataset-fashion-mnist; without it, the digits that come with scikit-learn are used.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

import sherd

FASHION = Path("/usr/share/datasets/fashion-mnist")
TRIED = 20  # images of each class that are read at the start, to find errors early
LARGE = 64  # pixels from which the network starts as for photographs, at a quarter of the resolution


class Residual(nn.Module):
    """Convolutions, each given by its width, kernel and stride, with a shortcut."""

    def __init__(self, channels: int, layers: list[tuple[int, int, int]]) -> None:
        super().__init__()
        width, stride = layers[-1][0], max(stride for *_, stride in layers)
        whole = (channels, stride) == (width, 1)
        self.short = nn.Identity() if whole else nn.Sequential(*convolution(channels, width, 1, stride))
        self.layers = nn.Sequential()
        for width, kernel, stride in layers:
            self.layers.extend([nn.ReLU()] * bool(len(self.layers)))
            self.layers.extend(convolution(channels, width, kernel, stride))
            channels = width

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.short(x) + self.layers(x))


def basic(width: int, stride: int) -> list[tuple[int, int, int]]:
    return [(width, 3, stride), (width, 3, 1)]


def bottleneck(width: int, stride: int) -> list[tuple[int, int, int]]:
    return [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]


def convolution(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    layer = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer, nn.BatchNorm2d(width)


class ResNet(nn.Module):
    def __init__(self, name: str, channels: int, classes: int, large: bool, width: int = 64) -> None:
        super().__init__()
        block, depths = MODELS[name]
        layers: list[nn.Module] = [*convolution(channels, width, 7 if large else 3, 2 if large else 1), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2, padding=1)] * large
        channels = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                inner = block(width << stage, 2 if stage and not number else 1)
                layers.append(Residual(channels, inner))
                channels = inner[-1][0]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


MODELS = {"resnet18": (basic, (2, 2, 2, 2)), "resnet50": (bottleneck, (3, 4, 6, 3))}


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory: bytes of (number, channels, height, width)."""

    def __init__(self, images: Tensor, labels: Tensor, size: int | None, classes: int) -> None:
        self.images, self.labels, self.classes = images, labels.tolist(), classes
        self.channels, self.size = images.shape[1], size or images.shape[-1]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].float() / 255
        if self.size != image.shape[-1]:
            image = functional.interpolate(image[None], (self.size, self.size), mode="bilinear")[0]
        return (image - 0.5) / 0.5, self.labels[index]


class Folder(Dataset[tuple[Tensor, int]]):
    """Image files, opened when they are needed."""

    channels = 3

    def __init__(self, files: list[tuple[Path, int]], size: int, classes: int, opener: Any) -> None:
        self.files, self.size, self.classes, self.opener = files, size, classes, opener

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        try:
            image = self.opener(file).convert("RGB").resize((self.size, self.size))
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for broken files
            why = f"--images: {file} cannot be read as an image ({error})"
            raise sherd.ConfigError(f"{why}; remove it from the folder") from None
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return (pixels.view(self.size, self.size, 3).permute(2, 0, 1) / 255 - 0.5) / 0.5, label


Data = Images | Folder


def folder(where: Path, size: int) -> tuple[Folder, Folder]:
    """Training images, and every tenth of each class held out."""
    if not where.is_dir():
        raise sherd.ConfigError(f"--images {where}: there is no such directory; write one that has a folder per class")
    try:
        opener = importlib.import_module("PIL.Image")
    except ImportError:
        raise sherd.ConfigError("--images needs Pillow to read images: pip install pillow") from None
    known = opener.registered_extensions()
    classes = sorted(each for each in where.iterdir() if each.is_dir())
    learned: list[tuple[Path, int]] = []
    held_out: list[tuple[Path, int]] = []
    for label, each in enumerate(classes):
        for number, file in enumerate(sorted(file for file in each.rglob("*") if file.suffix.lower() in known)):
            (held_out if number % 10 == 0 else learned).append((file, label))
            if number < TRIED:
                Folder([(file, label)], size, len(classes), opener.open)[0]
    if len(classes) < 2 or not learned:
        raise sherd.ConfigError(
            f"--images {where}: found {len(classes)} folders and {len(learned) + len(held_out)} images in them; "
            f"expected a folder per class, two or more, with two or more images each"
        )
    return Folder(learned, size, len(classes), opener.open), Folder(held_out, size, len(classes), opener.open)


def fashion(part: str, size: int | None) -> Images:
    images = gzip.decompress((FASHION / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((FASHION / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 1, 28, 28)
    return Images(pixels, torch.frombuffer(bytearray(labels), dtype=torch.uint8), size, classes=10)


def digits(size: int | None) -> tuple[Images, Images]:
    """Training images of 8 x 8, and every fifth held out."""
    try:
        found = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise sherd.ConfigError(
            "there are no images here: apt-get install dataset-fashion-mnist, or pip install scikit-learn for "
            "handwritten digits, or --images DIR"
        ) from None
    pixels = (torch.as_tensor(found.images).unsqueeze(1) * (255 / 16)).byte()
    labels = torch.as_tensor(found.target)
    judges = torch.arange(len(labels)) % 5 == 0
    learned, held_out = (Images(pixels[chosen], labels[chosen], size, classes=10) for chosen in (~judges, judges))
    return learned, held_out


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """The fraction of images classified correctly: each counts once, however they are dealt to the ranks."""
    model.eval()
    right = torch.cat([(model(x).argmax(dim=1) == y).float() for x, y in loader])
    model.train()
    return sherd.gather(right, loader=loader).mean().item()  # type: ignore[no-any-return]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = options.add_argument
    add(
        "--strategy",
        metavar="NAME",
        help="ddp, zero1, zero2, zero3, local-sgd, diloco or gossip (default: zero3 in sherd train, else that of sherd "
        "run, or zero2)",
    )
    add(
        "--precision",
        default="fp32",
        metavar="NAME",
        help="fp32, bf16 or fp16, with fp32 masters, or bf16-autocast (default: %(default)s)",
    )
    add("--model", choices=MODELS, default="resnet18", help="(default: %(default)s)")
    add(
        "--width",
        type=int,
        default=16,
        help="channels of the first stage; 64 is the usual network (default: %(default)s)",
    )
    add("--steps", type=int, default=900, help="updates of the model (default: %(default)s)")
    add("--images", type=Path, metavar="DIR", help="a folder with a folder per class")
    add(
        "--size",
        type=int,
        metavar="PIXELS",
        help="of images when they are trained on (default: as they are; --images: 64)",
    )
    add("--batch", type=int, default=32, help="images per rank and step (default: %(default)s)")
    add("--workers", type=int, default=0, help="processes per rank that load images (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="the highest learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    add("--every", type=int, default=150, help="print the held-out accuracy after so many steps (default: %(default)s)")
    add(
        "--judges",
        type=int,
        default=2000,
        metavar="IMAGES",
        help="how many held-out images that accuracy is taken over, at most (default: %(default)s)",
    )
    return options


def check(arguments: argparse.Namespace, world: int) -> tuple[Data, Data]:
    """Training and held-out images; `ConfigError` for what cannot work on that many ranks."""
    if arguments.strategy is not None:
        sherd.strategies.resolve(arguments.strategy)
    sherd.StepOptions(precision=arguments.precision)  # refuses what is none
    for name in ("width", "steps", "size", "batch", "lr", "every", "judges"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise sherd.ConfigError(f"--{name} {value}: expected more than 0")
    if arguments.workers < 0:
        raise sherd.ConfigError(f"--workers {arguments.workers}: expected 0 or more")
    learned: Data
    held_out: Data
    if arguments.images is not None:
        learned, held_out = folder(arguments.images, arguments.size or LARGE)
    elif FASHION.is_dir():
        learned, held_out = fashion("train", arguments.size), fashion("t10k", arguments.size)
    else:
        learned, held_out = digits(arguments.size)
    batch = arguments.batch * world
    if len(learned) < batch:
        raise sherd.ConfigError(
            f"there are {len(learned)} training images, but a step takes {batch}: write a smaller --batch"
        )
    return learned, held_out


def warm_up_then_cosine(step: int, steps: int) -> float:
    return min(1.0, 20 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def train(arguments: argparse.Namespace, learned: Data, held_out: Data) -> None:
    sherd.seed(arguments.seed)
    sherd.observe.expect(arguments.steps)
    model = ResNet(arguments.model, learned.channels, learned.classes, learned.size >= LARGE, arguments.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, arguments.steps))
    some = range(0, len(held_out), math.ceil(len(held_out) / arguments.judges))
    loader = DataLoader(learned, arguments.batch, shuffle=True, drop_last=True, num_workers=arguments.workers)
    judges = DataLoader(Subset(held_out, some), 2 * arguments.batch, num_workers=arguments.workers)
    model, optimizer, loader, judges = sherd.distribute(
        model, optimizer, loader, judges, strategy=arguments.strategy, precision=arguments.precision
    )
    sherd.print(sherd.describe(model))
    sherd.print(f"{len(learned):,} images of {learned.size} x {learned.size} to train on, {len(some):,} held out")

    for step, (x, y) in zip(range(1, arguments.steps + 1), forever(loader), strict=False):
        guesses = model(x)
        loss = functional.cross_entropy(guesses, y, label_smoothing=0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        sherd.log(loss=loss, accuracy=(guesses.argmax(dim=1) == y).float().mean())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % arguments.every == 0 or step == arguments.steps:
            with sherd.consensus(model):  # where ranks differ between exchanges, that of all of them is judged
                right = accuracy(model, judges)
            sherd.log(held_out_accuracy=right)
            sherd.print(f"step {step:5d}  held-out accuracy {right:.1%}")


def main() -> None:
    arguments = parser().parse_args()
    try:
        learned, held_out = check(arguments, sherd.world())
    except sherd.ConfigError as error:
        sherd.print(f"vision: {error}", file=sys.stderr)
        sherd.barrier()  # or a rank could exit, which ends the others, before rank 0 has printed
        sys.exit(2)
    try:
        train(arguments, learned, held_out)
    except sherd.ConfigError as error:  # a broken image that one rank finds during the run
        sys.exit(f"vision: {error}")


if __name__ == "__main__":
    main()
