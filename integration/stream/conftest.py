"""A stream that a test drives batch by batch, or that drives itself as its errors say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from driving import Drive, driving
from obedient import Obedient
from psycopg2.extensions import connection as Session

from pg_cdc_source.stream import next_offset
from pg_cdc_source.stream.tables import looks


@pytest.fixture
def drive(db: str, pg: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


@pytest.fixture
def obedient(pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Obedient]:
    """``obedient(tables=…)`` starts a stream with a sink and an operator."""
    # Batches are asked for until all is there, so nothing is to be waited for and everything to be looked at.
    monkeypatch.setattr(next_offset, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(next_offset, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.0)
    return functools.partial(Obedient, pg, drive)
