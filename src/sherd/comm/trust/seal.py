"""Seals: how ranks tell what another rank wrote from what a stranger wrote to the same place.

A seal is a key that the ranks of a job share. What is written where others can write too (a store, a socket) carries an
HMAC made with it, over the data and over a label that says what it is, so that nothing can be passed off as something
else. The key comes from the job's token: `sherd run` gives its ranks one, and several hosts find theirs in SHERD_TOKEN,
or in the file that SHERD_TOKEN_FILE names.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from sherd.errors import ConfigError

TOKEN, TOKEN_FILE = "SHERD_TOKEN", "SHERD_TOKEN_FILE"
SHORTEST = 16  # characters of a token
MAC_BYTES = hashlib.sha256().digest_size


class Seal:
    """A key, and what can be done with it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "Seal(...)"  # never the key: it would end up in logs

    def sealed(self, label: str, data: bytes) -> bytes:
        """`data` with its HMAC in front."""
        return self._mac(label, data) + data

    def opened(self, label: str, sealed: bytes) -> bytes | None:
        """The data, or None if it was not sealed with this key under this label."""
        mac, data = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        return data if hmac.compare_digest(mac, self._mac(label, data)) else None

    def derived(self, label: str) -> Seal:
        """A key for one use, from which this one cannot be found."""
        # It starts with what cannot be the length of a label: no HMAC of `sealed` is ever this key.
        return Seal(hmac.digest(self._key, b"\xff" * 8 + label.encode(), "sha256"))

    def _mac(self, label: str, data: bytes) -> bytes:
        name = label.encode()
        return hmac.digest(self._key, len(name).to_bytes(8, "little") + name + data, "sha256")


def seal_of_token() -> Seal | None:
    """The seal of the token in this process's environment; None without one."""
    named = os.environ.get(TOKEN_FILE, "")
    token = os.environ.get(TOKEN, "") or (read_token(named, f"{TOKEN_FILE}={named!r}") if named else "")
    if not token:
        return None
    if len(token) < SHORTEST:
        raise ConfigError(
            f"the token in {TOKEN} has {len(token)} characters, which can be guessed; write at least "
            f"{SHORTEST}, such as those that `python -c 'import secrets; print(secrets.token_hex())'` prints"
        )
    return Seal(token.encode()).derived("sherd")


def read_token(file: str, named: str) -> str:
    """The token in a file, which errors call `named`."""
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{named} cannot be read ({reason}); write the path of a file with the token") from error
    if not token:
        raise ConfigError(
            f"{named} is empty; write at least {SHORTEST} random characters into it, such as those of "
            "`openssl rand -hex 32`"
        )
    return token
