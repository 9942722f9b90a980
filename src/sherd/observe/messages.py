"""The texts of a run: samples that it produced, warnings and errors."""

from __future__ import annotations

from dataclasses import dataclass

from sherd.observe.events import Event

MESSAGES = ("warning", "error", "comm.late", "comm.lost", "comm.diverged")


@dataclass(frozen=True)
class TextSample:
    """A text that the run produced."""

    step: int | None
    t: float
    rank: int
    title: str
    text: str


@dataclass(frozen=True)
class Message:
    """A warning or an error. `kind` is the kind of its event."""

    kind: str
    t: float
    rank: int
    step: int | None
    text: str


def text_of(event: Event) -> str:
    """The text of a warning or an error."""
    if event.kind == "comm.late":
        late = ", ".join(map(str, event.fields["ranks"]))
        return f"{event.fields['call']}: waited {event.fields['seconds']:.0f} s for ranks {late}"
    return str(event.fields.get("text", ""))
