"""Training on several hosts: the bits of the flat transport with the same summation tree, the bytes of the formula."""

from __future__ import annotations

import pytest
import torch

import sherd
from sherd import CommOptions, comm
from sherd.api.training import training_of
from tests.helpers.hosts import on_hosts
from tests.helpers.parity_models import adamw, batch, build, loss_of
from tests.helpers.training import STRATEGIES, all_same, same

STEPS = 3


def trained(transport, group, model="transformer"):
    """Weights and optimizer state by strategy, after some steps, an edit and a checkpoint in between."""
    found = {}
    with comm.connect(CommOptions(transport=transport, group=group, timeout=40.0)) as c:
        for strategy in STRATEGIES:
            network = build(model)
            optimizer = adamw(network)
            sherd.distribute(network, optimizer, strategy=strategy, comm=c, clip_norm=0.5, bucket_bytes=8192)
            for step in range(STEPS):
                loss_of(network, *batch(network, step, c.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    with sherd.full_parameters(network):
                        next(network.parameters()).data.mul_(0.5)
                    network.load_state_dict({name: value.clone() for name, value in network.state_dict().items()})
            state = optimizer.state_dict()["state"]
            moments = {f"moment {index}": values["exp_avg"] for index, values in state.items()}
            found[strategy] = {**{name: p.detach().clone() for name, p in network.named_parameters()}, **moments}
    all_same(found)
    return found["ddp"]


@pytest.mark.parametrize(("count", "local"), [(2, 2), (3, 1)])
def test_hosts_by_label_train_the_bits_of_the_flat_transport(ranks, count, local):
    pool = ranks(count * local)
    across = pool.run(on_hosts, local, trained, "cluster", local)
    flat = pool.run(on_hosts, local, trained, "c10d", local)
    for found in (*across, *flat):
        same(found, flat[0])


def test_hosts_with_cables_train_the_bits_of_the_flat_transport(hosts):
    across = hosts(2, 2).run(trained, "cluster", 2)
    flat = hosts(2, 2).run(trained, "c10d", 2)
    apart = hosts(4, 1).run(trained, "c10d", 2)
    for found in (*across, *flat, *apart):
        same(found, flat[0])


def sent(strategy):
    """Payload of a step that leaves this rank's host, by the communicator's count, and what the formula says of it."""
    with comm.connect(CommOptions(transport="cluster", timeout=40.0)) as c:
        model = build("transformer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sherd.distribute(model, optimizer, strategy=strategy, comm=c)
        payloads = []
        for step in range(3):
            before = c.counters.total().payload
            loss_of(model, *batch(model, step, c.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            payloads.append(c.counters.total().payload - before)
        return payloads[-1], training_of(model).engine.layout.padded_numel * 4, c.host.world, c.world


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_only_slices_leave_a_host_each_once(ranks, strategy):
    results = ranks(4).run(on_hosts, 2, sent, strategy)
    for payload, whole, local, world in results:
        hosts = world // local
        # Gradients, then weights: each of the two is P(H-1)/H per host, spread evenly over its ranks.
        assert payload == 2 * whole * (hosts - 1) // hosts // local, (payload, whole)
