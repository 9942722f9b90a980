"""Every environment variable that sherd reads. A test keeps this list and docs/running.md complete."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from sherd.cli.options import STRATEGIES
from sherd.config import CommOptions, flag_from_env
from sherd.errors import ConfigError, nearest

PREFIX = "SHERD_"

VARIABLES = {
    "SHERD_CHECK": "which checks of the ranks' calls are made, see `sherd.CommOptions`",
    "SHERD_EVENTS": "a directory where ranks write their events; `sherd run --events` sets it",
    "SHERD_HOST": "the name of this host, to make ranks of one machine count as several hosts",
    "SHERD_KEEP_FREED_MEMORY": "1: the `sherd` backend of torch.distributed keeps freed memory for the next call",
    "SHERD_LAYERS": "1: events have norms and update ratios per layer; `sherd run --layers` sets it",
    "SHERD_SPIN": "0: waiting ranks sleep at once, because other programs need the cores",
    "SHERD_STRATEGY": "the strategy of every `distribute` without `strategy=`; `sherd run --strategy` sets it",
    "SHERD_TIMEOUT": "seconds that a rank waits for the others in a call, see `sherd.CommOptions`",
    "SHERD_TOKEN": "the secret that the ranks of a run share; `sherd run` sets it",
    "SHERD_TOKEN_FILE": "a file that holds this secret",
    "SHERD_TRANSPORT": "how ranks exchange data, see `sherd.CommOptions`",
    "SHERD_WARN_AFTER": "seconds after which a waiting rank says for whom it waits, see `sherd.CommOptions`",
}

FLAGS = ("SHERD_KEEP_FREED_MEMORY", "SHERD_LAYERS", "SHERD_SPIN")


def misspelt(environ: Iterable[str]) -> list[str]:
    """A sentence about each variable that looks like one of sherd's but is not."""
    return [_about(name) for name in sorted(environ) if name.startswith(PREFIX) and name not in VARIABLES]


def check_values(environ: Mapping[str, str]) -> None:
    """Refuse, in one line, what every rank would refuse."""
    CommOptions.from_env()
    for name in FLAGS:
        flag_from_env(name, False)
    if (strategy := environ.get("SHERD_STRATEGY", "")) and strategy not in STRATEGIES:
        raise ConfigError(f"SHERD_STRATEGY={strategy!r} is not a strategy; {nearest(strategy, STRATEGIES)}")


def _about(name: str) -> str:
    # Without the common prefix, which would make any two names similar.
    known = [each.removeprefix(PREFIX) for each in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.6)
    hint = f"did you mean {PREFIX}{close[0]}?" if close else "docs/running.md lists the variables"
    return f"{name} is not known; {hint}"
