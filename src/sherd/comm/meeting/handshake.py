"""What ranks tell each other before they have a communicator, and which of them are gone.

Each rank begins with a hello, which lets the others watch its process from then on. A rank that ends before the
communicator is made is named at once by the ranks that see it, which leave a note for those that do not.

Notes are sealed with the job's token at first, then with a key derived from it and from a fresh random number of every
rank, so that notes of another handshake are worthless in this one. Without a token the seal keeps nobody out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError, Store

from sherd.comm.meeting import network
from sherd.comm.meeting.guard import Guard, root_of, server_of
from sherd.comm.meeting.meeting_place import several_hosts
from sherd.comm.meeting.notes import FORGED, LAUNCHERS, Notes, printable
from sherd.comm.meeting.peers import Hello, Presence
from sherd.comm.trust.seal import Seal, seal_of_token
from sherd.comm.waiting import faults
from sherd.comm.waiting.patience import Stopwatch
from sherd.comm.waiting.side_thread import SideThread
from sherd.config import CommOptions
from sherd.errors import CommError, ConfigError, SherdError
from sherd.machine import check_files

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks, which get longer
EXPLAIN_WITHIN = 1.0
ANSWER_WITHIN = 1.5  # seconds: a rank checks twenty times a second whether it is asked
FORGED_FOR = 3.0  # seconds that a rank has to replace what carries a wrong seal


class Handshake:
    """Ranks that are about to have a communicator: `rank` is the number of this one among them, `world_ranks` are
    their numbers in the world. Collective."""

    def __init__(self, store: Store, rank: int, world_ranks: Sequence[int], options: CommOptions) -> None:
        self.rank, self.world, self.store = rank, len(world_ranks), store
        check_files(self.world)  # gloo ends the process if it runs out of them
        self.token = seal_of_token()
        self._world_ranks = world_ranks
        self._options = options
        self.seal = (self.token or Seal(b"")).derived(f"handshake of {list(world_ranks)} in {_run()}")
        self._notes = Notes(store, self.seal)
        self._launchers = Notes(root_of(store), self.token)
        self.guard = Guard(store, (rank - 1) % self.world, listens=several_hosts())
        self.presence = Presence(rank, self.world, self.guard)
        self._come: dict[int, Hello] = {}
        self._asked: Stopwatch | None = None  # since a rank was asked whether it is still there
        self._forged: list[int] = []  # ranks whose notes carry a wrong seal
        try:
            self.hellos = self._say_hello(Hello(world_ranks[rank], self.guard.door, _way(store)))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    # ---------------------------------------------------------------- together

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Every rank's JSON value for `key`, in rank order. Collective; each key may be used once."""
        keys, said = self._keys(key), list[Any]()
        self._notes.leave(keys[self.rank], value)

        def attempt(seconds: float) -> bool:
            said[:] = self._notes.find_all(keys) or ()
            self._forged = [r for r, value in enumerate(said) if value is FORGED]
            if said and not self._forged:
                return True
            time.sleep(seconds)
            return False

        self._wait(attempt, key)
        return said

    def during(self, key: str, work: Callable[[], T]) -> T:
        """Do work that blocks until all other ranks do it too, and watch them meanwhile. Collective; the work runs on a
        thread of its own, which is abandoned if it cannot succeed."""
        self._notes.leave(self._keys(key)[self.rank], True)
        thread = SideThread(work, f"sherd-{key}")
        try:
            self._wait(thread.attempt, key)
        except SherdError:
            raise
        except (DistError, RuntimeError) as error:
            raise self._explained(error) from error
        return thread.result()

    def check(self) -> None:
        """Raise if a rank that has arrived is gone, or a rank has reported that it gave up."""
        self._meet()
        self._ask_and_answer()
        if lost := self._lost():
            raise self._report(lost)
        if fault := self._reported() or self._reported_by_launcher():
            raise fault
        if self._notes.gone:
            raise self._without_store()

    # ---------------------------------------------------------------- its end

    def let_go(self) -> None:
        """Close the guard and the handles, which nobody took over."""
        self.guard.close()
        self.presence.peers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._give_up(error)
        elif self.guard.door:
            self._notes.leave(f"through/{self.rank}", True)
        # The guard and the handles of `presence` belong to whoever took them over.
        self._notes.close()
        self._launchers.close()

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, CommError):  # which was reported already, or comes from a report
            self._report(CommError(f"{type(error).__name__}: {error}"))
        self.let_go()

    # ---------------------------------------------------------------- waiting

    def _say_hello(self, mine: Hello) -> list[Hello]:
        self._notes.sign("come", self.rank)
        everybody = [Hello.read(fields) for fields in self.exchange("hello", vars(mine))]
        for rank, hello in enumerate(everybody):
            self._watch(rank, hello)
        early = self._reported()  # by a rank that gave up before all had arrived
        self.seal = self._notes.seal = self.seal.derived("".join(hello.nonce for hello in everybody))
        self._asked = None  # to be asked again under the new seal
        if early:
            raise early
        self.check()  # under the new seal: others may be past their hello, and find no report under the first one
        return everybody

    @property
    def together(self) -> bool:
        """Whether all ranks are on one machine."""
        return all(hello.namespaces == self.hellos[0].namespaces for hello in self.hellos)

    def interface(self) -> network.Interface | None:
        """The interface that leads to the others. gloo has to be told: it would take the one that the machine's own
        name resolves to, often loopback. None if the user has told it, or it cannot be found."""
        mine, ways = self.hellos[self.rank].way, [hello.way for hello in self.hellos if hello.way]
        if os.environ.get(network.IFNAME):
            return None
        return network.loopback() if self.together else network.choose(mine, ways) if mine else None

    def _meet(self) -> None:
        """Start watching the ranks that have arrived since the last time."""
        if len(self._come) < self.world:
            for rank in self._notes.signed("come", self.world) - self._come.keys():
                fields = self._notes.find(f"hello/{rank}")
                if fields is not None:
                    self._watch(rank, Hello.read(fields))

    def _watch(self, rank: int, hello: Hello) -> None:
        if rank not in self._come:
            self._come[rank] = hello
            self.presence.add(rank, hello)

    def _ask_and_answer(self) -> None:
        """A rank whose door is closed may be gone, or behind a firewall. While it is in the handshake, it answers."""
        if self.guard.door and self._notes.find(f"asked/{self.rank}"):
            self._notes.leave(f"through/{self.rank}", True)
        rank = self.presence.doubtful()
        if rank is None or self._notes.find(f"through/{rank}"):
            self._asked = None
        elif self._asked is None:
            self._asked = Stopwatch()
            self._notes.leave(f"asked/{rank}", True)
        elif self._asked.seconds() > ANSWER_WITHIN:
            self.presence.give_up(rank)

    def _wait(self, attempt: Callable[[float], bool], key: str) -> None:
        """Repeat `attempt(seconds)` until it is true, for as long as the others may still arrive."""
        watch, pause = Stopwatch(), FIRST_PAUSE
        longest = LONGEST_PAUSE * max(1.0, self.world / 100)  # a thousand ranks must not flood the store
        warn_at, forged_at = self._options.warn_seconds, math.inf
        while not attempt(pause):
            pause = min(2 * pause, longest)
            try:
                self.check()
            except CommError:
                if attempt(0):  # the rank that is gone did its part of this first
                    return
                raise
            waited = watch.seconds()
            if waited > self._options.timeout:
                late = {r: self._world_ranks[r] for r in self._missing(key)}
                raise self._report(faults.did_not_connect(self._name(self.rank), key, late, waited))
            if waited > warn_at:
                words = {r: f"{self._name(r)} in the handshake ({key!r})" for r in self._missing(key)}
                faults.warn_late(self._name(self.rank), words, waited, key, self._options.timeout)
                warn_at = 2 * waited
            forged_at = min(forged_at, waited) if self._forged else math.inf
            if waited > forged_at + FORGED_FOR:
                raise self._report(faults.wrong_token(self._name(self.rank), {r: self._name(r) for r in self._forged}))

    def _keys(self, key: str) -> list[str]:
        return [f"{key}/{r}" for r in range(self.world)]

    def _missing(self, key: str) -> list[int]:
        keys = self._keys(key)
        return [keys.index(absent) for absent in self._notes.missing(keys)]

    # ---------------------------------------------------------------- what may have gone wrong

    def _explained(self, error: BaseException) -> CommError:
        """The backend has failed: usually because a rank has just ended, which shows a moment later."""
        deadline = time.monotonic() + EXPLAIN_WITHIN
        while time.monotonic() < deadline:
            self.check()
            time.sleep(LONGEST_PAUSE)
        words = str(error).splitlines() or [type(error).__name__]
        return self._report(CommError(f"{self._name(self.rank)} could not connect to the other ranks: {words[0]}"))

    def _lost(self) -> CommError | None:
        gone = {r: f"{self._name(r)} {end}" for r, end in self.presence.gone().items()}
        return faults.lost_early(gone) if gone else None

    def _without_store(self) -> CommError:
        """Nothing is known of the others any more. The process that served the store may have ended just now."""
        deadline = time.monotonic() + EXPLAIN_WITHIN
        while time.monotonic() < deadline:
            if lost := self._lost():
                return lost
            time.sleep(LONGEST_PAUSE)
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        who = "the launcher" if launched else self._name(0)
        return faults.lost_early({0: f"{who}, which served the store of this job, ended"}, () if launched else (0,))

    def _report(self, error: CommError) -> CommError:
        """Tell the others why this rank gives up. The first report stands."""
        self._notes.report(error, self.rank)
        faults.emit_fault(error)
        return error

    def _reported(self) -> CommError | None:
        return self._notes.reported([self._name(r) for r in range(self.world)], self.rank)

    def _reported_by_launcher(self) -> CommError | None:
        note = self._launchers.find(LAUNCHERS)
        if not isinstance(note, dict) or note.get("rank") not in self._world_ranks:
            return None
        if note.get("run") != os.environ.get("TORCHELASTIC_RUN_ID"):
            return None  # of another run with the same token
        rank, where = self._world_ranks.index(note["rank"]), f"{note.get('machine')} (pid {note.get('pid')})"
        return faults.lost_early({rank: printable(f"rank {note['rank']} on {where} {note.get('how')}")})

    def _name(self, rank: int) -> str:
        return self._come[rank].name if rank in self._come else f"rank {self._world_ranks[rank]}"


def _run() -> tuple[str | None, ...]:
    """What a launcher gives to one run only, so that notes of another run with the same token are worthless here even
    before the ranks' own random numbers are known."""
    return tuple(os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))


def _way(store: Store) -> dict[str, str] | None:
    """The route to the server of the store, if that is on the network."""
    server = server_of(store)
    try:
        return network.way_to(server) if server else None
    except ConfigError:  # the server has been reached, but how cannot be found out
        return None
