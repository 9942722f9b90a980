"""`python -m tests.traces`: what every rank asks of its communicator in random loops and graphs, call by call.

Which exchanges a strategy makes, of what and in which order, is the same on every machine. A change of the code behind
them that means to change none of them shows it here. `tests/traces.txt` has a digest of each trace, and
tests/contracts/test_traces.py compares some of them.

    python -m tests.traces                   # compare all of them with tests/traces.txt
    python -m tests.traces --write           # put the digests into tests/traces.txt
    python -m tests.traces --dump DIRECTORY  # write the traces themselves, to be compared by `diff -r` with those of
                                             # another revision
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from sherd.comm.base import Communicator
from sherd.comm.calls import call_site, site_text
from sherd.testing import RankPool
from tests.contracts import test_random_graphs, test_random_loops
from tests.helpers.training import STRATEGIES, connected

SAVED = Path(__file__).with_name("traces.txt")
CALLS = (
    *("reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all", "send", "recv", "barrier", "publish"),
    *("agree", "all_gather_object", "broadcast_object", "shared_tensor", "shared_buffers", "subgroup"),
)
OBJECTS = ("all_gather_object", "broadcast_object")
STEPS = 12  # of a graph
TIMEOUT = 300


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The calls of this process on its communicators, in order: who was asked, for what, and what for."""
    trace: list[str] = []
    inside = False  # a call that a communicator makes for another call is its own business

    def recording(name: str, method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def call(self: Communicator, *arguments: object, **options: object) -> object:
            nonlocal inside
            if inside:
                return method(self, *arguments, **options)
            # An object's size may depend on names of files and machines, and a line on the program.
            words = [] if name in OBJECTS else [_words(each) for each in arguments]
            words += [f"{key}={_words(value)}" for key, value in options.items() if value is not None]
            label = site_text(site) if (site := call_site())[0] == -1 else "the program"
            trace.append(f"{self.transport} of {self.world}: {name}({', '.join(words)}) for {label}")
            inside = True
            try:
                return method(self, *arguments, **options)
            finally:
                inside = False

        return call

    with ExitStack() as patches:
        for kind in _kinds(Communicator):
            for name in set(CALLS) & vars(kind).keys():
                patches.enter_context(mock.patch.object(kind, name, recording(name, vars(kind)[name])))
        yield trace


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


def _words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


# ---------------------------------------------------------------- what is traced


def loop(seed: int) -> dict[str, list[str]]:
    """Traces of a random loop, by strategy."""
    traces = {}
    with connected() as c:
        case, program = test_random_loops.drawn(seed, c.world)
        for strategy in STRATEGIES:
            with recorded() as trace:
                test_random_loops.OnRanks(case, c, strategy).run(program)
            traces[strategy] = trace
    return traces


def graph(seed: int) -> dict[str, list[str]]:
    """Traces of a random graph, by strategy."""
    traces = {}
    strategies = {**dict.fromkeys(STRATEGIES), "zero3 gathered": test_random_graphs.GATHERED}
    with connected() as c:
        for name, strategy in strategies.items():
            with recorded() as trace:
                test_random_graphs.trained(c, strategy or name, seed, STEPS)
            traces[name] = trace
    return traces


PROGRAMS = [
    *((loop, 2, seed) for seed in range(24)),
    *((loop, 3, seed) for seed in range(24, 36)),
    *((graph, 2, seed) for seed in (0, 4, 8, *range(100, 108))),
    *((graph, 3, seed) for seed in (1, 5)),
]


def traces(pool: Callable[[int], RankPool], program: Callable[..., object], world: int, seed: int) -> dict[str, str]:
    """The text of each trace, by its name. Ranks whose trace is that of rank 0 are not repeated."""
    results = pool(world).run(program, seed)
    found = {}
    for strategy in results[0]:
        ranks = ["\n".join(result[strategy]) for result in results]
        own = [f"rank {rank}\n{text}" for rank, text in enumerate(ranks) if rank == 0 or text != ranks[0]]
        found[f"{program.__name__} {seed} at {world} ranks under {strategy}"] = "\n".join(own) + "\n"
    return found


def digest(trace: str) -> str:
    return f"{trace.count(chr(10))} lines {hashlib.blake2b(trace.encode(), digest_size=8).hexdigest()}"


def saved() -> dict[str, str]:
    """The digests in the file, by the names of their traces."""
    return dict(line.split(": ", 1) for line in SAVED.read_text().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="save the digests")
    parser.add_argument("--dump", type=Path, metavar="DIRECTORY", help="write the traces themselves")
    options = parser.parse_args()
    with ExitStack() as pools:

        @functools.cache
        def pool(world: int) -> RankPool:
            return pools.enter_context(RankPool(world, timeout=TIMEOUT))

        found: dict[str, str] = {}
        for program, world, seed in PROGRAMS:
            found |= traces(pool, program, world, seed)
    if options.dump:
        options.dump.mkdir(parents=True, exist_ok=True)
        for name, trace in found.items():
            (options.dump / f"{name}.txt").write_text(trace)
    if options.write:
        SAVED.write_text("".join(f"{name}: {digest(trace)}\n" for name, trace in found.items()))
        return 0
    changed = [name for name, trace in found.items() if saved().get(name) != digest(trace)]
    print("\n".join([f"{len(found)} traces, {len(changed)} are not as saved", *changed]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
