"""What a rank calls, and from where: the text that errors show, and the fingerprint that ranks compare.

A *call* is an operation with its dtypes, shapes and options; all ranks must make the same call. A *site* is the line of
the user's program that made it; sites may differ between ranks.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_OURS = tuple(f"{_PACKAGE}/{part}" for part in ("comm", "data", "engine", "strategies", "api", "checkpoint", "elastic"))
_TORCH = str(Path(torch.__file__).resolve().parent)
MAX_TEXTS = 16_384
_inner: dict[int, tuple[bool, CodeType]] = {}
_texts: dict[Site, str] = {}
_labels: dict[int, Site] = {}  # by thread


@dataclass(frozen=True, eq=False)
class Call:
    """An operation with its dtypes, shapes and options. A communicator keeps one object per call."""

    operation: str
    text: str
    compared: str = ""  # what ranks must agree on, where it is not the text: a send must match a recv
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b((self.compared or self.text).encode(), digest_size=8).digest()
        object.__setattr__(self, "fingerprint", int.from_bytes(digest, "little") >> 1)

    def made_at(self, site: Site) -> str:
        """The call and the line that made it, for messages."""
        return f"{self.text} at {site_text(site)}"


def describe(operation: str, dtype: torch.dtype, shape: Iterable[int], *details: str) -> str:
    """`all_reduce(float32[3, 4], sum)`: a call as it is written in messages."""
    tensor = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return f"{operation}({', '.join([tensor, *filter(None, details)])})"


Site = tuple[int, int]
"""Identifies a line cheaply: its code object, and where in that. `site_text` turns it into text."""


def call_site(depth: int = 2) -> Site:
    """The innermost line outside sherd and torch, from `depth` frames up, or the label in force.

    It is taken for every call, so it has to be cheap: well under a microsecond for a line that was seen before.
    """
    if _labels and (label := _labels.get(threading.get_ident())) is not None:
        return label
    frame = sys._getframe(depth)
    while True:
        # By identity: hashing a code object hashes its constants. `_inner` keeps the code objects alive.
        code = frame.f_code
        known = _inner.get(id(code))
        if known is None:
            ours = code.co_filename.startswith((*_OURS, _TORCH, "<"))
            known = _inner[id(code)] = (ours, code)
        if not known[0] or frame.f_back is None:
            break
        frame = frame.f_back
    site = (id(code), frame.f_lasti)
    if site not in _texts:
        _remember(site, f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
    return site


def site_text(site: Site) -> str:
    return _texts.get(site, "a line that is no longer remembered")


def _remember(site: Site, text: str) -> None:
    if len(_texts) >= MAX_TEXTS:
        _texts.clear()  # labels that change with every step must not pile up
    _texts[site] = text


@contextmanager
def labelled(text: str, note: str = "") -> Iterator[None]:
    """Use `text` as the site of all calls inside: what an engine is doing says more than the line of its loop.

    `note` is for calls that this rank may be making alone: an error that other ranks see first then begins with it. It
    must not contain brackets.
    """
    text = f"{text} [note: {note}]" if note else text
    thread = threading.get_ident()
    before = _labels.get(thread)
    site = (-1, hash(text))
    _remember(site, text)
    _labels[thread] = site
    try:
        yield
    finally:
        del _labels[thread]
        if before is not None:
            _labels[thread] = before
