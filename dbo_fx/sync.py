"""Markers for stream order in a scheduled graph; `emit` makes them calls of the runtime."""

from __future__ import annotations

from typing import Any


def record(event: int, stream: str) -> None:
    """Record an event on a stream."""
    raise AssertionError(f"record e{event} on {stream}: a marker ran; emit the graph first")


def wait(event: int, stream: str) -> None:
    """Let a stream wait for an event."""
    raise AssertionError(f"wait e{event} on {stream}: a marker ran; emit the graph first")


def keepalive(*values: Any) -> None:
    """Hold references until here: Python drops a tensor after its last use in the code."""
