"""Values of environment variables."""

from __future__ import annotations

import os

from sherd.errors import ConfigError


def text(variable: str, text: str) -> str:
    return text


def seconds(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} must be a number of seconds, such as {variable}=60") from None


def flag_from_env(variable: str, default: bool) -> bool:
    """0 or 1 in the environment; the default if it is unset or empty."""
    text = os.environ.get(variable, "")
    return flag(variable, text) if text else default


def flag(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{variable}={text!r} must be 0 or 1; write {variable}=1 to turn it on")
    return text == "1"
