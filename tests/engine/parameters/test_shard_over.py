"""Parameters sharded inside groups of ranks, replicated across: the same bits, bytes and memory by the formulas."""

from __future__ import annotations

import contextlib
import copy
import os

import pytest
import torch
from torch import nn

import sherd
from sherd import ConfigError, RankFailed
from sherd.api.training import training_of
from sherd.engine.parameters.gathered import store as gathered_store
from sherd.engine.parameters.gathered.gathering import WINDOW
from sherd.engine.parameters.gathered.pages import DevicePages, resident_bytes
from tests.engine.parameters.test_gathered import LAYER, WAYS, WIDTH, both, deep, inputs
from tests.helpers.hosts import on_hosts
from tests.helpers.training import adamw, all_same, batch, connected, loss_of, network, sgd, weights


def options_of(world, transport):
    """Stages over every group, with and without shared memory. Stage 1 has the parameters where stage 2 has them, and
    over c10d there is no shared memory."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for stage in (2, 3):
        for shared in (True, False) if transport != "c10d" else (True,):
            for size in ("world", "host", *sizes):
                yield sherd.ZeRO(stage=stage, shard_over=size, share_host_memory=shared)


def store_of(model):
    return training_of(model).engine.store


def step(model, optimizer, data):
    loss_of(model, data).backward()
    optimizer.step()
    optimizer.zero_grad()


def every_option(transport, check_host):
    """Steps, an edit, a checkpoint and unfreezing under every option."""
    found, homes = {}, set()
    with connected(transport) as c:
        for strategy in ("ddp", *options_of(c.world, transport)):
            model = network()
            model[2].bias.requires_grad_(False)
            model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c, bucket_bytes=1024)
            homes.add(training_of(model).engine.policy.home.value)
            step(model, optimizer, batch(c.rank, 0))
            with sherd.full_parameters(model):
                model[0].weight.data.mul_(0.5)
            model[2].bias.requires_grad_()
            step(model, optimizer, batch(c.rank, 1))
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            moments = copy.deepcopy(optimizer.state_dict())
            step(model, optimizer, batch(c.rank, 2))
            model.load_state_dict(saved)
            optimizer.load_state_dict(moments)
            step(model, optimizer, batch(c.rank, 3))
            found[str(strategy)] = weights(model)
        assert c.ranks_per_host == check_host
    all_same(found)
    return homes


@pytest.mark.parametrize(
    ("transport", "world", "local", "homes"),
    [
        ("cluster", 4, 2, {"host", "private", "gathered", "gathered by host"}),
        ("c10d", 4, 2, {"private", "gathered"}),
        ("host", 3, 3, {"host", "private", "gathered"}),
    ],
)
def test_every_group_trains_the_same_bits(ranks, transport, world, local, homes):
    for found in ranks(world).run(on_hosts, local, every_option, transport, local):
        assert found == homes


def groups_of_hosts():
    """Four hosts in groups of two: a copy of the parameters for each two hosts, gathered once on each of them."""
    with connected("cluster") as c:
        strategy = sherd.ZeRO(stage=3, shard_over=4)
        all_same(both(c, *WAYS["wandering"], gathered=strategy))
        model = sherd.distribute(network(), strategy=strategy, comm=c)
        mesh = training_of(model).engine.mesh
        return (mesh.shard.transport, mesh.shard.world), (mesh.replicate.transport, mesh.replicate.world)


def test_groups_of_hosts(ranks):
    for shard, replicate in ranks(8).run(on_hosts, 2, groups_of_hosts):
        assert (shard, replicate) == (("cluster", 4), ("c10d", 2))


# -------------------------------------------------------------------- once per host, and on devices


def ways(names):
    with connected("cluster") as c:
        for name in names:
            all_same(both(c, *WAYS[name], gathered="zero3"))


# What keeps parameters gathered in each of the ways that there are; the others differ in who keeps them.
def test_ways_through_a_model_that_is_gathered_once_per_host(ranks):
    ranks(4).run(on_hosts, 2, ways, ["wandering", "tied", "reentrant", "one node", "penalised"])


@pytest.mark.fuzz
def test_all_ways_through_a_model_that_is_gathered_once_per_host(ranks):
    ranks(4).run(on_hosts, 2, ways, list(WAYS))


def ways_on_a_device(names):
    """As on an accelerator, where memory is not kept at one address, through the same calls."""
    with pytest.MonkeyPatch.context() as patch, connected() as c:
        patch.setattr(gathered_store, "make_pages", DevicePages)
        for name in names:
            all_same(both(c, *WAYS[name]))


def test_every_way_through_a_model_on_a_device(ranks):
    ranks(2).run(ways_on_a_device, list(WAYS))


def held_once():
    """Buckets in memory, seen from every rank around every layer; what its rank keeps; its host; all padded bytes."""
    with connected("cluster") as c:
        model = deep()
        model, optimizer = sherd.distribute(model, adamw(model), strategy="zero3", comm=c, bucket_bytes=LAYER)
        store, seen = store_of(model), []
        kept = [bucket.values.whole for bucket in training_of(model).engine.buckets.every]
        for layer in model:
            layer.register_forward_hook(lambda *_: seen.append([resident_bytes(each) > 0 for each in kept]))
            layer[0].weight.register_hook(lambda _: seen.append([resident_bytes(each) > 0 for each in kept]))
        for number in range(3):
            model(inputs(number, 4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = [store.bytes(), store.gathered_bytes() if c.host.rank == 0 else None, len(store.gathering.gathered)]
        return [sum(each) for each in seen], kept, training_of(model).engine.layout.padded_numel * 4


def test_a_host_keeps_its_share_and_the_window(ranks):
    for seen, kept, padded in ranks(4).run(on_hosts, 2, held_once):
        room = WINDOW * 2 * 4096  # each of these buckets takes two pages
        assert kept[0] == padded // 4
        assert kept[1] in (None, room)
        assert kept[2] == 0  # nothing is gathered after a step
        assert max(seen) == WINDOW


class Mixed(nn.Module):
    """Dtypes that share no bucket, of which one has no elements."""

    def __init__(self):
        super().__init__()
        self.wide, self.plain = nn.Linear(15, 7, dtype=torch.float64), nn.Linear(7, 5)
        self.empty = nn.Parameter(torch.empty(0, 8, dtype=torch.bfloat16))

    def forward(self, x):
        return self.plain(self.wide(x.double()).float()) + self.empty.sum()


def mixed():
    torch.manual_seed(0)
    return Mixed()


def mixtures():
    with connected("cluster") as c:
        all_same(both(c, mixed, lambda model, number: loss_of(model, batch(c.rank, number)), gathered="zero3"))


def test_dtypes_and_parameters_without_elements(ranks):
    ranks(4).run(on_hosts, 2, mixtures)


def forked():
    with connected("cluster") as c:
        model = network()
        model, _ = sherd.distribute(model, sgd(model), strategy="zero3", comm=c)
        model(torch.zeros(1, 15))
        c.barrier().wait()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                try:
                    model[0].weight.sum()
                except sherd.SherdError as error:
                    os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_does_not_read_what_ranks_gather(ranks):
    assert ranks(4).run(on_hosts, 2, forked) == [0] * 4


def reads_alone(victim):
    with connected("cluster", timeout=15.0) as c:
        model = deep()
        model, optimizer = sherd.distribute(model, adamw(model), strategy="zero3", comm=c, bucket_bytes=LAYER)
        layers = list(model)
        for number in range(4):
            x = inputs(number, 4, WIDTH)
            for index, layer in enumerate(layers):
                x = layer(x)
                if number == 2 and index == 5 and c.rank == victim:
                    layers[4][0].weight.sum()  # it is still there, and is kept longer than on the other ranks
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_uses_a_layer_alone_is_named_and_nobody_reads_what_is_gone(ranks, victim):
    with pytest.raises(RankFailed, match="Diverged") as caught:
        ranks(4).run(on_hosts, 2, reads_alone, victim)
    assert "into shared tensor" in str(caught.value)


def edits_in_place():
    """Edits that leave no version to go by, where a host gathers together."""
    with connected("cluster", timeout=15.0) as c:
        found = {}
        for strategy in ("ddp", "zero3"):
            model = network()
            model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c)
            for number in range(3):
                step(model, optimizer, batch(c.rank, number))
                model[0].weight.data.mul_(0.5)
                model[2].bias.data.untyped_storage()  # who has it can write without a call of torch
            found[strategy] = weights(model)
        all_same(found)
        if c.rank == 2:
            model[0].weight.data[0] += 1.0
        with pytest.raises(sherd.Diverged, match=r"'0\.weight' was edited differently on rank 0 and rank 2"):
            step(model, optimizer, batch(c.rank, 9))


def test_an_edit_of_what_the_ranks_of_a_host_gather_together_stays_a_ranks_own(ranks):
    ranks(4).run(on_hosts, 2, edits_in_place)


# -------------------------------------------------------------------- bytes


def sent(transport, strategy):
    with connected(transport) as c:
        model = deep()
        model, optimizer = sherd.distribute(model, adamw(model), strategy=strategy, comm=c, bucket_bytes=LAYER)
        for number in range(3):
            c.counters.reset()
            loss = model(inputs(number, 4, WIDTH).requires_grad_()).square().mean()
            store = store_of(model)
            if not store.whole:
                store.gathering.drop(store.gathering.gathered)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return c.counters.total().payload, training_of(model).engine.layout.padded_numel * 4


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_of_a_step_over_a_flat_transport(ranks, stage, size):
    world = 4
    strategy = sherd.ZeRO(stage=stage, shard_over=size, share_host_memory=False)
    for payload, padded in ranks(world).run(sent, "c10d", strategy):
        reduced = padded * (world - 1) // world
        between = padded * (world // size - 1) // world  # each slice once to every other group
        inside = padded * (size - 1) // size
        assert payload == reduced + between + inside * (2 if stage == 3 else 1)


@pytest.mark.parametrize(("size", "times"), [("world", 3), ("host", 2)])
def test_bytes_of_a_step_between_hosts(ranks, size, times):
    hosts, local = 2, 2
    for payload, padded in ranks(4).run(on_hosts, local, sent, "cluster", sherd.ZeRO(stage=3, shard_over=size)):
        assert payload == times * padded * (hosts - 1) // hosts // local


# -------------------------------------------------------------------- what is refused


def refused(transport, shard_over):
    with connected(transport) as c:
        model = network()
        sherd.distribute(model, sgd(model), strategy=sherd.ZeRO(stage=3, shard_over=shard_over), comm=c)


def test_groups_that_do_not_fit(ranks):
    for wrong, words in ((0, "at least 1"), ("hots", "host"), (True, "type")):
        with pytest.raises(ConfigError, match=words):
            sherd.ZeRO(shard_over=wrong)
    with pytest.raises(RankFailed, match="divides the 3 ranks"):
        ranks(3).run(refused, "host", 2)
    with pytest.raises(RankFailed, match="as many consecutive ranks"):
        ranks(3).run(on_hosts, 2, refused, "c10d", "host")
