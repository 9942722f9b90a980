"""What must be the same on every rank, and how a difference is found and named."""
