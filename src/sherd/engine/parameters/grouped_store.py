"""The stores of a model of which ranks hold different parts: one for each group of ranks that hold the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.inventory import Inventory
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.mesh import Mesh
from sherd.engine.parameters.store import Members, ParameterStore

Part = tuple[ParameterStore, Members]


class GroupedStore(ParameterStore):
    """Asks each store about the parameters of its group, in one order on all ranks."""

    def __init__(
        self,
        mesh: Mesh,
        inventory: Inventory,
        buckets: Sequence[Bucket],
        owner: int | None,
        stores: Mapping[Communicator, ParameterStore],
    ) -> None:
        self._stores = stores
        super().__init__(mesh, inventory, buckets, owner)
        # Ranks decide by it whether to compare, and a rank that is alone in its group has nobody to compare with.
        compares = any(store.compares_edits for store in stores.values())
        with self._comm.counters.agreeing():
            self.compares_edits = any(self._comm.all_gather_object(compares))
        self.finds_edits = all(store.finds_edits for store in stores.values())
        self.sees_all_edits = all(store.sees_all_edits for store in stores.values())
        self.owns_memory = all(store.owns_memory for store in stores.values())

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        """Each store has made its own."""

    def take_over(self) -> None:
        for store in self._stores.values():
            store.take_over()

    def acquire(self, buckets: Sequence[Bucket]) -> None:
        super().acquire(buckets)
        for store, its in self._by_store(buckets):
            store.acquire(its)

    def _publish(self, buckets: Sequence[Bucket]) -> None:
        for store, its in self._by_store(buckets):
            store.publish(its)

    def abandon(self) -> None:
        super().abandon()
        for store in self._stores.values():
            store.abandon()

    def bytes(self) -> int:
        return sum(store.bytes() for store in self._stores.values())

    def write(self, members: Members) -> None:
        for store, its in self._parts(members):
            store.write(its)

    def lend(self, members: Members) -> None:
        for store, its in self._parts(members):
            store.lend(its)

    def take_back(self, members: Iterable[TrackedParameter]) -> None:
        for store, its in self._parts(members):
            store.take_back(its)

    def edited(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        suspects = set(suspects)
        found: set[TrackedParameter] = set()
        for comm, store in self._stores.items():  # some find edits without suspects
            found |= store.edited(member for member in suspects if member.bucket.comm is comm)
        return found

    def digests(self, members: Members) -> list[int]:
        found: dict[TrackedParameter, int] = {}
        for store, its in self._parts(members):
            found.update(zip(its, store.digests(its), strict=True))
        return [found[member] for member in members]

    def keep_edits(self, members: Members) -> None:
        for store, its in self._parts(members):
            store.keep_edits(its)

    def _parts(self, members: Iterable[TrackedParameter]) -> Iterator[Part]:
        """These parameters by store, without those that have none of them."""
        members = list(members)
        for comm, store in self._stores.items():
            if its := [member for member in members if member.bucket.comm is comm]:
                yield store, its

    def _by_store(self, buckets: Sequence[Bucket]) -> Iterator[tuple[ParameterStore, Sequence[Bucket]]]:
        for comm, store in self._stores.items():
            if its := [bucket for bucket in buckets if bucket.comm is comm]:
                yield store, its
