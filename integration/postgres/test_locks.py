"""The locks of a snapshot's tables beside other people's DDL."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session
from threads import at_work
from watch import wait_until

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.snapshots import Held, SnapshotSpec, make_snapshot

WAITERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
LOCKS = "SELECT count(DISTINCT pid) FROM pg_locks WHERE relation = '{}'::regclass AND mode = 'AccessShareLock'"


@pytest.fixture
def held(db: str, pg: Session) -> Iterator[Held]:
    """A snapshot of two tables, and of a view of both, on two sessions."""
    run(
        pg,
        "CREATE TABLE a (id int)",
        "CREATE TABLE b (id int)",
        "CREATE VIEW ab AS SELECT a.id FROM a JOIN b USING (id)",
    )
    spec = SnapshotSpec("off", None, 10.0)
    options = parse_connection_options({"url": db})
    with contextlib.closing(
        make_snapshot(options, spec, lambda found: f"pgsnapshot:test:1:{found}", holders=2)
    ) as held:
        yield held


@pytest.mark.parametrize("names", [("a", "b"), ("ab",)])
def test_ddl_that_locks_tables_in_another_order_comes_first(
    names: tuple[str, ...], held: Held, db: str, pg: Session
) -> None:
    oids = [oid for name in names for (oid,) in run(pg, f"SELECT '{name}'::regclass::oid::bigint")]
    held.lock(oids[: len(oids) - 1], within_seconds=10)
    with connect(db) as ddl:
        run(ddl, "SET deadlock_timeout = '50ms'", "BEGIN", "LOCK TABLE b")
        locked = threading.Event()

        def lock(_: threading.Event) -> None:
            run(ddl, "LOCK TABLE a")
            locked.set()
            # Nothing of it is had while somebody else has a part.
            wait_until(lambda: run(pg, LOCKS.format("a")) == [(0,)])
            run(ddl, "COMMIT")

        with at_work(lock):
            if len(names) > 1:
                wait_until(lambda: run(pg, WAITERS) == [(1,)])
            held.lock(oids, within_seconds=60)
            assert locked.is_set()
    assert [run(pg, LOCKS.format(table)) for table in ("a", "b")] == [[(2,)], [(2,)]]


def test_locks_stay_while_nobody_waits_for_them(held: Held, db: str, pg: Session) -> None:
    oids = [oid for name in "ab" for (oid,) in run(pg, f"SELECT '{name}'::regclass::oid::bigint")]
    held.lock(oids[:1], within_seconds=10)
    with connect(db) as ddl:
        run(ddl, "BEGIN", "LOCK TABLE b")
        with pytest.raises(
            TransientError, match=r"public\.b could not be locked for .* within 0\.5 s; locked are public\.b by pid"
        ):
            held.lock(oids, within_seconds=0.5)
        assert run(pg, LOCKS.format("a")) == [(2,)]
    held.lock(oids, within_seconds=10)
