"""Optimizers and learning rates for large batches."""

from sherd.optim.lamb import LAMB
from sherd.optim.lars import LARS
from sherd.optim.rates import Warmup, scaled_lr, warmup

__all__ = ["LAMB", "LARS", "Warmup", "scaled_lr", "warmup"]
