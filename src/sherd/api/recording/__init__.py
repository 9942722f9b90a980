"""The events of a run, while they are on: its start (`run`), its `steps`, and its `layers` on request."""

from __future__ import annotations

from sherd.api.recording.run import record

__all__ = ["record"]
