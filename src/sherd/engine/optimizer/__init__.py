"""The user's optimizer, whole or in shards, and whether it may be sharded."""
