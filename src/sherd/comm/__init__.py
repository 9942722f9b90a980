"""The communicator: one interface to every transport between ranks.

    from sherd import comm

    with comm.connect() as ranks:                 # solo, host, cluster or c10d: whatever suits these processes
        mean = ranks.all_reduce(gradient, op="mean").wait()

Read in this order: `base` (the interface), `handle`, `calls` (how a call is described and compared), `checked_call`
(what is checked before it is made), `flat`, `summation` (the order of sums), `codec`, `counters`; then the rooms that
the transports share, `trust`, `waiting` and `meeting`; then the transports `solo`, `host`, `c10d` and `cluster`; then
`connect`, which chooses one, and `neighbours` and `parcels`, for exchanges among a few; last `backend`, which makes
them a backend of torch.distributed.
"""

from __future__ import annotations

from sherd.comm.base import Backing, Communicator
from sherd.comm.c10d.communicator import C10dCommunicator
from sherd.comm.calls import labelled
from sherd.comm.cluster.communicator import ClusterCommunicator
from sherd.comm.codec import Cast, Codec
from sherd.comm.connect import connect
from sherd.comm.counters import Count, Counters
from sherd.comm.handle import Handle, Together
from sherd.comm.host.communicator import HostCommunicator
from sherd.comm.neighbours import Neighbours, Shown
from sherd.comm.solo import SoloCommunicator
from sherd.config import CommOptions
from sherd.errors import CodecFailed
from sherd.layout.tree import SummationTree

__all__ = [
    "Backing",
    "C10dCommunicator",
    "Cast",
    "ClusterCommunicator",
    "Codec",
    "CodecFailed",
    "CommOptions",
    "Communicator",
    "Count",
    "Counters",
    "Handle",
    "HostCommunicator",
    "Neighbours",
    "Shown",
    "SoloCommunicator",
    "SummationTree",
    "Together",
    "connect",
    "labelled",
]
