"""Tables that join a stream, leave it and come back: the rows end right, and nothing is passed over in silence."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from corners import cases
from databases import connect
from driving import Driver, Row, driving, drop_slots, is_one_commit, kinds, run, values
from joining_late import HELD, hold_joins_back
from psycopg2.extensions import connection as Session
from replica import upserted
from synchronous import before_horizon, waiting_for_a_standby
from threads import at_work
from watch import wait_until

from pg_cdc_source.errors import OptionError, PgCdcError, SchemaChangedError, SlotLostError, TransientError
from pg_cdc_source.offsets import Position
from pg_cdc_source.postgres import attached
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.decoding_messages import MESSAGES_VERSION
from pg_cdc_source.postgres.horizon import wait_until_seen
from pg_cdc_source.postgres.locks import begin_locking, lock_relations
from pg_cdc_source.protocol.decoding_messages import Asked, write_request
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream import joins
from pg_cdc_source.stream.batch_reading import BatchReading
from pg_cdc_source.stream.layouts import schema_history
from pg_cdc_source.stream.membership import Membership
from pg_cdc_source.stream.next_offset import NextOffset
from pg_cdc_source.stream.tables import looks, slot_history
from pg_cdc_source.stream.tables.look_pace import LookPace

Drive = Callable[..., Driver]
T = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
U = ("CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a'), (2, 'b')")
ALL_TABLES = "CREATE PUBLICATION s FOR ALL TABLES"
BOTH = "CREATE PUBLICATION s FOR TABLE t, u"


@pytest.fixture
def drive(pg: Session, db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


def replica(rows: Iterable[Row]) -> dict[str, dict[int, str]]:
    """What a sink has that upserts by key in the order of the stream."""
    return {name: table for name, table in upserted([rows]).items() if table}


def source(pg: Session, *tables: str) -> dict[str, dict[int, str]]:
    found = {f"public.{table}": dict(run(pg, f"SELECT id, v FROM {table}")) for table in tables}
    return {name: rows for name, rows in found.items() if rows}


def until_equal(driver: Driver, pg: Session, *tables: str) -> list[Row]:
    """Run batches until a replica of all rows equals the source; the rows that came."""
    rows: list[Row] = []

    def same() -> bool:
        rows.extend(driver.batch())
        return replica(driver.rows) == source(pg, *tables)

    try:
        wait_until(same, 60)
    except AssertionError:
        raise AssertionError(f"{replica(driver.rows)} is not {source(pg, *tables)}; these came: {rows}") from None
    return rows


def going_on(driver: Driver, until: Callable[[], object], seconds: float = 60) -> None:
    """Run batches until it is so."""

    def look() -> object:
        driver.batch()
        return until()

    wait_until(look, seconds)


def the_slot_moves_on(driver: Driver, pg: Session) -> None:
    """Behind what is in the WAL now, as soon as a change comes."""
    [(end,)] = run(pg, "SELECT pg_current_wal_lsn()::text")
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    going_on(driver, lambda: run(pg, f"SELECT 1 FROM pg_replication_slots WHERE confirmed_flush_lsn >= '{end}'"), 30)


def standing(drive: Drive, pg: Session, *statements: str, **options: str) -> Driver:
    """A stream that has read its tables, after these statements."""
    run(pg, *statements)
    driver = drive(**options)
    until_equal(driver, pg, *(statement.split()[2] for statement in statements if statement.startswith("CREATE TABLE")))
    driver.batch()
    return driver


def ask_for(pg: Session, table: str) -> None:
    run(pg, f"SELECT pg_logical_emit_message(true, 'pgcdc', '{write_request(Asked((table,)))}')")


def begun_by_a_process_that_ended(drive: Drive, **options: str) -> None:
    """The slot is there, and Spark's checkpoint has nothing."""
    driver = drive(tables="public.*", **options)
    driver.attempt(read=False)
    driver.stop()


def lose_slot(pg: Session, *statements: str) -> None:
    """Drop the slot while a stream reads it, and run statements."""
    run(pg, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's' AND active")
    wait_until(lambda: run(pg, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 's' AND NOT active"))
    run(pg, "SELECT pg_drop_replication_slot('s')", *statements)


def snapshot_of(driver: Driver, table: str) -> list[Row]:
    """The rows of a table that have come, not the changes."""
    return [
        json.loads(row["after"]) for row in driver.rows if (row["_table"], row["_change_type"]) == (table, "snapshot")
    ]


def get_ahead_of_a_join(driver: Driver, pg: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a change of t behind the point of u, plan the batch in which u joins, and stop before it is read."""
    late = hold_joins_back(monkeypatch)
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    going_on(driver, lambda: run(pg, HELD))
    run(pg, "INSERT INTO t VALUES (2, 'behind the point')")
    driver.take(1)
    late.set()
    wait_until(lambda: driver.plan(read=False))
    driver.stop()


@contextmanager
def writing(db: str, *statements: str) -> Iterator[None]:
    """Other sessions run the statements, one each, again and again."""

    def writer(statement: str) -> Callable[[threading.Event], None]:
        def write(stop: threading.Event) -> None:
            with connect(db) as session, session.cursor() as cursor:
                while not stop.is_set():
                    cursor.execute(statement)

        return write

    with at_work(*map(writer, statements)):
        yield


# --- gaps while the query is down ------------------------------------------------------------------------------------


@pytest.mark.corner
@pytest.mark.parametrize("tables", ["public.*", "t,u"])
def test_a_table_that_was_out_of_the_publication_comes_again(tables: str, pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables=tables)
    driver.stop()
    run(pg, "ALTER PUBLICATION s DROP TABLE u", "INSERT INTO u VALUES (3, 'missed')", "DELETE FROM u WHERE id = 1",
        "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO u VALUES (4, 'sent')")  # fmt: skip
    driver.start()
    rows = until_equal(driver, pg, "t", "u")
    assert [(row["_table"], row["_change_type"]) for row in rows if row["_change_type"] != "insert"] == [
        ("public.u", "truncate"), *[("public.u", "snapshot")] * 3
    ]  # fmt: skip


def test_a_gap_is_an_error_where_nobody_reads_anew(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onNewTable="fail")
    driver.stop()
    run(pg, "ALTER PUBLICATION s DROP TABLE u", "INSERT INTO u VALUES (3, 'missed')", "ALTER PUBLICATION s ADD TABLE u")
    for mode in ("fail", "fail", "changes"):
        driver.restart(onNewTable=mode)
        driver.refusal("publication s has public.u anew: it was dropped from it and added again", "onNewTable=snapshot")
    driver.restart(onNewTable="snapshot")
    until_equal(driver, pg, "t", "u")


@pytest.mark.matrix("tables that join, leave and come back")
@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_table_that_leaves_does_so_with_an_event_and_comes_back_whole(down: bool, pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*")
    if down:
        driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'sent')", "ALTER PUBLICATION s DROP TABLE u",
        "INSERT INTO u VALUES (4, 'missed')", "INSERT INTO t VALUES (2, 'x')")  # fmt: skip
    if down:
        driver.start()
    driver.refusal("publication s has lost public.u", "onSchemaChange=ignore", rows=2 if HAS_LIMITS else None)
    driver.restart()
    driver.refusal("publication s has lost public.u")
    driver.restart(onSchemaChange="ignore")
    run(pg, "INSERT INTO t VALUES (3, 'y')")
    going_on(driver, lambda: replica(driver.rows).get("public.t") == source(pg, "t")["public.t"])
    assert replica(driver.rows)["public.u"] == {1: "a", 2: "b", 3: "sent"}
    going_on(driver, lambda: "public.u" not in [member.name for member in driver.members])
    driver.restart(onSchemaChange="fail")
    run(pg, "ALTER PUBLICATION s ADD TABLE u", "DELETE FROM u WHERE id = 1")
    until_equal(driver, pg, "t", "u")


def test_a_table_that_is_not_named_any_more_leaves_without_an_error(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="t,u")
    driver.restart(tables="t")
    run(pg, "INSERT INTO u VALUES (3, 'c')", "INSERT INTO t VALUES (2, 'b')")
    assert values(driver.take(1), "_table") == [("public.t",)]
    driver.restart(tables="t,u")
    until_equal(driver, pg, "t", "u")


@pytest.mark.parametrize("options", [{"tables": "public.*"}, {"tables": "t,u"}], ids=["pattern", "list"])
@pytest.mark.parametrize("publication", [ALL_TABLES, BOTH])
@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_table_that_was_created_again_is_another(
    options: dict[str, str], publication: str, down: bool, pg: Session, drive: Drive
) -> None:
    driver = standing(drive, pg, *T, *U, publication, **options)
    if down:
        driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'old')", "DROP TABLE u", "CREATE TABLE u (id int PRIMARY KEY, v text, w int)",
        "INSERT INTO u VALUES (7, 'new', 1)", *(["ALTER PUBLICATION s ADD TABLE u"] if publication == BOTH else []),
        "INSERT INTO u VALUES (8, 'newer', 2)")  # fmt: skip
    if down:
        driver.start()
    until_equal(driver, pg, "t", "u")
    run(pg, "INSERT INTO u VALUES (9, 'newest', 3)")
    assert values(until_equal(driver, pg, "t", "u"), "_change_type") == [("insert",)]


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_the_one_table_of_a_stream_that_was_created_again(down: bool, pg: Session, drive: Drive) -> None:
    run(pg, *T, ALL_TABLES)
    driver = drive(dbtable="t")
    driver.take(1)
    driver.batch()
    if down:
        driver.stop()
    run(pg, "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (5, 'new')")
    for _ in range(2):
        driver.restart()
        driver.refusal("public.t was dropped and created again", "onNewTable=snapshot", "new checkpoint")
    driver.restart(onNewTable="snapshot")
    rows = driver.take(2)
    assert values(sorted(rows, key=lambda row: row["_commit_lsn"]), "_change_type", "id", "v") == [
        ("truncate", None, None), ("snapshot", 5, "new")
    ]  # fmt: skip


def test_partitions_that_were_published_by_themselves_for_a_while(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)", "INSERT INTO p VALUES (1, 'a')",
        "CREATE PUBLICATION s FOR ALL TABLES WITH (publish_via_partition_root = true)")  # fmt: skip
    driver = drive(tables="public.*", onSchemaChange="ignore")
    until_equal(driver, pg, "p")
    driver.batch()
    driver.stop()
    run(pg, "ALTER PUBLICATION s SET (publish_via_partition_root = false)", "INSERT INTO p VALUES (2, 'as p1')",
        "ALTER PUBLICATION s SET (publish_via_partition_root = true)", "INSERT INTO p VALUES (3, 'as p')")  # fmt: skip
    driver.start()
    if pg.server_version >= 150000:
        until_equal(driver, pg, "p")


def test_kinds_of_changes_that_were_left_out_for_a_while(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*")
    driver.stop()
    run(pg, "ALTER PUBLICATION s SET (publish = 'insert')", "UPDATE t SET v = 'missed'",
        "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')")  # fmt: skip
    driver.start()
    if pg.server_version >= 150000:
        until_equal(driver, pg, "t", "u")


# --- tables that join while the stream runs --------------------------------------------------------------------------


@pytest.mark.matrix("tables that join, leave and come back")
def test_a_table_joins_under_load_and_others_go_on(pg: Session, db: str, drive: Drive) -> None:
    run(pg, *T, *U, "CREATE TABLE x (id int PRIMARY KEY, v text)", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    insert = "INSERT INTO {0} SELECT coalesce(max(id), 0) + 1, 'new' FROM {0}"
    update = "UPDATE u SET v = v || 'x' WHERE id = 1"
    with connect(db) as old, old.cursor() as writer:
        writer.execute("BEGIN; INSERT INTO u VALUES (-1, 'before it was published')")
        with writing(db, insert.format("t"), insert.format("x"), update):
            run(pg, "ALTER PUBLICATION s ADD TABLE u, x")
            # The creation of the slot waits for the old transaction; the stream does not.
            going_on(driver, lambda: run(pg, "SELECT 1 FROM pg_replication_slots WHERE temporary"))
            seen = len(driver.rows)
            going_on(driver, lambda: len(driver.rows) > seen + 20)
            assert {row["_table"] for row in driver.rows} == {"public.t"}
            writer.execute("INSERT INTO u VALUES (-2, 'after it was published'); COMMIT")
            going_on(driver, lambda: "public.u" in {row["_table"] for row in driver.rows}, 60)
            seen = len(driver.rows)
            going_on(driver, lambda: len(driver.rows) > seen + 50)
    until_equal(driver, pg, "t", "u", "x")
    changes = [(row["_commit_lsn"], row["_seq"], row["_table"]) for row in driver.rows if row["_seq"]]
    assert len({change[:2] for change in changes}) == len(changes)
    for table in ("public.t", "public.u", "public.x"):
        of_one = [change for change in changes if change[2] == table]
        assert of_one == sorted(of_one)


def begin_slot(driver: Driver, pg: Session, db: str, last: Session) -> None:
    """Publish u, and go on until only ``last`` keeps the slot for it from its point, whatever begins from here on."""
    begun = "BEGIN", "SELECT txid_current() % (1::bigint << 32)"
    waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND transactionid = '{}'"
    with connect(db) as first:
        [(xid,)] = run(first, *begun)
        run(pg, "ALTER PUBLICATION s ADD TABLE u")
        going_on(driver, lambda: run(pg, waiting.format(xid)))
        [(xid,)] = run(last, *begun)
        run(first, "COMMIT")
    going_on(driver, lambda: run(pg, waiting.format(xid)))


def test_a_table_that_is_published_while_a_snapshot_is_taken_waits_for_another_one(
    pg: Session, db: str, drive: Drive
) -> None:
    """The point does not wait for transactions that began meanwhile, and may have written to it before."""
    run(pg, *T, *U, "CREATE TABLE x (id int PRIMARY KEY, v text)", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    with connect(db) as second, connect(db) as third:
        begin_slot(driver, pg, db, second)
        run(third, "BEGIN", "INSERT INTO x VALUES (7, 'before it was published')")
        run(pg, "ALTER PUBLICATION s ADD TABLE x")
        run(second, "COMMIT")
        going_on(driver, lambda: "public.u" in {row["_table"] for row in driver.rows})
        run(third, "COMMIT")
    until_equal(driver, pg, "t", "u", "x")


def test_all_tables_wait_for_another_snapshot_where_the_publication_is_altered_meanwhile(
    pg: Session, db: str, drive: Drive
) -> None:
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", onSchemaChange="emit")
    going_on(driver, lambda: "snapshot" in kinds(driver.rows))
    with connect(db) as second, connect(db) as third:
        begin_slot(driver, pg, db, second)
        run(pg, "ALTER PUBLICATION s SET (publish = 'update')")
        run(third, "BEGIN", "INSERT INTO u VALUES (7, 'left out')")
        run(pg, "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')")
        run(second, "COMMIT")
        going_on(driver, lambda: not run(pg, "SELECT 1 FROM pg_replication_slots WHERE temporary"))
        run(third, "COMMIT")
    until_equal(driver, pg, "t", "u")


def test_the_slot_moves_on_where_a_table_is_gone_whose_snapshot_came_to_nothing(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.0)
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*")
    refused = threading.Event()
    monkeypatch.setattr(joins, "_with_their_files", lambda *_: refused.set())
    run(pg, *U)
    going_on(driver, refused.is_set)
    run(pg, "DROP TABLE u")
    the_slot_moves_on(driver, pg)


def test_the_slot_moves_on_though_spark_does_not_name_the_batch_in_which_a_table_joined(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.0)
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*")
    driver.names_commits = False
    run(pg, *U)
    until_equal(driver, pg, "t", "u")
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    driver.take(1)
    driver.names_commits = True
    the_slot_moves_on(driver, pg)


def test_what_the_checkpoint_may_not_have_yet_is_there_after_a_crash(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new reader of the slot, as one for another plan, begins where only Spark's memory is."""
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.0)
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*")
    kept = json.dumps(driver.offset.to_json())
    driver.names_commits = False
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    driver.take(1)
    run(pg, *U)
    until_equal(driver, pg, "t", "u")
    run(pg, "INSERT INTO u VALUES (3, 'c')")
    driver.take(1)
    driver.stop()
    driver.continue_from(kept)
    driver.start()
    count = len(driver.rows)
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    going_on(driver, lambda: [row for row in driver.rows[count:] if '"id":4' in (row["after"] or "").replace(" ", "")])
    until_equal(driver, pg, "t", "u")
    found = [json.loads(row["after"])["id"] for row in driver.rows[count:] if row["_table"] == "public.t"]
    assert found == [2, 4]


def test_a_stream_that_is_ahead_of_the_consistent_point_goes_back_for_the_table(
    pg: Session, db: str, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The point is known only after it was passed."""
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    late = hold_joins_back(monkeypatch)
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    going_on(driver, lambda: run(pg, HELD))
    for i in range(5):
        run(pg, f"INSERT INTO u VALUES ({10 + i}, 'changed')", f"UPDATE u SET v = '{i}' WHERE id = 1",
            f"INSERT INTO t VALUES ({10 + i}, 'x')")  # fmt: skip
        driver.take(1)
    before = driver.offset.position
    late.set()
    rows = until_equal(driver, pg, "t", "u")
    assert driver.offset.position == before
    assert kinds(rows) == ["truncate", "snapshot", "snapshot", *["insert", "update"] * 5]
    run(pg, "INSERT INTO u VALUES (99, 'z')", "INSERT INTO t VALUES (99, 'z')")
    assert kinds(driver.take(2)) == ["insert", "insert"]


def test_the_slot_stays_for_a_table_that_joins_when_another_one_leaves(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream reads anew from where it is, beyond the point of the one that joins."""
    run(pg, *T, *U, "CREATE TABLE x (id int PRIMARY KEY, v text)", "CREATE PUBLICATION s FOR TABLE t, x")
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    late = hold_joins_back(monkeypatch)
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    going_on(driver, lambda: run(pg, HELD))
    run(pg, "INSERT INTO u VALUES (10, 'x')", "INSERT INTO t VALUES (10, 'x')")
    driver.take(1)
    run(pg, "ALTER PUBLICATION s DROP TABLE x")
    going_on(driver, lambda: "public.x" not in [member.name for member in driver.members])
    run(pg, "INSERT INTO u VALUES (11, 'x')", "INSERT INTO t VALUES (11, 'x')")
    driver.take(1)
    late.set()
    until_equal(driver, pg, "t", "u")


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark gives no start")
def test_a_rename_is_not_passed_over_where_the_stream_goes_back_for_another_table(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server describes the table for a row that is left out, and not again for the next one."""
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    get_ahead_of_a_join(driver, pg, monkeypatch)
    run(pg, "INSERT INTO t VALUES (3, 'next')", "ALTER TABLE t RENAME v TO w")
    driver.start()
    driver.refusal("public.t: after the commit at ", "column v was replaced or renamed to w", rows=None)


def test_messages_do_not_come_again_with_a_table_that_joins_behind_them(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", messagePrefixes="outbox")
    driver.take(1)
    late = hold_joins_back(monkeypatch)
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    going_on(driver, lambda: run(pg, HELD))
    emit = "SELECT pg_logical_emit_message({}, 'outbox', '{}')"
    run(pg, emit.format("true", "one"), emit.format("false", "two"), "INSERT INTO u VALUES (3, 'c')",
        "INSERT INTO t VALUES (2, 'x')")  # fmt: skip
    assert kinds(driver.take(3)) == ["message", "message", "insert"]
    late.set()
    going_on(driver, lambda: ("public.u", "truncate") in values(driver.rows, "_table", "_change_type"))
    run(pg, emit.format("true", "three"), "INSERT INTO t VALUES (3, 'y')")
    going_on(driver, lambda: '{"id":3,"v":"y"}' in values(driver.rows, "after")[-1])
    said = [row["after"] for row in driver.rows if row["_change_type"] == "message"]
    assert said == ['"one"', '"two"', '"three"']


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark gives no start")
def test_changes_of_a_table_that_is_gone_do_not_come_again_with_another_that_joins(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    get_ahead_of_a_join(driver, pg, monkeypatch)
    run(pg, "DROP TABLE t")
    driver.start()
    rows = driver.batch()
    assert sorted((row["_table"], row["_change_type"]) for row in rows) == [
        ("public.u", "snapshot"), ("public.u", "snapshot"), ("public.u", "truncate")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("published", "statement"),
    [
        ("FOR TABLE t", "ALTER PUBLICATION s ADD TABLE u, w"),
        ("FOR TABLE t, u, w", f"SELECT pg_logical_emit_message(true, 'pgcdc', '{write_request(Asked(('*',)))}')"),
        ("FOR TABLE t, u, w WITH (publish = 'insert')", "ALTER PUBLICATION s SET (publish = 'insert, truncate')"),
    ],
    ids=["new", "asked for", "published otherwise"],
)
def test_a_table_that_is_truncated_again_and_again_holds_up_no_other(
    published: str, statement: str, pg: Session, db: str, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < MESSAGES_VERSION and "message" in statement:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    run(pg, *T, *U, "CREATE TABLE w (id int PRIMARY KEY, v text)", "INSERT INTO w VALUES (1, 'w')",
        f"CREATE PUBLICATION s {published}")  # fmt: skip
    driver = drive(tables="public.*")
    driver.take(1 if published == "FOR TABLE t" else 4)
    seen = len(driver.rows)
    plan_join = Membership.plan_join

    def truncate(self: Membership, *args: Any) -> Any:
        with connect(db) as other:
            run(other, "TRUNCATE u", "INSERT INTO u VALUES (5, 'x')")
        return plan_join(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Membership, "plan_join", truncate)
        run(pg, statement)
        going_on(driver, lambda: ("public.w", "snapshot") in values(driver.rows[seen:], "_table", "_change_type"))
        assert ("public.u", "snapshot") not in values(driver.rows[seen:], "_table", "_change_type")
    going_on(driver, lambda: ("public.u", "snapshot") in values(driver.rows[seen:], "_table", "_change_type"))
    until_equal(driver, pg, "t", "u", "w")
    assert values(driver.rows[seen:], "_table", "_change_type").count(("public.w", "snapshot")) == 1


def test_nothing_is_kept_for_a_table_that_was_dropped_while_it_waited(pg: Session, db: str, drive: Drive) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*")
    slots = "SELECT slot_name::text FROM pg_replication_slots ORDER BY temporary"
    with connect(db) as other:
        # Which the consistent point waits for.
        run(other, "BEGIN", "CREATE TABLE elsewhere (id int)")
        run(pg, *U)
        going_on(driver, lambda: len(run(pg, slots)) == 2)
        run(pg, "DROP TABLE u", "INSERT INTO t VALUES (2, 'b')")
        going_on(driver, lambda: len(run(pg, slots)) == 1, 30)
        run(other, "ROLLBACK")
    [(end,)] = run(pg, "SELECT pg_current_wal_lsn()::text")
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    moved = f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots"
    going_on(driver, lambda: run(pg, moved) == [(True,)])
    assert run(pg, "SELECT 1 FROM pg_stat_activity WHERE application_name ~ ':snapshot'") == []


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark gives no start")
@pytest.mark.parametrize("policy", ["fail", "ignore", "emit"])
def test_a_table_that_waits_at_a_start_and_is_dropped_before_it_joins_is_said_to_have_left(
    policy: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(looks, "WATCH_SECONDS", 0.0)
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange=policy)
    driver.stop()
    run(pg, "ALTER PUBLICATION s DROP TABLE u", "INSERT INTO u VALUES (3, 'c')", "ALTER PUBLICATION s ADD TABLE u")
    hold_joins_back(monkeypatch)
    driver.start()
    going_on(driver, lambda: run(pg, HELD))
    run(pg, "DROP TABLE u", "INSERT INTO t VALUES (3, 'c')")
    gone = "publication s has lost public.u, which was dropped"
    if policy == "fail":
        driver.refusal(gone, rows=None)
        return
    going_on(driver, lambda: [member.name for member in driver.members or ()] == ["public.t"], 30)
    assert caplog.text.count(gone) == 1
    said = [row["_table"] for row in driver.rows if '"left"' in (row["after"] or "")]
    assert said == (["public.u"] if policy == "emit" else [])


@pytest.mark.parametrize("crash", [False, True])
def test_a_batch_in_which_a_table_joins_may_be_asked_for_twice(crash: bool, pg: Session, drive: Drive) -> None:
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    driver.stop()
    run(pg, "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO t VALUES (2, 'b')")
    driver.start()
    if HAS_LIMITS:
        wait_until(lambda: driver.plan(read=False))
    first = driver.attempt()
    if crash:
        driver.restart()
        first = driver.attempt()
    assert driver.attempt() == first
    assert driver.batch() == first
    assert kinds(first or ()).count("snapshot") == 2


def test_rows_that_are_due_in_a_batch_that_is_asked_for_twice_are_asked_for_once(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    run(pg, *T, *U, BOTH)
    begun_by_a_process_that_ended(drive)
    ask_for(pg, "public.u")
    asked: list[str] = []
    monkeypatch.setattr(joins, "emit_message", lambda session, prefix, content: asked.append(content))
    driver = drive(tables="public.*")
    wait_until(lambda: driver.attempt() is not None)
    driver.attempt()
    assert len(asked) == (not HAS_LIMITS)


@pytest.mark.parametrize("moment", ["waiting", "given", "planned"])
def test_a_join_is_the_same_after_a_crash(moment: str, pg: Session, drive: Drive) -> None:
    run(pg, *T, *U, "ALTER TABLE u REPLICA IDENTITY FULL", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    run(pg, "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO t VALUES (2, 'x')")
    if moment == "waiting":
        driver.batch()
    else:
        # Its end is in Spark's log; the process ends before or after it has said what the batch consists of.
        wait_until(lambda: driver.plan(read=moment == "planned"))
    run(pg, "INSERT INTO u VALUES (3, 'c')", "UPDATE u SET v = 'later' WHERE id = 1", "INSERT INTO t VALUES (3, 'y')")
    driver.restart()
    until_equal(driver, pg, "t", "u")
    of_u = [row for row in driver.rows if row["_table"] == "public.u"]
    snapshot = {row["after"] for row in of_u if row["_change_type"] == "snapshot"}
    if moment != "waiting":
        assert snapshot == {'{"id":1,"v":"a"}', '{"id":2,"v":"b"}'}
        assert sorted(kinds(of_u)) == [
            "insert", "snapshot", "snapshot", "truncate", "update"
        ]  # fmt: skip


def test_a_table_that_joined_and_was_dropped_before_its_rows_were_read(pg: Session, drive: Drive) -> None:
    if not HAS_LIMITS:
        pytest.skip("this Spark gives no start")
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    wait_until(lambda: driver.plan(read=False))
    driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'c')", "DROP TABLE u", "INSERT INTO t VALUES (2, 'x')")
    driver.start()
    going_on(driver, lambda: replica(driver.rows).get("public.t") == {1: "a", 2: "x"})
    assert [row["_change_type"] for row in driver.rows if row["_table"] == "public.u"] == ["truncate", "insert"]


def begin_join(driver: Driver) -> None:
    """Let the process end as soon as the end of the batch is known in which a table joins."""
    if HAS_LIMITS:
        wait_until(lambda: driver.plan(read=False))
    else:
        # The first end of a process.
        driver.restart()
        assert driver.attempt(read=False) == []
    driver.stop()


def test_a_batch_in_which_a_table_joins_has_the_columns_that_it_says(pg: Session, drive: Drive) -> None:
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", onSchemaChange="emit")
    driver.batch()
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    begin_join(driver)
    run(pg, "ALTER TABLE u ADD c int DEFAULT 5")
    driver.start()
    of_u = [row for row in driver.batch() if row["_table"] == "public.u"]
    (said,) = {row["after"] for row in of_u if row["_change_type"] == "schema"}
    assert [column["name"] for column in json.loads(said)["columns"]] == ["id", "v"]
    snapshot = {row["after"] for row in of_u if row["_change_type"] == "snapshot"}
    assert snapshot == {'{"id":1,"v":"a"}', '{"id":2,"v":"b"}'}


@pytest.mark.parametrize("mode", cases(["ignore", "emit"], "emit"))
def test_a_batch_in_which_a_table_joins_has_its_rows_after_a_rename(
    mode: str, pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, *T, *U, "ALTER TABLE u REPLICA IDENTITY FULL", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", onSchemaChange=mode)
    driver.batch()
    run(pg, "ALTER PUBLICATION s ADD TABLE u")
    begin_join(driver)
    run(pg, "ALTER TABLE u RENAME TO w")
    driver.start()
    of_u = [row for row in driver.batch() if row["_table"] == "public.u" and row["_change_type"] != "schema"]
    assert kinds(of_u) == ["truncate", "snapshot", "snapshot"]
    run(pg, "INSERT INTO w VALUES (3, 'c')")
    going_on(driver, lambda: '{"id":3,"v":"c"}' in [row["after"] for row in driver.rows])
    assert driver.rows[-1]["_table"] == "public.w"
    # Nobody else says it: rows of the two names are of one table.
    assert ("public.u is called public.w now" in caplog.text) == (mode == "ignore")


def test_a_table_that_was_dropped_after_a_snapshot_cannot_be_locked_for_it(pg: Session, db: str) -> None:
    run(pg, *T)
    [(oid,)] = run(pg, "SELECT 't'::regclass::oid::int")
    with connect(db) as session:
        run(session, "BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1")
        run(pg, "DROP TABLE t")
        begin_locking(session)
        with pytest.raises(SchemaChangedError, match=r"public\.t was dropped after the snapshot was taken"):
            lock_relations([session], [oid], within_seconds=0)


@pytest.mark.parametrize("ends", [("DROP TABLE u",), ("DROP TABLE u", *U), ("ALTER PUBLICATION s DROP TABLE u",)])
def test_a_batch_is_the_same_after_its_table_has_left(ends: tuple[str, ...], pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange="ignore")
    run(pg, "BEGIN; INSERT INTO t VALUES (2, 'x'); INSERT INTO u VALUES (3, 'last'); COMMIT")
    rows = driver.attempt_rows()
    driver.stop()
    run(pg, *ends)
    driver.start()
    assert driver.batch() == rows
    assert values(rows, "_table") == [("public.t",), ("public.u",)]


def test_a_table_that_has_left_has_no_rows_until_it_joins_again(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange="ignore")
    run(pg, "ALTER PUBLICATION s DROP TABLE u")
    going_on(driver, lambda: "public.u" not in [member.name for member in driver.members])
    late = hold_joins_back(monkeypatch)
    run(pg, "ALTER PUBLICATION s ADD TABLE u",
        "BEGIN; INSERT INTO u VALUES (3, 'c'); INSERT INTO t VALUES (2, 'x'); COMMIT")  # fmt: skip
    assert values(driver.take(1), "_table") == [("public.t",)]
    late.set()
    until_equal(driver, pg, "t", "u")


def test_rows_of_a_table_that_is_new_can_be_left_out(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes")
    run(pg, "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "BEGIN; INSERT INTO t VALUES (3, 'c'); INSERT INTO u VALUES (1, 'a'); COMMIT")  # fmt: skip
    rows = driver.take(2)
    assert values(rows, "_table", "_change_type") == [("public.t", "insert"), ("public.u", "insert")]
    assert is_one_commit(rows)
    driver.stop()
    run(pg, "CREATE TABLE v (id int PRIMARY KEY, v text)", "INSERT INTO v VALUES (1, 'a')")
    driver.start()
    assert values(driver.take(1), "_table", "_change_type") == [("public.v", "insert")]


def test_a_new_table_can_be_an_error(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="fail")
    run(
        pg,
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (3, 'c')",
        "INSERT INTO u VALUES (1, 'a')",
    )
    for _ in range(2):
        driver.refusal("public.u", "onNewTable=changes", rows=None)
        driver.restart()
    driver.restart(onNewTable="snapshot")
    until_equal(driver, pg, "t", "u")


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_row_says_that_a_table_has_left(down: bool, pg: Session, drive: Drive) -> None:
    run(pg, *T, *U, ALL_TABLES)
    driver = drive(tables="public.*", onSchemaChange="emit")
    going_on(driver, lambda: kinds(driver.rows).count("snapshot") == 3)
    driver.batch()
    if down:
        driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'last')", "DROP TABLE u", "INSERT INTO t VALUES (2, 'x')")
    if down:
        driver.start()
    going_on(driver, lambda: [row for row in driver.rows if '"left"' in (row["after"] or "")])
    driver.batch()
    ((after, lsn),) = [(row["after"], row["_commit_lsn"]) for row in driver.rows if '"left"' in (row["after"] or "")]
    assert json.loads(after)["columns"] == []
    of_u = [row for row in driver.rows if row["_table"] == "public.u"]
    assert lsn == max(row["_commit_lsn"] for row in of_u)
    assert kinds(of_u)[-2:] == ["insert", "schema"]
    assert driver.members[0].name == "public.t"


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("what", ["partition", "schema"])
def test_a_table_that_its_root_or_schema_did_not_publish_for_a_while_comes_again(
    what: str, down: bool, pg: Session, drive: Drive
) -> None:
    """It has the entry of the root or schema, before and after."""
    if what == "schema":
        if pg.server_version < 150000:
            pytest.skip("FOR TABLES IN SCHEMA came with PostgreSQL 15")
        create, publication = "CREATE TABLE t (id int PRIMARY KEY, v text)", "FOR TABLES IN SCHEMA public"
        out, back, hidden = "ALTER TABLE t SET SCHEMA hidden", "ALTER TABLE hidden.t SET SCHEMA public", "hidden.t"
    else:
        create, publication = "CREATE TABLE t PARTITION OF r FOR VALUES IN (1, 2, 3)", "FOR TABLE r"
        out, back = "ALTER TABLE r DETACH PARTITION t", "ALTER TABLE r ATTACH PARTITION t FOR VALUES IN (1, 2, 3)"
        hidden = "t"
    run(pg, "CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY LIST (id)", "CREATE SCHEMA hidden",
        "CREATE TABLE r_1 PARTITION OF r DEFAULT")  # fmt: skip
    driver = standing(drive, pg, create, "INSERT INTO t VALUES (1, 'a')", f"CREATE PUBLICATION s {publication}",
                      tables="public.*")  # fmt: skip
    if down:
        driver.stop()
    run(pg, out, f"INSERT INTO {hidden} VALUES (2, 'while it was out')", back, "INSERT INTO t VALUES (3, 'since')")
    if down:
        driver.start()
    until_equal(driver, pg, "t")


ROOT = ("CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10)")  # fmt: skip
FILLED = {
    "table": ("CREATE TABLE p (id int PRIMARY KEY, v text)", "INSERT INTO p VALUES (11, 'before')",
              "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)"),
    "tree": ("CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
             "CREATE TABLE q PARTITION OF p FOR VALUES FROM (10) TO (20)", "INSERT INTO p VALUES (11, 'before')",
             "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)"),
    # Each in one transaction.
    "loaded": ("BEGIN; CREATE TABLE p (LIKE r INCLUDING ALL); INSERT INTO p VALUES (11, 'before');"
               "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT",),
    "loaded tree": ("BEGIN; CREATE TABLE p (LIKE r INCLUDING ALL) PARTITION BY RANGE (id);"
                    "CREATE TABLE q PARTITION OF p FOR VALUES FROM (10) TO (20); INSERT INTO p VALUES (11, 'before');"
                    "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT",),
    "exchanged": ("CREATE TABLE p PARTITION OF r FOR VALUES FROM (10) TO (20)", "INSERT INTO r VALUES (14, 'sent')",
                  "BEGIN; ALTER TABLE r DETACH PARTITION p; TRUNCATE p; INSERT INTO p VALUES (11, 'before');"
                  "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT"),
    "emptied": ("CREATE TABLE p PARTITION OF r FOR VALUES FROM (10) TO (20)",
                "BEGIN; INSERT INTO r VALUES (14, 'sent'); ALTER TABLE r DETACH PARTITION p; DELETE FROM p;"
                "INSERT INTO p VALUES (11, 'before');"
                "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT"),
    "locked": ("BEGIN; CREATE TABLE p (LIKE r INCLUDING ALL); INSERT INTO p VALUES (11, 'before');"
               "SAVEPOINT a; DELETE FROM p; ROLLBACK TO a; RELEASE a;"
               "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT",),
    "loaded in a savepoint": ("BEGIN; CREATE TABLE p (LIKE r INCLUDING ALL);"
                              "SAVEPOINT a; INSERT INTO p VALUES (11, 'before'); RELEASE a;"
                              "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT",),
    "filled in a savepoint": ("CREATE TABLE p (LIKE r INCLUDING ALL)",
                              "BEGIN; SAVEPOINT a; INSERT INTO p VALUES (11, 'before'); RELEASE a;"
                              "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20); COMMIT"),
    # Rows that are written anew have the id of who does that.
    "rewritten": ("CREATE TABLE p (id int PRIMARY KEY, v text)", "INSERT INTO p VALUES (11, 'before')",
                  "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)",
                  "ALTER TABLE r ALTER v TYPE text COLLATE \"C\" USING v || ''"),
    "rewritten at once": ("CREATE TABLE p (id int PRIMARY KEY, v text)", "INSERT INTO p VALUES (11, 'before')",
                          "BEGIN; ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20);"
                          "ALTER TABLE r ALTER v TYPE text COLLATE \"C\" USING v || ''; COMMIT"),
}  # fmt: skip


def rooted(drive: Drive, pg: Session, **options: str) -> Driver:
    """A stream of a partitioned table that has read it."""
    if pg.server_version < 150000:
        pytest.skip("before PostgreSQL 15 every ATTACH without ALTER PUBLICATION is a gap")
    publication = "CREATE PUBLICATION s FOR TABLE r WITH (publish_via_partition_root)"
    run(pg, *ROOT, "INSERT INTO r VALUES (1, 'a')", publication)
    driver = drive(**options)
    driver.take(1)
    return driver


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
@pytest.mark.parametrize("what", cases(FILLED, "table", "exchanged"))
def test_rows_of_a_partition_that_is_attached_come_with_all_others(
    what: str, down: bool, pg: Session, drive: Drive
) -> None:
    driver = rooted(drive, pg, tables="public.*")
    if down:
        driver.stop()
    run(pg, *FILLED[what], "INSERT INTO r VALUES (12, 'since')")
    if down:
        driver.start()
    until_equal(driver, pg, "r")
    # Once is enough.
    driver.restart()
    run(pg, "INSERT INTO r VALUES (13, 'later')")
    assert values(until_equal(driver, pg, "r"), "_change_type") == [("insert",)]


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_rows_of_a_younger_transaction_come_where_the_partition_is_attached_later(
    down: bool, pg: Session, db: str, drive: Drive
) -> None:
    driver = rooted(drive, pg, tables="public.*")
    if down:
        driver.stop()
    run(pg, "CREATE TABLE p (LIKE r INCLUDING ALL)", "CREATE TABLE other (id int)", "BEGIN",
        "INSERT INTO other VALUES (1)")  # fmt: skip
    with connect(db) as younger:
        run(younger, "INSERT INTO p VALUES (11, 'before')")
    run(pg, "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)", "COMMIT")
    if down:
        driver.start()
    until_equal(driver, pg, "r")


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_rows_come_where_an_older_transaction_attaches_behind_a_younger_one(
    down: bool, pg: Session, db: str, drive: Drive
) -> None:
    driver = rooted(drive, pg, tables="public.*")
    # It has its id before, and what it attaches is seen later.
    run(pg, "BEGIN", "CREATE TABLE p (LIKE r INCLUDING ALL)", "INSERT INTO p VALUES (11, 'before')")
    with connect(db) as younger:
        run(younger, "CREATE TABLE e (LIKE r INCLUDING ALL)",
            "ALTER TABLE r ATTACH PARTITION e FOR VALUES FROM (20) TO (30)",
            "INSERT INTO r VALUES (21, 'e')")  # fmt: skip
        going_on(driver, lambda: kinds(driver.rows).count("insert") == 1)
        driver.restart()
        run(younger, "INSERT INTO r VALUES (22, 'e')")
        going_on(driver, lambda: kinds(driver.rows).count("insert") == 2)
    if down:
        driver.stop()
    run(pg, "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)", "COMMIT")
    if down:
        driver.start()
    until_equal(driver, pg, "r")
    assert kinds(driver.rows).count("truncate") == 1


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_partition_that_is_attached_empty_brings_nothing_again(down: bool, pg: Session, drive: Drive) -> None:
    driver = rooted(drive, pg, tables="public.*")
    if down:
        driver.stop()
    run(pg, "CREATE TABLE p (id int PRIMARY KEY, v text)",
        "ALTER TABLE r ATTACH PARTITION p FOR VALUES FROM (10) TO (20)",
        "INSERT INTO r VALUES (12, 'since'), (13, 'b')", "UPDATE r SET v = 'c' WHERE id = 13",
        "CREATE TABLE r_3 PARTITION OF r FOR VALUES FROM (20) TO (30)", "INSERT INTO r VALUES (21, 'new')",
        "BEGIN; CREATE TABLE r_4 PARTITION OF r FOR VALUES FROM (30) TO (40); INSERT INTO r VALUES (31, 'x'); COMMIT",
        "BEGIN; CREATE TABLE r_5 (LIKE r INCLUDING ALL);"
        "ALTER TABLE r ATTACH PARTITION r_5 FOR VALUES FROM (40) TO (50); INSERT INTO r VALUES (41, 'x'); COMMIT",
        "INSERT INTO r VALUES (42, 'y')",
        # It has other files than those that it began with.
        "CREATE TABLE r_6 (LIKE r INCLUDING ALL)", "INSERT INTO r_6 VALUES (1, 'gone')", "TRUNCATE r_6",
        "BEGIN; ALTER TABLE r ATTACH PARTITION r_6 FOR VALUES FROM (50) TO (60); INSERT INTO r VALUES (51, 'x');"
        "COMMIT", "ALTER TABLE r_6 SET (fillfactor = 90)", "INSERT INTO r VALUES (52, 'y')")  # fmt: skip
    if down:
        driver.start()
    until_equal(driver, pg, "r")
    # The next start looks at what has changed since.
    driver.restart()
    run(pg, "INSERT INTO r VALUES (22, 'later')")
    until_equal(driver, pg, "r")
    assert Counter(kinds(driver.rows)) == {"snapshot": 1, "insert": 9, "update": 1}


def test_a_partition_that_is_created_as_one_is_not_looked_at(pg: Session, db: str) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY, v text DEFAULT 'a', w int NOT NULL DEFAULT 5) PARTITION BY LIST (id)")
    ((root,),) = run(pg, "SELECT 'r'::regclass::oid::bigint")
    run(pg, "CREATE TABLE a PARTITION OF r FOR VALUES IN (1)",
        "BEGIN; CREATE TABLE b PARTITION OF r (w DEFAULT 6) FOR VALUES IN (2); INSERT INTO r VALUES (2); COMMIT",
        "CREATE INDEX ON r (v)", "ALTER TABLE r ALTER v SET NOT NULL",
        "BEGIN; CREATE TABLE c PARTITION OF r DEFAULT; ALTER TABLE c ADD CHECK (w > 0); COMMIT")  # fmt: skip
    before = attached.read_attachments(pg, [root])[root]
    assert before == attached.Attachments("0", before.horizon)
    run(pg, "BEGIN; CREATE TABLE d (LIKE r); ALTER TABLE r ATTACH PARTITION d FOR VALUES IN (3); COMMIT")
    assert attached.read_attachments(pg, [root])[root].may_have_more_than(before)
    assert attached.find_filled_partition(pg, root, attached.Attachments.parse("0")) is None


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_partition_that_somebody_has_locked_counts(down: bool, pg: Session, db: str, drive: Drive) -> None:
    driver = rooted(drive, pg, tables="public.*")
    if down:
        driver.stop()
    with connect(db) as other:
        other.autocommit = False
        run(pg, *FILLED["table"])
        run(other, "LOCK p")
        if down:
            driver.start()
        # Nobody waits for the lock but the rows.
        run(pg, "INSERT INTO r_1 VALUES (2, 'b')")
        if HAS_LIMITS or not down:
            going_on(driver, lambda: kinds(driver.rows).count("insert") == 1)
    until_equal(driver, pg, "r")


VANISHED = {
    "detached": ("ALTER TABLE r DETACH PARTITION p",),
    "dropped": ("DROP TABLE p",),
    "renamed": ("DROP TABLE p", "ALTER TABLE r RENAME TO w", "INSERT INTO w VALUES (2, 'b')"),
}


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
@pytest.mark.parametrize("how", VANISHED)
def test_a_gap_that_was_said_ends_with_the_rows_though_its_cause_is_gone(
    how: str, down: bool, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < 150000:
        pytest.skip("before PostgreSQL 15 every ATTACH without ALTER PUBLICATION is a gap")
    run(pg, *T, *ROOT, "INSERT INTO r VALUES (1, 'a')",
        "CREATE PUBLICATION s FOR TABLE r, t WITH (publish_via_partition_root)")  # fmt: skip
    driver = drive(tables="public.*", onSchemaChange="emit")
    going_on(driver, lambda: kinds(driver.rows).count("snapshot") == 2)
    driver.batch()
    late = hold_joins_back(monkeypatch)
    run(pg, *FILLED["table"])
    going_on(driver, lambda: driver.offset.gaps == ("public.r",))
    if down:
        driver.stop()
    run(pg, *VANISHED[how])
    if down:
        driver.start()
    else:
        until = time.monotonic() + 3 * looks.WATCH_SECONDS
        going_on(driver, lambda: time.monotonic() > until)
        assert driver.offset.gaps
    late.set()
    going_on(driver, lambda: not driver.offset.gaps, 30)
    name = "public.w" if how == "renamed" else "public.r"
    going_on(driver, lambda: (name, "truncate") in values(driver.rows, "_table", "_change_type"), 30)
    driver.restart()
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    seen = len(driver.rows)
    going_on(driver, lambda: "insert" in kinds(driver.rows[seen:]))
    assert values(driver.rows, "_table", "_change_type").count((name, "truncate")) == 1
    assert driver.offset.gaps == ()


def test_no_gap_is_left_where_all_rows_come_again(pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange="emit", onSlotLost="resnapshot")
    hold_joins_back(monkeypatch)
    run(pg, "ALTER PUBLICATION s DROP TABLE u", "ALTER PUBLICATION s ADD TABLE u")
    going_on(driver, lambda: driver.offset.gaps == ("public.u",))
    lose_slot(pg)
    going_on(driver, lambda: values(driver.rows, "_table", "_change_type").count(("public.u", "truncate")) == 1)
    until = time.monotonic() + 3 * looks.WATCH_SECONDS
    going_on(driver, lambda: time.monotonic() > until)
    assert driver.offset.gaps == ()
    assert sum('"gap"' in (row["after"] or "") for row in driver.rows) == 1


def test_a_partition_with_rows_is_an_error_where_nothing_is_read_again(pg: Session, drive: Drive) -> None:
    driver = rooted(drive, pg, dbtable="r")
    run(pg, *FILLED["table"])
    driver.refusal("public.p was attached to public.r, and had rows", "onNewTable=snapshot", rows=None)
    driver.restart(onNewTable="snapshot")
    going_on(driver, lambda: {row["id"] for row in driver.rows} >= {1, 11})


def test_the_last_table_comes_back_whole(pg: Session, drive: Drive) -> None:
    statements = (*T, "CREATE PUBLICATION s FOR TABLE t")
    driver = standing(drive, pg, *statements, tables="public.*", onSchemaChange="ignore")
    run(pg, "ALTER PUBLICATION s DROP TABLE t")
    going_on(driver, lambda: not driver.members)
    driver.stop()
    run(pg, "INSERT INTO t VALUES (2, 'while it was out')", "ALTER PUBLICATION s ADD TABLE t")
    driver.start()
    until_equal(driver, pg, "t")


def test_a_row_says_that_the_last_table_has_left(pg: Session, drive: Drive) -> None:
    run(pg, *T, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*", onSchemaChange="emit")
    driver.take(2)
    run(pg, "ALTER PUBLICATION s DROP TABLE t")
    going_on(driver, lambda: driver.members == ())
    assert [row["_table"] for row in driver.rows if '"left"' in (row["after"] or "")] == ["public.t"]


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_dropped_tables_last_changes_come_before_the_error(identity: str, pg: Session, drive: Drive) -> None:
    as_said = f"ALTER TABLE u REPLICA IDENTITY {identity}"
    driver = standing(drive, pg, *T, *U, as_said, ALL_TABLES, tables="public.*")
    driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'last')", "DELETE FROM u WHERE id = 1", "DROP TABLE u",
        "INSERT INTO t VALUES (2, 'x')")  # fmt: skip
    driver.start()
    text = driver.refusal("publication s has lost public.u, which was dropped", rows=3 if HAS_LIMITS else None)
    assert "new checkpoint" not in text
    driver.restart(onSchemaChange="ignore")
    going_on(driver, lambda: replica(driver.rows).get("public.t") == {1: "a", 2: "x"})
    of_u = [row for row in driver.rows if row["_table"] == "public.u" and row["_seq"]]
    assert values(of_u, "_change_type", "key", "after") == [
        ("insert", '{"id":3}', '{"id":3,"v":"last"}'), ("delete", '{"id":1}', None)
    ]  # fmt: skip


@pytest.mark.skipif(not HAS_LIMITS, reason="AvailableNow takes one batch on this Spark")
def test_a_run_that_takes_what_is_there_does_not_end_before_a_table_has_joined(pg: Session, drive: Drive) -> None:
    run(pg, *T, *U, "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.*")
    driver.take(1)
    driver.stop()
    run(pg, "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO t VALUES (2, 'x')")
    driver.start_available_now()
    run_batches = -1
    while run_batches < driver.batches:
        # One without rows is no end: only an offset that stays is.
        run_batches = driver.batches
        driver.batch()
    assert replica(driver.rows) == source(pg, "t", "u")


# --- rows that are asked for again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("names", cases(['["public.u"]', '["*"]'], '["*"]'))
def test_rows_come_again_where_somebody_asks(names: str, pg: Session, drive: Drive) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*")
    ask = f"""SELECT pg_logical_emit_message(true, 'pgcdc', '{{"snapshot": {names}}}')"""
    run(pg, "INSERT INTO u VALUES (3, 'before')", ask, "INSERT INTO u VALUES (4, 'after')")
    seen = len(driver.rows)
    count = 5 if "u" in names else 6
    going_on(driver, lambda: [k for k in kinds(driver.rows[seen:]) if k != "insert"].count("snapshot") >= count - 1)
    until_equal(driver, pg, "t", "u")
    assert kinds(driver.rows[seen:]).count("truncate") == count - 4
    run(pg, "INSERT INTO u VALUES (5, 'last')")
    assert kinds(until_equal(driver, pg, "t", "u")) == ["insert"]


def test_rows_that_were_asked_for_come_after_a_crash(pg: Session, drive: Drive) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*")
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.u", "public.none"]}')""",
        "INSERT INTO t VALUES (4, 'after')")  # fmt: skip
    going_on(driver, lambda: replica(driver.rows)["public.t"] == {1: "a", 4: "after"})
    if driver.offset.due == ("public.u",):
        driver.restart()
    seen = len(driver.rows)
    going_on(driver, lambda: kinds(driver.rows[seen:]).count("snapshot") == 2 or kinds(driver.rows).count("truncate"))
    until_equal(driver, pg, "t", "u")
    assert driver.offset.due == ()


@pytest.mark.parametrize("mode", ["fail", "emit"])
def test_a_table_that_takes_the_name_of_another_does_not_take_its_place(mode: str, pg: Session, drive: Drive) -> None:
    run(pg, *T, *U, ALL_TABLES)
    driver = drive(tables="public.*", onSchemaChange=mode)
    going_on(driver, lambda: kinds(driver.rows).count("snapshot") == 3)
    driver.batch()
    run(
        pg,
        "ALTER TABLE u RENAME TO old",
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "INSERT INTO u VALUES (7, 'n')",
    )
    if mode == "fail":
        # No row says that it is called old now, so its rows come under that name.
        going_on(driver, lambda: ("public.old", "truncate") in values(driver.rows, "_table", "_change_type"))
    run(pg, "INSERT INTO old VALUES (3, 'o')")
    going_on(driver, lambda: '{"id":3,"v":"o"}' in [row["after"] for row in driver.rows])
    going_on(driver, lambda: '{"id":7,"v":"n"}' in [row["after"] for row in driver.rows])
    (name,) = {row["_table"] for row in driver.rows if row["after"] == '{"id":3,"v":"o"}'}
    assert name == "public.old"
    assert {member.name for member in driver.members} == {"public.t", "public.u", "public.old"}


NAMES = {
    "swapped": ("ALTER TABLE t RENAME TO x", "ALTER TABLE u RENAME TO t", "ALTER TABLE x RENAME TO u"),
    "moved on": ("ALTER TABLE t RENAME TO old", "ALTER TABLE u RENAME TO t"),
    "replaced": ("DROP TABLE t", "ALTER TABLE u RENAME TO t"),
}


@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
@pytest.mark.parametrize("mode", ["fail", "ignore"])
@pytest.mark.parametrize("names", NAMES)
def test_rows_of_two_tables_do_not_mix_under_one_name(
    names: str, mode: str, down: bool, pg: Session, drive: Drive
) -> None:
    driver = standing(drive, pg, *T, *U, ALL_TABLES, tables="public.*", onSchemaChange=mode)
    if down:
        driver.stop()
    run(pg, "INSERT INTO t VALUES (2, 'before')", "DELETE FROM u WHERE id = 2", *NAMES[names],
        "INSERT INTO t VALUES (9, 'after')")  # fmt: skip
    there = source(pg, *(table for (table,) in run(pg, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")))
    if down:
        driver.start()

    refused: list[str] = []

    def is_equal() -> bool:
        try:
            driver.batch()
        except SchemaChangedError as error:
            refused.append(error.what)
            driver.restart()
        found = replica(driver.rows)
        return {name: found.get(name) for name in there} == there

    wait_until(is_equal, 30)
    assert len(refused) <= 1, refused


@pytest.mark.skipif(not HAS_LIMITS, reason="this Spark gives no start")
def test_a_batch_before_the_rows_that_were_asked_for_is_the_same_after_a_crash(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*")
    late = hold_joins_back(monkeypatch)
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.u"]}')""")
    going_on(driver, lambda: driver.offset.due)
    run(pg, "INSERT INTO u VALUES (3, 'c')")
    rows = driver.attempt_rows()
    driver.restart()
    assert driver.batch() == rows
    assert kinds(rows) == ["insert"]
    late.set()
    going_on(driver, lambda: not driver.offset.due)
    until_equal(driver, pg, "t", "u")


@pytest.mark.parametrize(
    ("moves", "name"),
    [("ALTER TABLE u SET SCHEMA hidden", "hidden.u"), ("ALTER TABLE u RENAME TO audit", "public.audit")],
)
def test_a_table_that_was_moved_out_of_what_is_named_leaves_with_all_its_changes(
    moves: str, name: str, pg: Session, drive: Drive
) -> None:
    driver = standing(drive, pg, *T, *U, "CREATE SCHEMA hidden", ALL_TABLES, tables="public.*, -public.audit")
    driver.stop()
    run(pg, "UPDATE u SET v = 'unread' WHERE id = 2", moves)
    before = len(driver.rows)
    driver.start()
    driver.refusal(f"publication s has lost public.u, which is called {name} now", rows=1)
    assert values(driver.rows[before:], "_table", "after") == [("public.u", '{"id":2,"v":"unread"}')]


# --- what is found while a table joins --------------------------------------------------------------------------------


def test_a_new_table_that_cannot_be_streamed_is_an_error_and_not_passed_over(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, f"{ALL_TABLES} WITH (publish_via_partition_root = true)", tables="public.*")
    run(pg, "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE UNLOGGED TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)", *U)  # fmt: skip
    driver.refusal("public.p1, a partition of public.p, is unlogged", kind=OptionError, rows=None)


def test_a_gap_is_not_forgotten_over_a_new_table(pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    if pg.server_version < 150000:
        pytest.skip("PostgreSQL 15 tells that a publication was altered")
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes")
    # The table's first row comes before anybody looks at the publication.
    monkeypatch.setattr(LookPace, "is_due", lambda self: False)
    run(pg, "ALTER PUBLICATION s SET (publish = 'insert')", "UPDATE t SET v = 'missed'",
        "ALTER PUBLICATION s SET (publish = 'insert, update, delete, truncate')",
        "CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a')")  # fmt: skip
    assert values(driver.take(1), "_table") == [("public.u",)]
    monkeypatch.setattr(LookPace, "is_due", lambda self: True)
    driver.refusal("publication s was altered")


@pytest.mark.parametrize("mode", ["changes", "fail"])
def test_rows_that_are_asked_for_bring_no_table_that_is_not_wanted(
    mode: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable=mode)
    monkeypatch.setattr(LookPace, "is_due", lambda self: False)
    ask = """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["public.t"]}')"""
    run(pg, "CREATE TABLE u (id int PRIMARY KEY, v text)", ask)
    if mode == "fail":
        driver.refusal("public.u joined the stream's tables")
    else:
        assert values(driver.take(2), "_table", "_change_type") == [
            ("public.t", "truncate"), ("public.t", "snapshot")
        ]  # fmt: skip


@pytest.mark.corner
@pytest.mark.parametrize("when", ["running", "starting"])
def test_a_new_table_that_waits_for_a_synchronous_standby_is_followed_from_its_first_row(
    when: str, db: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes")
    looked = threading.Event()

    def noted(session: Session, xid: int) -> None:
        looked.set()
        wait_until_seen(session, xid)

    monkeypatch.setattr(schema_history, "wait_until_seen", noted)
    with ExitStack() as waiting, ThreadPoolExecutor(1) as pool:

        def begin() -> None:
            new = "CREATE TABLE u (id int PRIMARY KEY, v text); INSERT INTO u VALUES (1, 'a')"
            waiting.enter_context(waiting_for_a_standby(db, pg, new))

        if when == "running":
            begin()
        else:
            driver.stop()
            before_horizon(monkeypatch, begin)
            driver.restart()

        def end() -> None:
            assert looked.wait(60)
            waiting.close()

        ended = pool.submit(end)
        going_on(driver, looked.is_set)
        ended.result()
    run(pg, "INSERT INTO u VALUES (2, 'b')")
    until_equal(driver, pg, "t", "u")


@pytest.mark.parametrize("mode", cases(["ignore", "emit"], "emit"))
def test_a_new_table_is_followed_behind_a_batch_that_is_repeated(mode: str, pg: Session, drive: Drive) -> None:
    options = {"tables": "public.*", "onNewTable": "changes", "onSchemaChange": mode}
    driver = standing(drive, pg, *T, ALL_TABLES, **options)
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    wait_until(lambda: driver.attempt(read=False) is not None)
    driver.stop()
    run(pg, "CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a')")
    driver.start()
    # Its session has read on, by the tables of before.
    assert values(driver.batch(), "_table", "_change_type") == [("public.t", "insert")]
    run(pg, "INSERT INTO u VALUES (2, 'b')")
    until_equal(driver, pg, "t", "u")


def test_a_table_that_was_created_again_is_not_taken_for_a_new_one_beside_a_renamed_one(
    pg: Session, drive: Drive
) -> None:
    """Its old rows are gone, and no row says so."""
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes", onSchemaChange="emit")
    run(pg, "DROP TABLE t", *T)
    for _ in range(2):
        driver.refusal("public.t was dropped and created again", "onNewTable=snapshot")
        driver.restart()


@pytest.mark.parametrize("is_seen_first", [True, False], ids=["look", "row"])
def test_a_table_whose_name_another_one_has_taken_over_is_followed_beside_it(
    is_seen_first: bool, pg: Session, drive: Drive
) -> None:
    """As logs are rotated: nothing of either is missing."""
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes", onSchemaChange="emit")
    rotated = ["ALTER TABLE t RENAME TO t_2025", "CREATE TABLE t (id int PRIMARY KEY, v text)"]
    rows: list[Row] = []
    if is_seen_first:
        run(pg, *rotated)
        rows += wait_until(driver.batch)
    else:
        driver.stop()
        driver.start()
        run(pg, *rotated)
    run(pg, "INSERT INTO t VALUES (7, 'new')", "INSERT INTO t_2025 VALUES (8, 'late')")

    def changes() -> list[tuple[str, str]]:
        rows.extend(driver.batch() or ())
        return sorted((row["_table"], row["after"]) for row in rows if row["_change_type"] == "insert")

    both = [("public.t", '{"id":7,"v":"new"}'), ("public.t_2025", '{"id":8,"v":"late"}')]
    wait_until(lambda: changes() == both)
    assert ("public.t_2025", "schema") in values(rows, "_table", "_change_type")


def before_end_of_wal(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run ``action`` when the tables of a batch are known, right before its end is found out."""
    end_of_wal = NextOffset._end_of_wal

    def end_behind_it(self: NextOffset, at_least: Position) -> Position:
        monkeypatch.setattr(NextOffset, "_end_of_wal", end_of_wal)
        action()
        return end_of_wal(self, at_least)

    monkeypatch.setattr(NextOffset, "_end_of_wal", end_behind_it)


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch goes to the end of the WAL, as with trigger(once=True)."""
    if HAS_LIMITS:
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        monkeypatch.setattr(pgcdc.READER, "getDefaultReadLimit", lambda self: ReadAllAvailable())


NEW_WITH_A_ROW = ("CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a')")


@pytest.mark.parametrize("mode", cases(["ignore", "emit"], "emit"))
@pytest.mark.usefixtures("without_limits")
def test_a_table_that_is_new_within_a_batch_of_which_only_the_end_is_known_is_followed_from_its_first_row(
    mode: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes", onSchemaChange=mode)
    driver.stop()
    before_end_of_wal(monkeypatch, lambda: run(pg, *NEW_WITH_A_ROW, "INSERT INTO t VALUES (2, 'b')"))
    driver.start()
    wait_until(lambda: driver.attempt(read=False) is not None)
    # Only this attempt knows what the process of before has given.
    driver.restart()
    first = driver.batch()
    assert [row for row in values(first, "_table", "_change_type") if row[1] == "insert"] == [
        ("public.u", "insert"), ("public.t", "insert")
    ]  # fmt: skip
    assert driver.again() == first
    run(pg, "INSERT INTO u VALUES (2, 'b')")
    until_equal(driver, pg, "t", "u")


@pytest.mark.usefixtures("without_limits")
def test_rows_of_a_table_that_joins_at_an_end_that_was_given_are_as_of_then_however_long_the_batch_is_read(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*")
    driver.stop()
    run(pg, *U, "INSERT INTO t VALUES (2, 'b')")
    read_through = BatchReading._read_through

    def slowly(self: BatchReading, *arguments: Any) -> Any:
        found = read_through(self, *arguments)
        run(pg, "UPDATE u SET v = 'z' WHERE id = 1", "DELETE FROM u WHERE id = 2")
        return found

    monkeypatch.setattr(BatchReading, "_read_through", slowly)
    driver.start()
    rows = [row for row in wait_until(driver.batch) if row["_table"] == "public.u" and row["key"]]
    assert [(row["_change_type"], row["after"]) for row in rows] == [
        ("snapshot", '{"id":1,"v":"a"}'), ("snapshot", '{"id":2,"v":"b"}')
    ]  # fmt: skip
    assert "may come in the state of a later change" not in caplog.text
    monkeypatch.undo()
    until_equal(driver, pg, "t", "u")


@pytest.mark.skipif(not HAS_LIMITS, reason="Spark does not say that it takes what is there")
@pytest.mark.parametrize("leaves", ["ALTER PUBLICATION s DROP TABLE u", "DROP TABLE u"])
def test_a_table_that_leaves_does_so_in_the_run_that_takes_what_is_there(
    leaves: str, pg: Session, drive: Drive
) -> None:
    """Also where the server has written since the run began, as a busy one always has."""
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange="emit")
    driver.stop()
    run(pg, leaves)
    driver.start_available_now()
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    count = len(driver.rows)
    while (rows := driver.attempt()) is not None:
        assert driver.batch() == rows
    assert [member.name for member in driver.members] == ["public.t"]
    said = [json.loads(row["after"]) for row in driver.rows[count:] if row["_change_type"] == "schema"]
    assert [change["change"] for row in said for change in row["changes"]] == ["left"]


@pytest.mark.usefixtures("without_limits")
def test_a_table_that_is_new_within_such_a_batch_is_told_until_it_is_followed(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="fail")
    driver.stop()
    before_end_of_wal(monkeypatch, lambda: run(pg, *NEW_WITH_A_ROW))
    driver.start()
    driver.refusal("public.u", "onNewTable=changes")
    driver.restart()
    driver.refusal("public.u", "onNewTable=changes")
    driver.restart(onNewTable="changes")
    until_equal(driver, pg, "t", "u")


@pytest.mark.usefixtures("without_limits")
def test_a_table_that_is_new_within_the_first_batch_to_the_end_of_the_wal_is_followed(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, *T, ALL_TABLES)
    driver = drive(tables="public.*", onNewTable="changes")
    driver.attempt(read=False)
    driver.stop()
    driver = drive(tables="public.*", onNewTable="changes", startFrom="slot")
    before_end_of_wal(monkeypatch, lambda: run(pg, *NEW_WITH_A_ROW))
    assert driver.attempt() is not None
    driver.restart()
    going_on(driver, lambda: ("public.u", "insert") in values(driver.rows, "_table", "_change_type"))


def test_a_table_that_comes_before_all_is_read_at_once_is_followed_from_its_first_row(
    pg: Session, drive: Drive, request: pytest.FixtureRequest
) -> None:
    large = "INSERT INTO s SELECT n, repeat('a', 1000) FROM generate_series(1, 100) AS n"
    run(pg, *T, ALL_TABLES, "CREATE TABLE s (id int PRIMARY KEY, v text)", large)
    driver = drive(tables="public.*", onNewTable="changes", maxBytesPerBatch="64kB")
    driver.batch()
    if HAS_LIMITS:
        assert driver.offset.is_reading
    driver.stop()
    run(pg, *NEW_WITH_A_ROW)
    request.getfixturevalue("without_limits")
    driver.start()
    until_equal(driver, pg, "s", "t", "u")


@pytest.mark.parametrize(
    ("mode", "renaming"),
    [
        ("ignore", "ALTER TABLE t RENAME TO x"),
        ("emit", "ALTER TABLE s RENAME TO x; ALTER TABLE t RENAME TO s; ALTER TABLE x RENAME TO t"),
    ],
)
def test_tables_that_get_other_names_before_all_is_read_at_once_are_read_once_each(
    mode: str, renaming: str, pg: Session, drive: Drive, request: pytest.FixtureRequest
) -> None:
    large = "INSERT INTO s SELECT n, repeat('a', 1000) FROM generate_series(1, 100) AS n"
    run(pg, *T, ALL_TABLES, "CREATE TABLE s (id int PRIMARY KEY, v text)", large)
    driver = drive(tables="public.*", onNewTable="changes", onSchemaChange=mode, maxBytesPerBatch="64kB")
    driver.batch()
    driver.stop()
    run(pg, f"BEGIN; {renaming}; COMMIT")
    request.getfixturevalue("without_limits")
    driver.start()
    going_on(driver, lambda: not driver.offset.is_reading)
    assert kinds(driver.rows).count("snapshot") == 101


@pytest.mark.parametrize("policy", cases(("changes", "fail"), "changes"))
def test_rows_of_a_table_that_came_and_went_are_said_to_be_passed_over(
    policy: str, pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable=policy)
    run(pg, f"BEGIN; {'; '.join(U)}; DROP TABLE u; COMMIT", "INSERT INTO t VALUES (2, 'b')")
    driver.take(1)
    assert caplog.text.count("rows of public.u before the commit at ") == 1


def test_rows_of_a_new_table_that_gets_another_name_at_once_come(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, ALL_TABLES, tables="public.*", onNewTable="changes")
    run(pg, f"BEGIN; {'; '.join(U)}; ALTER TABLE u RENAME TO w; COMMIT")
    until_equal(driver, pg, "t", "w")


@pytest.mark.skipif(not HAS_LIMITS, reason="the first end of a start has no limit, and reads all tables at once")
def test_changes_behind_rows_of_a_new_slot_that_are_read_at_once_come(
    pg: Session, drive: Drive, request: pytest.FixtureRequest
) -> None:
    large = "INSERT INTO s SELECT n, repeat('a', 1000) FROM generate_series(1, 100) AS n"
    statements = (*T, ALL_TABLES, "CREATE TABLE s (id int PRIMARY KEY, v text)", large)
    driver = standing(drive, pg, *statements, tables="public.*", onSlotLost="resnapshot", maxBytesPerBatch="64kB")
    going_on(driver, lambda: not driver.offset.is_reading)
    lose_slot(pg, "INSERT INTO t VALUES (2, 'b')")
    driver.restart()
    going_on(driver, lambda: driver.offset.is_reading)
    driver.stop()
    run(pg, "INSERT INTO t VALUES (3, 'c')", "DELETE FROM s WHERE id < 50")
    request.getfixturevalue("without_limits")
    driver.start()
    until_equal(driver, pg, "s", "t")


@pytest.mark.corner
def test_a_table_that_comes_while_the_slot_is_made_is_among_its_rows(db: str, pg: Session, drive: Drive) -> None:
    run(pg, *T, ALL_TABLES)
    waits = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%' AND wait_event_type = 'Lock'"
    with connect(db) as other, ThreadPoolExecutor(1) as pool:
        run(other, "BEGIN", *NEW_WITH_A_ROW)
        driver = drive(tables="public.*", onNewTable="changes")
        began = pool.submit(driver.batch)
        wait_until(lambda: run(pg, waits))
        run(other, "COMMIT")
        began.result()
    until_equal(driver, pg, "t", "u")


@pytest.mark.corner
def test_a_table_that_was_not_wanted_is_followed_when_it_is_published_again(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, "CREATE PUBLICATION s FOR TABLE t", tables="public.*", onNewTable="changes")
    run(pg, "CREATE TABLE u (id int PRIMARY KEY, v text)")
    # In one transaction, so that nobody sees that it is published.
    run(pg, "BEGIN", "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO u VALUES (1, 'a')",
        "ALTER PUBLICATION s DROP TABLE u", "COMMIT", "INSERT INTO t VALUES (2, 'b')")  # fmt: skip
    going_on(driver, lambda: 2 in replica(driver.rows)["public.t"])
    run(pg, "ALTER PUBLICATION s ADD TABLE u", "INSERT INTO u VALUES (2, 'b')")
    going_on(driver, lambda: replica(driver.rows).get("public.u") == {2: "b"})


def test_a_table_that_is_refused_does_not_hold_up_the_others(pg: Session, drive: Drive) -> None:
    publication = f"{ALL_TABLES} WITH (publish_via_partition_root = true)"
    driver = standing(drive, pg, *T, publication, tables="public.*", onNewTable="changes", onSchemaChange="emit")
    run(pg, "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "ALTER TABLE p REPLICA IDENTITY FULL", "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "INSERT INTO p VALUES (1, 'a')", "INSERT INTO t VALUES (2, 'b')")  # fmt: skip
    until_equal(driver, pg, "t")
    driver.restart()
    run(pg, "INSERT INTO p VALUES (2, 'b')", "INSERT INTO t VALUES (3, 'c')")
    until_equal(driver, pg, "t")
    run(pg, "ALTER TABLE p1 REPLICA IDENTITY FULL", "INSERT INTO p VALUES (3, 'c')")
    going_on(driver, lambda: ("public.p", "insert") in values(driver.rows, "_table", "_change_type"))


# --- rows that were asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", cases(["ignore", "emit"], "emit"))
def test_a_table_whose_rows_were_asked_for_is_found_by_its_new_name(
    mode: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange=mode)
    late = hold_joins_back(monkeypatch)
    ask_for(pg, "public.u")
    going_on(driver, lambda: driver.offset.due == ("public.u",))
    run(pg, "ALTER TABLE u RENAME TO w", "INSERT INTO w VALUES (3, 'c')")
    if mode == "ignore":
        driver.refusal("public.u was renamed to public.w", rows=None)
        driver.restart()
    # Before Spark 4.2 the first batch of a process ends with the rows that are due.
    going_on(driver, lambda: not {"insert", "truncate"}.isdisjoint(kinds(driver.rows)))
    late.set()
    going_on(driver, lambda: values(driver.rows, "_table", "_change_type").count(("public.w", "snapshot")) == 3)
    assert values(driver.rows, "_table", "_change_type").count(("public.w", "truncate")) == 1


@pytest.mark.skipif(not HAS_LIMITS, reason="the first batch of a process waits for the point")
def test_a_table_that_is_due_and_was_out_for_a_while_is_so_again_in_a_batch_that_is_repeated(
    pg: Session, db: str, drive: Drive
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange="emit")
    with connect(db) as writer:
        # There is no consistent point until this ends.
        run(writer, "BEGIN", "SELECT txid_current()")
        ask_for(pg, "public.u")
        run(pg, "UPDATE t SET v = 'b' WHERE id = 1")
        going_on(driver, lambda: driver.offset.due == ("public.u",))
        driver.stop()
        run(pg, "ALTER PUBLICATION s DROP TABLE u", "ALTER PUBLICATION s ADD TABLE u")
        driver.start()
        going_on(driver, lambda: driver.offset.gaps == ("public.u",))
        run(pg, "UPDATE t SET v = 'c' WHERE id = 1")
        rows: list[Row] = []

        def has_come() -> bool:
            rows[:] = driver.batch()
            return "update" in kinds(rows)

        wait_until(has_come)
        run(writer, "COMMIT")
    assert driver.offset.due == ("public.u",)
    assert driver.again() == rows


@pytest.mark.parametrize("mode", cases(["ignore", "emit"], "emit"))
def test_changes_come_before_the_rows_that_were_due_when_the_stream_stopped(
    mode: str, pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange=mode)
    late = hold_joins_back(monkeypatch)
    ask_for(pg, "public.u")
    going_on(driver, lambda: driver.offset.due == ("public.u",))
    driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'c')", "DELETE FROM u WHERE id = 3", "UPDATE t SET v = 'b'")
    seen = len(driver.rows)
    driver.start()
    late.set()
    going_on(driver, lambda: len(snapshot_of(driver, "public.u")) == 4)
    of_u = [row for row in driver.rows[seen:] if row["_table"] == "public.u" and row["_change_type"] != "schema"]
    of_u.sort(key=lambda row: (row["_commit_lsn"], row["_seq"]))
    assert kinds(of_u) == ["insert", "delete", "truncate", "snapshot", "snapshot"]


@pytest.mark.parametrize("how", cases(["crash", "restart"], "crash"))
@pytest.mark.parametrize("cause", ["asked for", "rewritten"])
def test_rows_that_are_due_in_the_first_batch_of_a_process_come(
    cause: str, how: str, pg: Session, drive: Drive
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSchemaChange="emit")
    driver.stop()
    if cause == "asked for":
        ask_for(pg, "public.u")
    else:
        run(pg, "ALTER TABLE u ADD w int DEFAULT (random() * 0)::int + 5", "INSERT INTO u VALUES (3, 'c')")
    driver.start()
    if how == "crash":
        driver.attempt()
        driver.restart()
    driver.batch()
    first, expected = 2, 2 if cause == "asked for" else 3
    # Before Spark 4.2 its end was given before it was known what is in it, and cannot say it. So they come with it.
    assert driver.offset.due == (("public.u",) if HAS_LIMITS else ())
    assert len(snapshot_of(driver, "public.u")) == (first if HAS_LIMITS else first + expected)
    driver.restart()
    going_on(driver, lambda: len(snapshot_of(driver, "public.u")) == first + expected)
    if cause == "rewritten":
        assert {row["w"] for row in snapshot_of(driver, "public.u")[first:]} == {5}


@pytest.mark.corner
def test_rows_that_are_due_come_where_the_stream_cannot_ask_for_them(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if pg.server_version < MESSAGES_VERSION:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    run(pg, *T, *U, BOTH)
    begun_by_a_process_that_ended(drive)
    monkeypatch.setattr(joins, "MESSAGES_VERSION", 10**9)
    ask_for(pg, "public.u")
    driver = drive(tables="public.*")
    going_on(driver, lambda: len(snapshot_of(driver, "public.u")) == 4)
    said = "rows of public.u come again, which cannot be noted in the WAL: no message can be written on this server"
    assert (said in caplog.text) != HAS_LIMITS


# --- slots that are lost ---------------------------------------------------------------------------------------------


@pytest.mark.matrix("a lost slot made anew")
@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
def test_a_lost_slot_is_made_anew_and_all_rows_come_again(down: bool, pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSlotLost="resnapshot")
    if down:
        driver.stop()
    lose_slot(pg, "DELETE FROM t", "INSERT INTO u VALUES (3, 'missed')")
    if down:
        driver.start()
    until_equal(driver, pg, "t", "u")
    run(pg, "INSERT INTO t VALUES (5, 'e')")
    assert values(until_equal(driver, pg, "t", "u"), "_change_type") == [("insert",)]
    driver.restart()
    run(pg, "INSERT INTO t VALUES (6, 'f')")
    assert values(until_equal(driver, pg, "t", "u"), "_change_type") == [("insert",)]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_a_slot_that_was_read_by_somebody_else_is_made_anew(
    planned: bool, crash: bool, pg: Session, drive: Drive
) -> None:
    """Where the loss shows only with the batch's start, the batch stays empty, also when it comes again."""
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSlotLost="resnapshot")
    run(pg, "INSERT INTO t VALUES (2, 'missed')")
    if planned:
        wait_until(lambda: driver.attempt(read=False) is not None)
    driver.stop()
    wait_until(lambda: run(pg, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 's' AND NOT active"))
    run(pg, "SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())", "INSERT INTO u VALUES (3, 'sent')")
    driver.start()
    if crash:
        driver.attempt()
        driver.restart()
    until_equal(driver, pg, "t", "u")
    run(pg, "INSERT INTO t VALUES (5, 'e')")
    assert values(until_equal(driver, pg, "t", "u"), "_change_type") == [("insert",)]


def test_a_server_of_an_older_timeline_has_its_slot_made_anew(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSlotLost="resnapshot")
    run(pg, "INSERT INTO t VALUES (2, 'missed')")
    identity = driver.offset.identity
    offset = replace(driver.offset, identity=replace(identity, timeline=identity.timeline + 1))
    driver.stop()
    driver.continue_from(json.dumps(offset.to_json()))
    driver.start()
    until_equal(driver, pg, "t", "u")
    assert driver.offset.identity == identity


def test_a_slot_that_is_lost_and_that_somebody_reads_is_left_to_its_reader(
    pg: Session, db: str, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long it is asked for is counted in tests/stream/test_slot_history.py.
    monkeypatch.setattr(slot_history, "IN_USE", Backoff(0.2, attempts=2))
    first = standing(drive, pg, *T, *U, BOTH, tables="public.*")
    old = first.offset
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    first.take(1)
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    first.take(1)  # which commits the one before
    past = "SELECT 1 FROM pg_replication_slots WHERE confirmed_flush_lsn > '%s' AND active"
    wait_until(lambda: run(pg, past % old.position.lsn))
    second = Driver(db, tables="public.*", onSlotLost="resnapshot")
    second.continue_from(json.dumps(old.to_json()))
    second.start()
    try:
        second.refusal("slot s is in use by pid ", kind=TransientError)
    finally:
        second.stop()
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    first.take(1)


def test_a_slot_of_another_kind_is_not_dropped_for_a_lost_one(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSlotLost="resnapshot")
    timeline = driver.offset.identity.timeline + 1
    offset = replace(driver.offset, identity=replace(driver.offset.identity, timeline=timeline))
    driver.stop()
    drop_slots(pg)
    run(pg, "SELECT pg_create_physical_replication_slot('s')")
    driver.continue_from(json.dumps(offset.to_json()))
    driver.start()
    try:
        driver.refusal("slot s is a physical slot, a stream needs a logical one", kind=OptionError)
        assert run(pg, "SELECT slot_type FROM pg_replication_slots WHERE slot_name = 's'") == [("physical",)]
    finally:
        driver.stop()
        run(pg, "SELECT pg_drop_replication_slot('s')")


@pytest.mark.parametrize("written", [True, False], ids=["written", "quiet"])
@pytest.mark.parametrize("down", [True, False], ids=["down", "running"])
@pytest.mark.parametrize("tables", [{"tables": "public.*"}, {"dbtable": "t"}], ids=["pattern", "typed"])
def test_with_a_publication_that_is_made_again_the_checkpoint_goes_on(
    tables: dict[str, str], down: bool, written: bool, pg: Session, drive: Drive
) -> None:
    """Newer servers leave out what was written without it. Before 18 they cannot decode it, nor what follows."""
    run(pg, *T, *U, BOTH)
    driver = drive(**tables)
    driver.take(3 if "tables" in tables else 1)
    if down:
        driver.stop()
    run(pg, "DROP PUBLICATION s", *(["INSERT INTO t VALUES (2, 'missed')", "DELETE FROM t WHERE id = 1"] * written))
    if down:
        driver.start()
    driver.refusal("publication ", "same checkpoint", kind=PgCdcError, rows=None)
    run(pg, BOTH, "INSERT INTO t VALUES (3, 'c')")
    driver.restart(onNewTable="snapshot")
    if written and pg.server_version < 180000:
        driver.refusal("cannot decode", "same checkpoint and onSlotLost=resnapshot", kind=SlotLostError, rows=None)
        driver.restart(onSlotLost="resnapshot")
    ((count,),) = run(pg, "SELECT count(*) FROM t")
    going_on(driver, lambda: "truncate" in kinds(driver.rows))
    since = [row for row in driver.rows if row.get("_table", "public.t") == "public.t"]
    since = since[kinds(since).index("truncate") :]
    going_on(driver, lambda: driver.offset.at is None)
    assert kinds(since) == ["truncate", *["snapshot"] * count]


def test_a_checkpoint_of_another_slot_is_not_taken_for_a_lost_one(pg: Session, drive: Drive) -> None:
    driver = standing(drive, pg, *T, *U, BOTH, tables="public.*", onSlotLost="resnapshot")
    driver.restart(slot="other", publication="s")
    driver.refusal("the checkpoint was made with another server or slot", kind=PgCdcError)
