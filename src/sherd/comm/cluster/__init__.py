"""The cluster transport: shared memory inside a host, torch.distributed across.

Rank r = h * L + l is the l-th of the L ranks of host h. Ranks with the same l are a *column*: only the ranks of a
column exchange data over the network, so each host sends and receives every slice once.

Read in this order: `communicator` (the operations), `pipeline` (the order of their phases), `crossing` (the phase on
the network).
"""
