"""The c10d transport: over any process group of torch.distributed.

Read in this order: `communicator` (the operations), `slices` (how their data moves), `wire` (the process group that
carries it, and its `sockets`), `watchdog` (waiting).
"""
