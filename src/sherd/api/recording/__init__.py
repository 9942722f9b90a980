"""What a run tells of itself while events are on: its beginning (`run`), its `steps`, its `layers` on request."""

from __future__ import annotations

from sherd.api.recording.run import record

__all__ = ["record"]
