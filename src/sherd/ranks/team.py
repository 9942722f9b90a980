"""All ranks of a run: start them, give them commands, end them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sherd.comm.meeting.peers import describe_exit
from sherd.ranks import worker
from sherd.ranks.process import Rank, Start, end
from sherd.ranks.watch import Outcome, failure, watch


class Team:
    """`world_size` ranks, which start with the first `run`.

    After a `RankFailed` or any other exception from here, the ranks are in an unknown state: `end` them. `grace` is how
    many seconds the others have to fail as well, once one has failed.
    """

    def __init__(self, start: Start, world_size: int, *, grace: float, start_timeout: float) -> None:
        self.world_size = world_size
        self.grace = grace
        self._start_rank = start
        self._start_timeout = start_timeout
        self._ranks: list[Rank] = []
        self._task = os.memfd_create("sherd-task")

    def run(self, task: bytes, timeout: float, expected: Mapping[int, int] | None = None) -> list[Any]:
        """Run the task and return the results in rank order, `Died` for ranks that were `expected` to die."""
        worker.write_file(task, self._task)
        try:
            self._start(timeout)
            outcome = self._command(worker.RUN, "running the function", timeout, expected or {})
            results = outcome.results(self._ranks)
            self._check(outcome, "handing over the result", timeout)
        finally:
            os.ftruncate(self._task, 0)  # idle ranks should not hold on to large arguments
        return results

    def clean(self, timeout: float) -> None:
        """Have the ranks destroy their process group, now that all have returned: earlier it could fail others."""
        self._command(worker.CLEAN, "destroying the process group", timeout, {})

    def stop(self, timeout: float, dead: Mapping[int, int] | None = None) -> None:
        """Have the ranks exit by themselves and check their exit codes; `dead` have already exited."""
        codes = dict.fromkeys(range(len(self._ranks)), 0) | dict(dead or {})
        try:
            self._command(worker.STOP, "exiting", timeout, codes)
        finally:
            self.end()

    def end(self) -> None:
        """End the ranks, whatever they are doing; the next run starts new ones."""
        try:
            end(self._ranks)
        finally:
            self._ranks.clear()

    def close(self) -> None:
        """End the ranks and release everything."""
        try:
            self.end()
        finally:
            os.close(self._task)

    def _start(self, timeout: float) -> None:
        """Start ranks if there are none; otherwise check that those of the last run are still alive."""
        if self._ranks:
            codes = {rank.rank: rank.look() for rank in self._ranks}
            outcome = Outcome(answered=set(codes))
            for number, code in codes.items():
                if code is not None:
                    outcome.fail(number, describe_exit(code))
            self._check(outcome, "waiting for the next run", timeout)
            return
        for number in range(self.world_size):
            self._ranks.append(Rank(number, self._start_rank, self._task))
        outcome = watch(self._ranks, self._start_timeout, self.grace, {})
        self._check(outcome, "starting (see what they printed)", self._start_timeout)

    def _command(self, command: bytes, doing: str, timeout: float, expected: Mapping[int, int]) -> Outcome:
        """Give all ranks a command and wait for it."""
        for rank in self._ranks:
            rank.say(command)
        outcome = watch(self._ranks, timeout, self.grace, expected)
        self._check(outcome, doing, timeout)
        return outcome

    def _check(self, outcome: Outcome, doing: str, timeout: float) -> None:
        if error := failure(self._ranks, outcome, doing=doing, timeout=timeout, grace=self.grace):
            raise error
