"""A sealed store: a store as any other to those with the key, and nothing of a stranger's to gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from sherd.comm.trust.seal import Seal
from sherd.comm.trust.sealed_store import SealedStore
from sherd.errors import CommError

SEAL = Seal(b"of the job")
LIMIT = timedelta(seconds=10)


@pytest.mark.fake
def test_it_is_a_store_to_those_who_have_the_key():
    plain = HashStore()
    sealed = [SealedStore(plain, Seal(b"of the job")) for _ in range(2)]
    one, other = (PrefixStore("job", store) for store in sealed)
    one.set("key", "value")
    assert other.get("key") == b"value" and plain.get("job/key") != b"value"
    assert other.check(["key"]) and not other.check(["none"])
    assert [one.add("count", 2), other.add("count", 3)] == [2, 5]
    assert one.compare_set("first", "", "one") == b"one"
    assert other.compare_set("first", "", "other") == b"one"
    assert other.compare_set("first", "one", "two") == b"two"
    assert other.compare_set("absent", "something", "else") == b"something"
    other.wait(["key"], LIMIT)
    with pytest.raises(dist.DistStoreError):
        other.wait(["none"], timedelta(seconds=0.01))
    assert one.delete_key("key") and not other.check(["key"])


@pytest.mark.fake
def test_what_others_wrote_is_not_read():
    plain = HashStore()
    store = SealedStore(plain, SEAL)
    store.set("key", "value")
    for wrong in (b"", b"value", plain.get("key")[:-1], SEAL.sealed("key", b"value")):
        plain.set("key", wrong)
        with pytest.raises(CommError, match=r"'key' in the store .* someone else"):
            store.get("key")
    store.set("key", "value")
    plain.set("another", plain.get("key"))
    with pytest.raises(CommError, match="another"):
        store.get("another")


def sums_over_gloo(forged):
    """What gloo makes of it where rank 1 finds another address of rank 0 than it has written."""
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    tcp = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    sealed = SealedStore(tcp, SEAL)
    store = PrefixStore(f"forged {forged}", sealed)
    if rank and forged is not None:
        end = time.monotonic() + 30
        while not (keys := [key for key in tcp.list_keys() if key.startswith(f"forged {forged}/")]):
            assert time.monotonic() < end
            time.sleep(0.01)
        for key in keys:
            tcp.set(key, forged)
    try:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=3 if forged is not None else 30))
        total = torch.ones(3)
        group.allreduce([total]).wait()
    except (CommError, RuntimeError) as error:
        return str(error)
    return total.tolist()


def test_gloo_meets_over_it(ranks):
    assert ranks(2).run(sums_over_gloo, None) == [[2.0] * 3] * 2


@pytest.mark.parametrize("forged", ["", "short", "x" * 170])
def test_a_forged_address_is_an_error_not_a_crash(ranks, forged):
    first, second = ranks(2).run(sums_over_gloo, forged)
    assert isinstance(first, str) and "written by someone else" in second
