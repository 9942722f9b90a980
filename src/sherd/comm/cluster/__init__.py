"""The cluster transport: shared memory inside a host, torch.distributed across.

Rank r = h * L + l is the l-th of the L ranks of host h. Ranks with the same l are a *column*: what crosses the network
goes between the ranks of a column, so that each host sends and receives every slice once.

Read in this order: `communicator` (the operations), `across` (how slices cross), `pipeline` (their order).
"""
