"""Tables that join a stream, held back so that the stream is ahead of them."""

from __future__ import annotations

import threading

import pytest

from pg_cdc_source.stream.joining import Joining

# A session that holds the snapshot of tables that join: its consistent point is behind.
HELD = (
    "SELECT 1 FROM pg_stat_activity WHERE application_name ~ ':snapshot'"
    " AND backend_type = 'client backend' AND state = 'idle in transaction'"
)


def hold_joins_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No table joins before the event is set."""
    take, late = Joining.take, threading.Event()
    monkeypatch.setattr(Joining, "take", lambda self, *patience: take(self, *patience) if late.is_set() else None)
    return late
