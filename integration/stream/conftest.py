"""A stream that a test drives batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driving import Drive, driving
from psycopg2.extensions import connection as Session


@pytest.fixture
def drive(db: str, pg: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive
