"""Optimizer shards against the plain optimizer of torch over whole parameters, bit for bit."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from sherd import CommOptions, comm
from sherd.engine.optimizer.shard import CHUNK_NUMEL
from sherd.errors import ConfigError
from tests.engine.optimizer.owners import (
    ADAMW,
    CASES,
    CUTS,
    FOREACH,
    FUSED,
    LOOP,
    NAMES,
    SGD_ALL,
    SHAPES,
    Owners,
    Plain,
    assert_same,
    bearable,
    load,
    new_parameters,
    run,
)

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@settings(max_examples=8, deadline=None)
@given(
    shapes=SHAPES, world=st.integers(1, 4), cut=CUTS, unused=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)))
)
def test_steps_and_state_are_those_of_the_plain_optimizer(case, shapes, world, cut, unused):
    parameters = new_parameters(shapes)
    plain, owners = Plain(case, parameters), Owners(case, parameters, world, cut)
    run([plain, owners], shapes, 0, 4, bearable(case, unused))
    assert_same(owners.state_dict(), plain.state_dict())
    assert not any(optimizer.state for optimizer in owners.optimizers())


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@settings(max_examples=4, deadline=None)
@given(shapes=SHAPES, worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)), cut=CUTS, early=st.booleans())
def test_state_goes_from_torch_to_shards_of_any_world_and_back(case, shapes, worlds, cut, early):
    plain = Plain(case, new_parameters(shapes))
    run([plain], shapes, 0, 2, bearable(case, {(0, 0), (0, 1)}))
    state, values = pickle.loads(pickle.dumps(plain.state_dict())), plain.values()
    # Loaded before the shard was made, or into it.
    one = Owners(case, [nn.Parameter(v.clone()) for v in values], worlds[0], cut, state=state if early else None)
    if not early:
        load(one, state)
    run([plain, one], shapes, 2, 3)
    two = Owners(case, [nn.Parameter(v.clone()) for v in plain.values()], worlds[1])
    load(two, one.state_dict())
    again = Plain(case, plain.parameters)
    again.optimizer.load_state_dict(pickle.loads(pickle.dumps(two.state_dict())))
    run([plain, one, two, again], shapes, 3, 5)
    assert_same(two.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
def test_other_dtypes_and_the_default_chunks(dtype, how):
    case, shapes = (optim.AdamW, how), [(7, 15), (), (600, 500)]
    parameters = new_parameters(shapes, dtype)
    plain, owners = Plain(case, parameters), Owners(case, parameters, 2, CHUNK_NUMEL, 1 << 22)
    run([plain, owners], shapes, 0, 3)
    assert_same(owners.state_dict(), plain.state_dict())
    kept = [value for state in plain.optimizer.state.values() for value in state.values()]
    expected = sum(value.nbytes for value in kept if value.dim() or value.dtype == dtype)
    counters = sum(shard.state_bytes() for shard in owners.shards) - expected
    assert 0 <= counters <= 4 * 10


def in_ranks(transport, case, shapes):
    parameters = new_parameters(shapes)
    with comm.connect(CommOptions(transport=transport)) as ranks:
        plain, owners = Plain(case, parameters), Owners(case, parameters, ranks.world)
        run([plain, owners], shapes, 0, 3, {(1, 0), (1, 1), (1, 2), (2, 1)})
        mine = owners.shards[ranks.rank]
        assert_same(mine.state_dict(ranks), plain.state_dict())
        with pytest.raises(ConfigError, match="the one whose ranks are the owners"):
            owners.shards[ranks.rank - 1].state_dict(ranks)
        mine.load_state_dict(plain.state_dict())
        assert_same(mine.state_dict(ranks), plain.state_dict())


@pytest.mark.parametrize(("world", "transport"), [(2, "host"), (3, "host"), (2, "c10d"), (3, "c10d")])
def test_ranks_gather_the_state_of_whole_parameters(ranks, world, transport):
    for case in (ADAMW, (optim.NAdam, {}), (optim.SGD, {**SGD_ALL})):
        ranks(world).run(in_ranks, transport, case, [(7, 150), (3, 300), (), (0, 4), (2501,)])
