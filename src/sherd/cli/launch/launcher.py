"""A run on this machine, from its first rank to its last."""

from __future__ import annotations

import os
import signal
import time

from sherd.cli import messages
from sherd.cli.launch.ranks import POLL_SECONDS, Ranks
from sherd.cli.launch.stopping import Stopped
from sherd.cli.machines.news import Newsroom

HEARD_SECONDS = 3.0  # for ranks to fail by themselves, with their own errors, once one on another machine has
BARRIER_SECONDS = 300.0  # for the other machines to finish, once the ranks of this one have succeeded


def run_ranks(ranks: Ranks, news: Newsroom) -> int:
    """Start the ranks and wait for them; none is left when this returns. Reports failures; the exit status.

    Raises `Stopped`, which may come at any time, even twice: whoever catches it ends what is left.
    """
    status, stopped = 1, False
    try:
        ranks.start()
        ours = _watch(ranks, news)
        ranks.stop()
        status = messages.conclude(ranks.failed, ours=ours)
    except Stopped as stop:
        stopped = True
        news.tell(*ranks.some, f"was stopped with all ranks of its machine: their launcher got {stop.signal.name}")
        ranks.stop(stop.signal)
        raise
    except OSError as error:
        news.tell(ranks.some[0], os.getpid(), f"could not be started ({error})")
        ranks.stop(signal.SIGKILL)
        messages.say(f"the ranks could not be started: {error}")
    finally:
        news.close(well=status == 0, stopped=stopped)
    return status


def _watch(ranks: Ranks, news: Newsroom) -> bool:
    """Wait until all ranks have succeeded, here and elsewhere, or one has failed; whether that is for us to report."""
    heard: float | None = None
    while not ranks.failed:
        ranks.look()
        if ranks.failed:
            first = ranks.failed[0]
            news.tell(first.rank, first.pid, first.how)  # before stopping the others, which takes longer
            if not news.failure:
                messages.say_failed(first)
                return True
        elif not ranks.running:
            return _wait_for_others(news)
        if news.failure and heard is None:
            heard = time.monotonic()
            messages.say(news.failure)
        if heard is not None and time.monotonic() - heard > HEARD_SECONDS:
            break
        time.sleep(POLL_SECONDS)
    return False


def _wait_for_others(news: Newsroom) -> bool:
    """Machine 0 has the store, which ranks elsewhere may still need; and a run that fails should fail everywhere.

    Machine 0 leaves last, or after it has reported a failure and waited for us to read it. If it is lost without that,
    it has succeeded as we have.
    """
    news.tell_ended(well=True)
    end = time.monotonic() + BARRIER_SECONDS
    while not (news.all_ended or news.fault or news.off or news.lost):
        if time.monotonic() > end:
            messages.say(
                f"the ranks of this machine ended {BARRIER_SECONDS:.0f} s ago; not waiting for the others any longer"
            )
            break
        time.sleep(POLL_SECONDS)
    if news.fault or news.off:
        messages.say(news.failure)
        return False
    return True
