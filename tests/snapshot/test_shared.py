"""What becomes of a pool of snapshots where another one cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.postgres.instances import Instance
from pg_cdc_source.postgres.snapshots import Held, Holder, SnapshotSpec
from pg_cdc_source.postgres.standby_snapshots import IncompleteSnapshotError
from pg_cdc_source.snapshot.board import Request
from pg_cdc_source.snapshot.keeper import shared
from pg_cdc_source.snapshot.keeper.shared import Shared, SnapshotWork

INSTANCE = Instance("2026-11-22 18:00:00.123456", "10.0.0.1:5432", True)
REQUEST = Request("17", 60.0, 20, True, "/lsn", SnapshotSpec("auto", None, 10.0))


@dataclass
class Session:
    """The session that exports a pool's snapshots."""

    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


class Workers:
    """Does at once what threads would do."""

    def submit(self, work: Callable[[], Callable[[], None]]) -> None:
        work()()


@pytest.mark.parametrize(
    ("error", "is_lost"), [(IncompleteSnapshotError("some are running"), False), (TransientError("gone"), True)]
)
def test_a_pool_is_lost_with_its_session_alone(
    error: TransientError, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(session: object) -> str:
        raise error

    monkeypatch.setattr(shared, "export_snapshot", export)
    session = Session()
    pool = Shared(REQUEST, ("first",), pool=True)
    pool.held = Held(None, INSTANCE, holders=[Holder(cast(Any, session), "00000003-0000001B-1")])
    refused: list[PgCdcError | None] = []
    work = SnapshotWork(cast(Any, None), "keeper", cast(Any, Workers()), lambda *_: pytest.fail("the pool has ended"))
    work.export(pool, ("second",), refused.append)
    assert session.is_closed == is_lost
    assert refused == [None if is_lost else error]
    assert not pool.busy
