"""What must be the same on every rank, and the errors that name a difference."""
