"""The options of the communicator."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sherd.config import environment
from sherd.config.options import Options, at_least, multiple_of, one_of, positive, refuse, refuse_unknown
from sherd.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

TRANSPORTS = ("auto", "host", "cluster", "c10d")
ORDERS = ("tree", "transport")
CHUNK_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True)
class CommOptions(Options):
    """How ranks communicate."""

    transport: str = "auto"
    """What carries the data: "host" (shared memory between the ranks of one host), "cluster" (shared memory inside each
    host, torch.distributed between hosts), "c10d" (torch.distributed), or "auto": the fastest that works."""

    group: int | None = None
    """G of the summation tree: sums run in rank order inside groups of G consecutive ranks, then in group order. None:
    the number of ranks per host."""

    timeout: float = 1800.0
    """Seconds to wait for a rank to reach a call before raising an error."""

    warn_after: float | None = None
    """Seconds to wait for a rank to reach a call before a warning names it; less than `timeout`. None: 30 s, or a third
    of `timeout` if that is less."""

    check: bool = True
    """Compare a fingerprint of every call between the ranks, so that mismatched calls raise an error."""

    host: str | None = None
    """A label that overrides which ranks share a host: those with the same label. None: detected."""

    order: str = "tree"
    """"tree" sums in the order of the summation tree; "transport" in the backend's own order."""

    chunk_bytes: int = 1 << 20
    """Bytes of a staging chunk of the host transport: a multiple of 4096."""

    chunks: int = 2
    """Staging chunks per rank of the host transport: how far a writer may run ahead of its readers. A small number
    stays in the cache."""

    def validate(self) -> None:
        one_of(self, "transport", TRANSPORTS)
        one_of(self, "order", ORDERS)
        at_least(self, "group", 1)
        positive(self, "timeout")
        positive(self, "warn_after")
        if self.warn_after is not None and self.warn_after >= self.timeout:
            expected = f"less than timeout={self.timeout!r}, or no warning would ever come"
            refuse(self, "warn_after", expected, f"warn_after={self.timeout / 10:g}")
        if self.host is not None and not self.host.strip():
            refuse(self, "host", "a non-empty label, or None", 'host="a"')
        multiple_of(self, "chunk_bytes", CHUNK_ALIGNMENT)
        at_least(self, "chunks", 1)

    @property
    def warn_seconds(self) -> float:
        """`warn_after`, or its default."""
        return min(30.0, self.timeout / 3) if self.warn_after is None else self.warn_after

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Options from SHERD_TRANSPORT, SHERD_TIMEOUT, SHERD_WARN_AFTER, SHERD_HOST and SHERD_CHECK.

        Arguments override the environment; an empty variable counts as unset.
        """
        refuse_unknown(cls, overrides)
        found: dict[str, str] = {}
        options = dict(overrides)
        for name, parse in _FROM_ENV.items():
            variable = f"SHERD_{name.upper()}"
            text = os.environ.get(variable, "")
            if text and name not in overrides:
                options[name] = parse(variable, text)
                found[variable] = text
        try:
            return cls(**options)
        except ConfigError as error:
            if not found:
                raise
            read = ", ".join(f"{variable}={text!r}" for variable, text in found.items())
            raise ConfigError(f"{error} (from the environment: {read})") from None


_FROM_ENV: dict[str, Callable[[str, str], object]] = {
    "transport": environment.text,
    "timeout": environment.seconds,
    "warn_after": environment.seconds,
    "host": environment.text,
    "check": environment.flag,
}
