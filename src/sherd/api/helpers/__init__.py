"""What a script needs around its training loop.

`process` (rank, world, and the communicator that helpers use), `coordination`, `metrics`, `seeding`, `bars` and `log`.
"""
