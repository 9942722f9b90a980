"""What ranks compare of the changes that their programs make to gradients."""

from __future__ import annotations

import zlib

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.groups import Ranks


class Seen(dict[Ranks, int]):
    """By group of ranks: a hash below 2**20 of the gradients that were changed, and how."""

    def note(self, bucket: Bucket, what: object) -> None:
        """Add a change of a bucket."""
        self[bucket.ranks] = zlib.crc32(f"{self.get(bucket.ranks, 0)} {what}".encode()) >> 12
