"""Teams that are hosts: what crosses goes over the network, and the rest through memory."""

from __future__ import annotations

import pytest

import sherd
from sherd.api.training import training_of
from tests.helpers.averaging import Worlds, close_to, run
from tests.helpers.training import connected
from tests.strategies.test_diloco import outer


def over_hosts():
    with connected("cluster") as c:
        found = []
        for fragments, delay in ((1, 0), (2, 2)):
            strategy = sherd.DiLoCo(every=6, over="hosts", fragments=fragments, delay=delay)
            model, _, seen = run(c, strategy, steps=14)
            teams = training_of(model).engine.teams
            found.append((teams.team.transport, teams.across.transport, list(teams.team.numbers), seen))
        return found


@pytest.mark.hosts
def test_diloco_over_hosts(hosts):
    by_rank = hosts(2, 2).run(over_hosts)
    for case, (fragments, delay) in enumerate(((1, 0), (2, 2))):
        kinds, seen = [found[case][:3] for found in by_rank], [found[case][3] for found in by_rank]
        assert kinds == [("host", "c10d", [0, 1])] * 2 + [("host", "c10d", [2, 3])] * 2
        close_to(seen, outer(Worlds(2, 2), every=6, fragments=fragments, delay=delay, steps=14), size=2)
