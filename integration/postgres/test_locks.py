"""The locks of a snapshot's tables beside other people's DDL."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from databases import connect
from driving import run
from pgbouncer import pgbouncer
from psycopg2.errors import OutOfMemory
from psycopg2.extensions import connection as Session
from threads import at_work
from watch import wait_until

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.snapshots import Held, SnapshotSpec, make_snapshot
from pg_cdc_source.snapshot.board import holder_name
from pg_cdc_source.snapshot.keeper.readers import unlock
from pg_cdc_source.stream.first_rows import held_snapshot

WAITERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
LOCKS = "SELECT count(DISTINCT pid) FROM pg_locks WHERE relation = '{}'::regclass AND mode = 'AccessShareLock'"


@contextlib.contextmanager
def holding(url: str, pg: Session) -> Iterator[Held]:
    """A snapshot of two tables, and of a view of both, on two sessions."""
    run(
        pg,
        "CREATE TABLE a (id int)",
        "CREATE TABLE b (id int)",
        "CREATE VIEW ab AS SELECT a.id FROM a JOIN b USING (id)",
    )
    spec = SnapshotSpec("off", None, 10.0)
    options = parse_connection_options({"url": url})
    name_for = partial(holder_name, "k", "1")
    with contextlib.closing(make_snapshot(options, spec, name_for)) as held:
        held.add_holder(options, name_for, held.first.snapshot_id)
        yield held


@pytest.fixture
def held(db: str, pg: Session) -> Iterator[Held]:
    with holding(db, pg) as held:
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


@pytest.mark.parametrize("is_pooled", [False, pytest.param(True, marks=pytest.mark.debian)], ids=["direct", "pooled"])
def test_the_keeper_lets_tables_go_that_ddl_waits_for(is_pooled: bool, db: str, pg: Session) -> None:
    """Also behind a pooler, whose clients do not know the pids of their sessions."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(holding(stack.enter_context(pgbouncer(db, "session")) if is_pooled else db, pg))
        oids = {oid for name in "ab" for (oid,) in run(pg, f"SELECT '{name}'::regclass::oid::bigint")}
        held.lock([*oids], within_seconds=10)
        shared: Any = Mock(holding=held, locked=oids, request=Mock(execution="1"))
        executions: Any = Mock(unlock=lambda shared: shared.holding.unlock())
        unlock(pg, "k", executions, {shared: oids})
        assert run(pg, LOCKS.format("a")) == [(2,)]
        ddl = stack.enter_context(connect(db))

        def alter(_: threading.Event) -> None:
            run(ddl, "SET lock_timeout = '20s'", "ALTER TABLE a ADD v text")

        with at_work(alter):
            wait_until(lambda: run(pg, WAITERS) == [(1,)])
            unlock(pg, "k", executions, {shared: oids})
        assert run(pg, LOCKS.format("a")) == [(0,)]


def test_a_server_without_room_for_further_locks_has_it_back(held: Held, db: str, pg: Session) -> None:
    run(pg, "DO $$ BEGIN FOR i IN 1 .. 60 LOOP EXECUTE format('CREATE TABLE many_%s (id int PRIMARY KEY)', i);"
            " END LOOP; END $$")  # fmt: skip
    oids = [oid for (oid,) in run(pg, "SELECT oid::bigint FROM pg_class WHERE relname LIKE 'many%' AND relkind = 'r'")]
    of_holders = "SELECT count(*) FROM pg_locks WHERE relation = ANY (%s)"
    with connect(db) as other, contextlib.ExitStack() as stack:
        with pytest.raises(OutOfMemory):
            run(other, "SELECT pg_advisory_lock(n) FROM generate_series(1, 1000000) AS n")
        stack.callback(run, other, "SELECT pg_advisory_unlock_all()")
        with pytest.raises(TransientError, match="no room for further locks: out of shared memory"):
            held.lock(oids, within_seconds=60)
        with pg.cursor() as cursor:
            cursor.execute(of_holders, (oids,))
            assert cursor.fetchone() == (0,)


def test_tables_of_a_stream_are_locked_a_part_at_a_time(
    held: Held, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    lock = Held.lock
    locked = (
        "SELECT count(DISTINCT relation) FROM pg_locks"
        " WHERE relation IN ('a'::regclass, 'b'::regclass) AND mode = 'AccessShareLock'"
    )

    def noting(self: Held, oids: Sequence[int], *, within_seconds: float) -> None:
        lock(self, oids, within_seconds=within_seconds)
        most.append(run(pg, locked)[0][0])

    monkeypatch.setattr(held_snapshot, "_LOCKED_AT_ONCE", 1)
    monkeypatch.setattr(Held, "lock", noting)
    planned: list[Any] = [
        Mock(oid=oid) for name in "ab" for (oid,) in run(pg, f"SELECT '{name}'::regclass::oid::bigint")
    ]
    held_snapshot.check_files(held, planned)
    assert most == [1, 1]
    run(pg, "TRUNCATE b")
    with pytest.raises(SchemaChangedError, match="b was truncated or rewritten"):
        held_snapshot.check_files(held, planned)


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
