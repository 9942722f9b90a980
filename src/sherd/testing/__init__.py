"""Run a function on several ranks inside a test, and see every rank's failure.

    from sherd.testing import run_ranks

    def total():                                   # at module level: every rank imports it
        dist.init_process_group("gloo")
        x = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(x)
        return x

    def test_total():
        assert run_ranks(total, 4) == [6.0] * 4    # one result per rank, in rank order

- `run_ranks` starts new processes for one call, in about 50 ms; `RankPool` keeps them for many calls of about 5 ms each
  (a session-scoped fixture is a good place for it; idle ranks cost only memory).
- Ranks find RANK, WORLD_SIZE, MASTER_PORT and the rest in their environment, as under torchrun.
- A failing rank raises `sherd.errors.RankFailed` with every failing rank's traceback. Ranks that do not finish raise
  `RanksTimedOut`, a `RankFailed` with every rank's Python stack.
- `Hosts` puts them on several hosts, simulated by network namespaces, with links that can be cut, slowed and measured.
- A test that kills ranks on purpose lists them in `expected_exits` and gets `Died` as their results.

A *run* is one function on every rank. Ranks are forked by multiprocessing's *fork server*, which has imported torch.
"""

from __future__ import annotations

from sherd.ranks.watch import Died, RanksTimedOut
from sherd.testing.fake import FakeCommunicator
from sherd.testing.hosts import Host, Hosts
from sherd.testing.pool import RankPool
from sherd.testing.ranks import run_ranks

__all__ = ["Died", "FakeCommunicator", "Host", "Hosts", "RankPool", "RanksTimedOut", "run_ranks"]
