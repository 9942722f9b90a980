"""How the launchers of several machines find each other and agree on their numbers.

Machine 0 hosts a store. The others write a heartbeat to it; once it has recent ones from all of them, it writes the
plan, in which every machine finds its ranks. The messages are those of `board`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.distributed import DistError

from sherd.cli.launch.request import Request
from sherd.cli.machines import endpoint
from sherd.cli.machines.aside import aside
from sherd.cli.machines.board import HELLO, OFF, PLAN, Board, News
from sherd.cli.machines.seat import Seat, Seats
from sherd.cli.messages import say
from sherd.cli.words import ranks_in_words
from sherd.comm.meeting import network
from sherd.comm.meeting.notes import printable
from sherd.comm.trust.seal import TOKEN, Seal
from sherd.errors import ConfigError, SherdError

POLL_SECONDS = 0.1
SPEAK_SECONDS = 10.0  # of waiting before the user is told


@dataclass(frozen=True)
class Meeting:
    """The result of a rendezvous: which ranks are here, and how they find the others."""

    board: Board
    hearing: Board  # the same, for the thread that listens
    machine: int
    machines: int
    ranks: int  # on this machine
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int
    interface: network.Interface | None


@contextlib.contextmanager
def meet_alone(ranks: int, seal: Seal | None) -> Iterator[Meeting]:
    """One machine: there is nobody to meet, and nothing listens outside loopback."""
    here = endpoint.listen_alone()
    board = Board(here.store, seal, uuid.uuid4().hex)
    yield Meeting(board, board, 0, 1, ranks, 0, ranks, here.for_ranks, here.port, network.loopback())


@contextlib.contextmanager
def meet(request: Request, seal: Seal | None) -> Iterator[Meeting]:
    """Several machines; each of them calls this. An error inside ends the run on the others too."""
    with _as_master(request, seal) if request.machine == 0 else _as_other(request, seal) as meeting:
        over = _network_between(meeting)
        if seal is None and request.machine > 0:
            _warn(f"this machine over {over}")
        ours = ranks_in_words(range(meeting.first_rank, meeting.first_rank + meeting.ranks))
        say(f"machine {request.machine}: {ours} of {meeting.world_size}, over {over}")
        yield meeting


def _network_between(meeting: Meeting) -> str:
    if name := os.environ.get(network.IFNAME):
        return f"{name} ({network.IFNAME})"
    if meeting.interface is None:
        return (
            f"whatever gloo chooses: the interface that leads to the others is unknown here, {network.IFNAME} sets it"
        )
    return f"{meeting.interface.name} ({meeting.interface.address})"


def _warn(where: str) -> None:
    say(
        f"warning: there is no {TOKEN}, so anyone who reaches {where} can read, join or break this run; write "
        "--token-file FILE on every machine, a file with the same random characters (see docs/security.md)"
    )


class Patience:
    """Waits for something, tells the user when it takes long, and gives up after a time limit."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._seconds = seconds
        self._spoke = False

    def wait(self, what: str) -> None:
        waited = time.monotonic() - self._start
        if waited >= self._seconds:
            raise ConfigError(f"gave up after {self._seconds:g} s of waiting for {what} (--wait sets this limit)")
        if waited >= SPEAK_SECONDS and not self._spoke:
            say(f"waiting for {what}")
            self._spoke = True
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _as_master(request: Request, seal: Seal | None) -> Iterator[Meeting]:
    here = endpoint.listen(request.address, request.port)
    if seal is None:
        _warn(here.where)
    board = Board(here.store, seal, uuid.uuid4().hex)
    board.write(HELLO, {"machines": request.machines})
    with _heard(), _called_off(board, request):
        others = _gathered(board, request, here.where)
        way = aside(lambda: network.way_to(request.address))
        me = {"id": "", "name": socket.gethostname(), "ranks": request.ranks, "way": way}
        plan = {"all": [me, *others]}
        meeting = _meeting(board, board.again(), request, plan, here.for_ranks)
        board.write(PLAN, plan)
        yield meeting


def _gathered(board: Board, request: Request, where: str) -> list[News]:
    """The entries of all other machines, once each has a recent heartbeat."""
    patience, seats, warned = Patience(request.wait), Seats(board, request.machines), False
    while missing := seats.missing():
        if off := board.read(OFF):
            raise ConfigError(printable(off.get("why")))
        if board.strange and not warned:
            say(f"something without this machine's {TOKEN} wrote to {where}; ignoring it")
            warned = True
        numbers = ", ".join(map(str, missing))
        patience.wait(f"machine {numbers} of {request.machines} (--node-rank {numbers}), at {where}")
    return seats.entries()


@contextlib.contextmanager
def _as_other(request: Request, seal: Seal | None) -> Iterator[Meeting]:
    patience, where = Patience(request.wait), endpoint.shown(request.address, request.port)

    def until(reason: str) -> None:
        patience.wait(f"machine 0 at {where} ({reason}); start it there with --node-rank 0")

    store, reached = endpoint.reach(request.address, request.port, until)
    board = Board(store, seal)
    me = {"id": uuid.uuid4().hex, "name": socket.gethostname(), "ranks": request.ranks, "way": network.way_to(reached)}
    with _called_off(board, request, only_if=lambda last: _is_seated(last, request, me)):
        try:
            _greet(board, request, patience, where)
            hearing = board.again()  # now: machine 0 could be gone later, and finding that out takes seconds
            plan = _seated(board, request, me, patience, where)
        except DistError as error:
            words = f"machine 0 at {where} left before all machines had arrived; see its output"
            raise ConfigError(words) from error
        yield _meeting(board, hearing, request, plan, request.address)


def _greet(board: Board, request: Request, patience: Patience, where: str) -> None:
    """Get the id of the run, and check that this machine was started for the same number of machines."""
    while not (hello := board.read(HELLO)):
        if board.strange:
            raise ConfigError(
                f"machine 0 at {where} has another {TOKEN}, or only one of the two machines has one; give the same "
                "token on every machine"
            )
        patience.wait(f"an answer from machine 0 at {where}")
    board.run = str(hello.get("run"))
    if hello.get("machines") != request.machines:
        why = (
            f"machine 0 was started with --nnodes {hello.get('machines')}, machine {request.machine} "
            f"({socket.gethostname()}) with --nnodes {request.machines}; write the same number on every machine"
        )
        if not board.read(PLAN):  # or this would end a run that has started without us
            board.write(OFF, {"why": why})
        raise ConfigError(why)


def _seated(board: Board, request: Request, me: News, patience: Patience, where: str) -> News:
    """Keep this machine's seat until the plan is there."""
    seat = Seat(board, request.machine, request.machines, me)
    seat.take()
    try:
        while not (plan := board.read(PLAN)):
            if off := board.read(OFF):
                raise ConfigError(f"called off: {printable(off.get('why'))}")
            seat.keep()
            patience.wait(f"the other machines, which have to reach machine 0 at {where}")
    except BaseException:
        seat.leave()
        raise
    if (chosen := _planned(plan, request)[request.machine])["id"] != me["id"]:
        seat.taken(chosen)
    return plan


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """On machine 0, give the others time to read the last message: the store ends with this process."""
    try:
        yield
    except BaseException:
        time.sleep(5 * POLL_SECONDS)
        raise


def _is_seated(board: Board, request: Request, me: News) -> bool:
    """Whether the others count on this machine."""
    plan = board.read(PLAN)
    return plan is not None and _planned(plan, request)[request.machine]["id"] == me["id"]


@contextlib.contextmanager
def _called_off(board: Board, request: Request, only_if: Callable[[Board], bool] = lambda _: True) -> Iterator[None]:
    """Tell the other machines if this one leaves, and why."""
    try:
        yield
    except BaseException as error:
        why = str(error) if isinstance(error, SherdError) else f"the launcher of machine {request.machine} was stopped"
        last = board.brief()
        with contextlib.suppress(DistError, ConfigError):
            if only_if(last):
                last.write(OFF, {"why": why})
        raise


def _planned(plan: News, request: Request) -> list[News]:
    """The machines of a plan. Without a token anyone may have written it, so its structure is checked here."""
    try:
        return [
            {
                "id": str(machine["id"]),
                "name": str(machine["name"]),
                "ranks": int(machine["ranks"]),
                "way": {name: str(machine["way"][name]) for name in ("reached", "address")},
            }
            for _, machine in zip(range(request.machines), plan["all"], strict=True)
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the plan of the machines cannot be read ({error!r}); do all of them have the same version of sherd?"
        ) from error


def _meeting(board: Board, hearing: Board, request: Request, plan: News, master_addr: str) -> Meeting:
    machines = _planned(plan, request)
    counts, ways = [machine["ranks"] for machine in machines], [machine["way"] for machine in machines]
    interface = network.choose(ways[request.machine], ways)
    first, world = sum(counts[: request.machine]), sum(counts)
    numbers = (request.machine, request.machines, request.ranks, first, world)
    return Meeting(board, hearing, *numbers, master_addr, request.port, interface)
