"""The token of a run, by which its ranks and the launchers of its machines recognise each other."""

from __future__ import annotations

import os
import secrets

from sherd.comm.trust.seal import TOKEN, TOKEN_FILE, Seal, read_token, seal_of_token


def set_token(file: str | None, machines: int) -> Seal | None:
    """Put the token into this process's environment, which its ranks inherit; nobody else sees it there.

    It is the user's, or a new one on a single machine. Several machines have none unless the user provides it.
    """
    if file is not None:
        os.environ[TOKEN] = read_token(file, f"--token-file {file!r}")
    elif not os.environ.get(TOKEN) and (named := os.environ.get(TOKEN_FILE)):
        os.environ[TOKEN] = read_token(named, f"{TOKEN_FILE}={named!r}")
    elif not os.environ.get(TOKEN) and machines == 1:
        os.environ[TOKEN] = secrets.token_hex(32)
    return seal_of_token()
