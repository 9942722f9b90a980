"""Models of 16 bits for the tests of casting."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sherd.engine.modules.casting import Casting, kept_modules
from sherd.engine.modules.casting.calls import call_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def lowered(model, keep=None, dtype=BF16):
    """The model with parameters of 16 bits and hooks, as `sherd.distribute` makes it; returns its `Casting` too."""
    kept = kept_modules([model], keep)
    for parameter in model.parameters():
        if parameter not in kept.parameters:
            parameter.data = parameter.data.to(dtype)
    casting = Casting([model], dtype, kept)
    casting.install()
    return model, casting


def cast_model(model, keep=None, dtype=BF16):
    """The model alone."""
    return lowered(model, keep, dtype)[0]


def seen(model):
    """The dtypes in which each module's forward is given its first tensor and returns it; filled by calls."""
    found = {}
    for name, module in model.named_modules():
        call = call_of(module)  # what is inside of it is given cast inputs

        def forward(*args, _original=call.__wrapped__ if call else module.forward, _name=name, **options):
            given = [x.dtype for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
            output = _original(*args, **options)
            returned = output.dtype if isinstance(output, torch.Tensor) else None
            found[_name] = (given[0] if given else None, returned)
            return output

        if call is None:
            module.forward = forward
        else:
            call._replaced = forward
    return found


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.second, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """A transformer with tied embeddings and an fp32 buffer that promotes; it returns a dict with loss and logits."""

    def __init__(self, width=8, words=11):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(16, width))
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(words))

    def forward(self, ids, targets=None):
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else self.criterion(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "logits": logits}

    def generate(self, ids, steps=3):
        """Calls itself in a loop, and a part of itself."""
        for _ in range(steps):
            self.dtypes = self(ids)["logits"].dtype, self.norm(torch.randn(2, 8)).dtype
            ids = torch.cat([ids, self(ids)["logits"][:, -1:].argmax(-1)], 1)
        return ids


def softmax_loss(output):
    return functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))
