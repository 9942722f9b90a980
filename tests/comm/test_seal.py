"""Seals: what was sealed is opened, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.comm.trust.seal import Seal, seal_of_token
from sherd.errors import ConfigError

pytestmark = pytest.mark.pure

SEAL = Seal(b"a key")


@given(st.text(), st.binary())
def test_what_was_sealed_is_opened(label: str, data: bytes) -> None:
    assert SEAL.opened(label, SEAL.sealed(label, data)) == data


@given(st.text(), st.binary(), st.integers(0, 7), st.data())
def test_a_changed_bit_is_found(label: str, data: bytes, bit: int, draw: st.DataObject) -> None:
    sealed = bytearray(SEAL.sealed(label, data))
    sealed[draw.draw(st.integers(0, len(sealed) - 1))] ^= 1 << bit
    assert SEAL.opened(label, bytes(sealed)) is None


@given(st.text(max_size=4), st.text(max_size=4), st.binary())
def test_nothing_can_be_put_in_anothers_place(one: str, other: str, data: bytes) -> None:
    assert one == other or SEAL.opened(other, SEAL.sealed(one, data)) is None


@given(st.binary())
def test_garbage_is_not_opened(garbage: bytes) -> None:
    assert SEAL.opened("", garbage) is None


def test_other_keys_do_not_open_it() -> None:
    sealed = SEAL.sealed("label", b"data")
    for other in (Seal(b"another key"), SEAL.derived("label")):
        assert other.opened("label", sealed) is None
    assert SEAL.derived("x").opened("label", SEAL.derived("x").sealed("label", b"data")) == b"data"
    assert "a key" not in repr(SEAL)


def test_the_token_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SHERD_TOKEN", "SHERD_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert seal_of_token() is None
    (tmp_path / "token").write_text(f"{'t' * 32}\n")
    monkeypatch.setenv("SHERD_TOKEN_FILE", str(tmp_path / "token"))
    from_file = seal_of_token()
    monkeypatch.setenv("SHERD_TOKEN", "t" * 32)
    from_environment = seal_of_token()
    assert from_file is not None and from_environment is not None
    assert from_file.opened("label", from_environment.sealed("label", b"data")) == b"data"


def test_a_token_that_is_short_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHERD_TOKEN", "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        seal_of_token()
    monkeypatch.setenv("SHERD_TOKEN", "")
    monkeypatch.setenv("SHERD_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        seal_of_token()
