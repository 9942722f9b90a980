"""gloo and sherd's transports, interleaved in one run: `python -m benchmarks.collectives`.

In every round each contender has its turn, one after the other on the same ranks, so that whatever else the machine
does hits all of them alike. A turn is four operations, or as many small ones as make up 2 MB. Reported are medians
over the rounds and ratios of medians; the first tenth of a turn is not counted. Each rank uses one thread for its
arithmetic.

`host` copies private tensors in; `host zero-copy` reads them from buffers that the ranks share. `alone` is the least
that any transport must do, with nobody to talk to: a rank adds, or copies, as many private bytes as the operation
leaves in its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sherd.comm import C10dCommunicator, CommOptions, Communicator, connect
from sherd.errors import PeerLost
from sherd.testing import Died, run_ranks

SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "1 MB": 1 << 20, "25 MB": 25 * 1000**2, "100 MB": 100 * 1000**2}
TURN_BYTES = 2_000_000
LEAST_TURN = 4  # nobody is measured only on the caches that another has left
RESULTS = Path(__file__).parent / "results"
Contenders = dict[str, Callable[[], object]]

# operation, contender, smallest and largest size, ranks: at least so many times as fast as gloo
TARGETS = [
    ("reduce_scatter", "host", "25 MB", "100 MB", 2, 8.0),
    ("all_gather", "host", "25 MB", "100 MB", 2, 8.0),
    ("reduce_scatter", "host zero-copy", "25 MB", "100 MB", 2, 20.0),
    ("all_gather", "host zero-copy", "25 MB", "100 MB", 2, 20.0),
    ("all_reduce", "host", "25 MB", "100 MB", 2, 3.0),
    ("reduce_scatter", "host", "4 KB", "4 KB", 2, 20.0),
    ("all_gather", "host", "4 KB", "4 KB", 2, 20.0),
    ("all_reduce", "host", "4 KB", "4 KB", 2, 20.0),
    ("broadcast", "host", "4 KB", "4 KB", 2, 10.0),
    ("all_to_all", "host", "4 KB", "4 KB", 2, 10.0),
    ("send and recv", "host", "4 KB", "4 KB", 2, 10.0),
    ("barrier", "host", "4 KB", "4 KB", 2, 10.0),
    ("reduce_scatter", "host", "25 MB", "100 MB", 4, 4.0),
    ("all_gather", "host", "25 MB", "100 MB", 4, 4.0),
    ("reduce_scatter", "c10d", "25 MB", "100 MB", 2, 1.5),
]


def contenders(c: Communicator, slow: C10dCommunicator, nbytes: int) -> dict[str, Contenders]:
    """The same operation by gloo, host and c10d. Sizes are those of the whole, not of a rank's slice."""
    world, rank = c.world, c.rank
    per_rank = nbytes // 4 // world
    whole, out = torch.randn(per_rank * world), torch.empty(per_rank * world)
    piece = torch.empty(per_rank)
    buffers, common = c.shared_buffers(per_rank * world), c.shared_tensor(per_rank * world)
    mine = common[rank * per_rank : (rank + 1) * per_rank]
    lent = buffers[rank]
    lent.copy_(whole)
    result: dict[str, Contenders] = {
        "reduce_scatter": {
            "alone": lambda: torch.add(whole[:per_rank], whole[per_rank : 2 * per_rank], out=piece),
            "gloo": lambda: dist.reduce_scatter_single(piece, whole),
            "host": lambda: c.reduce_scatter(whole, piece).wait(),
            "host zero-copy": lambda: c.reduce_scatter(lent, piece).wait(),
            "c10d": lambda: slow.reduce_scatter(whole, piece).wait(),
        },
        "all_gather": {
            "alone": lambda: out.copy_(whole),
            "gloo": lambda: dist.all_gather_single(out, piece),
            "host": lambda: c.all_gather(piece, out).wait(),
            "host zero-copy": lambda: c.all_gather(mine, common).wait(),
            "c10d": lambda: slow.all_gather(piece, out).wait(),
        },
        "all_reduce": {
            "gloo": lambda: dist.all_reduce(whole),
            "host": lambda: c.all_reduce(whole, whole).wait(),
            "host zero-copy": lambda: c.all_reduce(lent, lent).wait(),
            "c10d": lambda: slow.all_reduce(whole, whole).wait(),
        },
        "broadcast": {
            "alone": lambda: out.copy_(whole),
            "gloo": lambda: dist.broadcast(whole, 0),
            "host": lambda: c.broadcast(whole, 0).wait(),
            "c10d": lambda: slow.broadcast(whole, 0).wait(),
        },
        "all_to_all": {
            "alone": lambda: out.copy_(whole),
            "gloo": lambda: dist.all_to_all_single(out, whole),
            "host": lambda: c.all_to_all(whole, out).wait(),
            "c10d": lambda: slow.all_to_all(whole, out).wait(),
        },
        "send and recv": {
            "gloo": lambda: _there_and_back(rank, lambda: dist.send(whole, 1 - rank), lambda: dist.recv(out, 1 - rank)),
            "host": lambda: _there_and_back(
                rank, lambda: c.send(whole, 1 - rank).wait(), lambda: c.recv(out, 1 - rank).wait()
            ),
        },
    }
    if nbytes == min(SIZES.values()):
        result["barrier"] = {
            "gloo": lambda: dist.barrier(),
            "host": lambda: c.barrier().wait(),
            "c10d": lambda: slow.barrier().wait(),
        }
    return result


def _there_and_back(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> None:
    for half in (0, 1) if rank < 2 else ():
        if rank == half:
            send()
        else:
            recv()


def measure(sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """Runs on every rank: times in seconds, by size, operation and contender, and bytes over the loopback device."""
    c = connect(CommOptions(transport="host"))
    # Without its fingerprint message, as gloo has none either.
    slow = C10dCommunicator(dist.new_group(), CommOptions(check=False))
    times: dict[str, Any] = {}
    wire: dict[str, int] = {}
    for name, nbytes in sizes.items():
        for operation, ways in contenders(c, slow, nbytes).items():
            samples: dict[str, list[float]] = {way: [] for way in ways}
            turn = max(LEAST_TURN, min(50, TURN_BYTES // nbytes))
            one_round = _once(c, ways, samples, turn)
            for timings in samples.values():
                timings.clear()
            rounds = c.broadcast_object(int(max(5, min(1000, seconds / one_round))))
            for _ in range(rounds):
                _once(c, ways, samples, turn)
            times.setdefault(name, {})[operation] = samples
            if operation == "reduce_scatter" and nbytes == max(sizes.values()):
                wire = {way: _loopback_bytes(c, ways[way]) for way in ("gloo", "c10d")}
    return {"times": times, "wire": wire}


def _once(c: Communicator, ways: Contenders, samples: dict[str, list[float]], turn: int) -> float:
    begin = time.perf_counter()
    for way, run in ways.items():
        for _ in range(max(1, turn // 10)):
            run()  # not counted: whoever comes after another finds the caches and the scheduler as that one left them
        c.barrier().wait()
        start = time.perf_counter()
        for _ in range(turn):
            run()
        samples[way].append((time.perf_counter() - start) / turn)
    return time.perf_counter() - begin


def _loopback_bytes(c: Communicator, run: Callable[[], object]) -> int:
    """What all ranks together sent through the network stack."""
    c.barrier().wait()
    before = _sent()
    c.barrier().wait()
    run()
    c.barrier().wait()
    return _sent() - before


def _sent() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, numbers = line.strip().partition(":")
        if device == "lo":
            return int(numbers.split()[8])
    return 0


def lose_a_peer() -> float:
    """Seconds from the death of rank 1 to the error on rank 0."""
    c = connect(CommOptions(transport="host"))
    c.barrier().wait()
    if c.rank == 1:
        c.send(torch.tensor([time.monotonic()], dtype=torch.float64), 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    begin = c.recv(torch.empty(1, dtype=torch.float64), 1).wait().item()
    try:
        c.barrier().wait()
    except PeerLost:
        return time.monotonic() - begin
    raise AssertionError("a dead peer was not noticed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size and operation (default: 4)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--no-save", action="store_true", help=f"do not write {RESULTS.name}/collectives.*")
    arguments = parser.parse_args()
    sizes = {name: SIZES[name] for name in arguments.sizes}
    console = Console(width=130)
    results: dict[int, Any] = {}
    for world in arguments.ranks:
        console.print(f"measuring {world} ranks ...")
        per_rank = run_ranks(measure, world, sizes, arguments.seconds, timeout=3600)
        results[world] = {"medians": _medians(per_rank), "wire": per_rank[0]["wire"]}
    noticed = [run_ranks(lose_a_peer, 2, expected_exits={1: -9})[0] for _ in range(5)]
    text = report(results, [seconds for seconds in noticed if not isinstance(seconds, Died)])
    console.print(text)
    if not arguments.no_save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "collectives.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "collectives.txt").write_text(text)


def _medians(per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank's median: an operation is over when all ranks have it."""
    first = per_rank[0]["times"]
    return {
        size: {
            operation: {
                way: max(statistics.median(rank["times"][size][operation][way]) for rank in per_rank) for way in ways
            }
            for operation, ways in operations.items()
        }
        for size, operations in first.items()
    }


def report(results: dict[int, Any], noticed: list[float]) -> str:
    console = Console(width=130, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    for world, result in results.items():
        table = Table(
            title=f"{world} ranks on {len(os.sched_getaffinity(0))} cores: median time (times as fast as gloo)"
        )
        ways = ("alone", "gloo", "host", "host zero-copy", "c10d")
        for heading in ("operation", "size", *ways):
            table.add_column(heading, justify="left" if heading == "operation" else "right")
        for size, operations in result["medians"].items():
            for operation, medians in operations.items():
                cells = [_cell(medians.get(way), medians["gloo"]) for way in ways]
                table.add_row(operation, size, *cells)
        console.print(table)
        if result["wire"]:
            share = result["wire"]["c10d"] / result["wire"]["gloo"]
            console.print(f"reduce_scatter over the loopback device: c10d sends {share:.2f} of gloo's bytes")
    console.print(
        f"a killed peer is noticed after {1000 * statistics.median(noticed):.0f} ms (median of {len(noticed)})"
    )
    console.print(_targets(results))
    return console.export_text()


def _cell(seconds: float | None, gloo: float) -> str:
    if seconds is None:
        return ""
    time_text = f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
    return f"{time_text} ({gloo / seconds:.1f}x)"


def _targets(results: dict[int, Any]) -> Table:
    table = Table(title="targets: times as fast as gloo")
    for heading in ("ranks", "operation", "by", "sizes", "target", "measured", ""):
        table.add_column(heading)
    for operation, way, smallest, largest, world, target in TARGETS:
        medians = results.get(world, {}).get("medians", {})
        sizes = [s for s in medians if SIZES[smallest] <= SIZES[s] <= SIZES[largest]]
        if not sizes:
            continue
        ratios = [medians[s][operation]["gloo"] / medians[s][operation][way] for s in sizes]
        verdict = "met" if min(ratios) >= target else "missed"
        measured = " ".join(f"{ratio:.1f}x" for ratio in ratios)
        table.add_row(str(world), operation, way, ", ".join(sizes), f"{target:g}x", measured, verdict)
    return table


if __name__ == "__main__":
    main()
