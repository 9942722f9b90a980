"""The c10d transport: over any process group of torch.distributed.

Read in this order: `communicator` (the operations), `slices` (how their data moves), `operations` (those under way),
`wire` (the process group that carries the bytes, and its `sockets`), `watchdog` (waiting)
and `activity` (what every rank last did).
"""
