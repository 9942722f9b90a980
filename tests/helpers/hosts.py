"""Hosts: played by labels on one machine, or in network namespaces."""

from __future__ import annotations

import os

import pytest

from sherd import comm
from sherd.errors import Unsupported
from sherd.testing import Hosts


def on_hosts(local, fn, *args):
    """`fn(*args)` where every `local` ranks play a host."""
    label = "abcdefgh"[int(os.environ["RANK"]) // local]
    connect = comm.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "connect", lambda options: connect(options.replace(host=label)))
        return fn(*args)


def hosts_or_skip(*args, **options):
    """Hosts in network namespaces; where none can be made, a skip."""
    try:
        return Hosts(*args, **options)
    except Unsupported as error:
        pytest.skip(str(error))
