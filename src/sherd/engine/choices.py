"""What a strategy chooses for the engine to act on."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Parameters(enum.Enum):
    """Where parameters live."""

    REPLICAS = "replicas"
    """every rank has all of them and updates all of them"""
    PRIVATE = "private"
    """every rank has all of them; owners update their slices and ranks gather them"""
    GATHERED = "gathered"
    """every rank has its slices; buckets are gathered when they are used and released again"""
    GATHERED_BY_HOST = "gathered by host"
    """the same, but the ranks of a host gather a bucket together, once, into memory that they share"""
    HOST = "host"
    """the ranks of a host share one copy; owners update their slices in place"""


class Gradients(enum.Enum):
    """What a rank keeps of the gradient."""

    REPLICAS = "replicas"
    """all of it: its own, which becomes the sum over all ranks"""
    WHOLE = "whole"
    """its own whole gradient, which also holds the sum of the slices that it owns"""
    SLICES = "slices"
    """only the sum of the slices that it owns"""


class AccumulateAt(enum.Enum):
    """Where the gradients of several backwards are added up."""

    RANK = "rank"
    """on the rank that computed them: ranks exchange once per step"""
    OWNER = "owner"
    """where the sum is kept: ranks exchange after every backward"""


@dataclass(frozen=True)
class Choices:
    """What a strategy chose."""

    parameters: Parameters
    gradients: Gradients
    accumulate_at: AccumulateAt
    shard_over: int
    """number of ranks in a group that shards the parameters; every group has a copy"""
