"""Logical decoding messages through a real stream: an outbox, exactly once, whatever ends transactions and sessions."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from driving import Drive, Driver, Row, kinds, querying, run, values
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from watch import wait_until

from pg_cdc_source import project
from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.offsets import Lsn, Position

EMIT = "SELECT pg_logical_emit_message(true, 'outbox', {})"


@pytest.fixture(autouse=True)
def _table(pg: Session) -> None:
    run(
        pg,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )


def require_messages(pg: Session) -> None:
    if pg.server_version < 140000:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")


def begun(drive: Drive, **options: str) -> Driver:
    driver = drive(tables="public.*", publication="p", messagePrefixes="outbox, Audit", **options)
    driver.batch()
    driver.take(0)
    return driver


@pytest.fixture
def outbox(pg: Session, drive: Drive) -> Driver:
    require_messages(pg)
    return begun(drive)


def told(rows: list[Row]) -> list[tuple[object, ...]]:
    return values(rows, "_change_type", "key", "after")


def is_ordered(rows: list[Row]) -> bool:
    positions = values(rows, "_commit_lsn", "_seq")
    return positions == sorted(set(positions))


def test_before_14_messages_are_refused(pg: Session, drive: Drive) -> None:
    if pg.server_version >= 140000:
        pytest.skip("pgoutput sends messages from PostgreSQL 14 on")
    driver = drive(tables="public.*", publication="p", messagePrefixes="outbox")
    driver.refusal("messages from PostgreSQL 14 on", "messagePrefixes", kind=ServerSetupError)
    drive(tables="public.*", publication="p").batch()


def test_messages_stand_between_the_rows_of_their_commit(pg: Session, outbox: Driver) -> None:
    run(
        pg,
        "BEGIN;"
        + EMIT.format("'first'")
        + "; INSERT INTO t VALUES (1, 'a'); SELECT pg_logical_emit_message(true, 'other', 'not asked for');"
        + "SAVEPOINT s;"
        + EMIT.format("'rolled back'")
        + "; ROLLBACK TO s;"
        + EMIT.format("'\\xff00'::bytea")
        + "; INSERT INTO t VALUES (2, 'b'); COMMIT",
        "BEGIN;" + EMIT.format("'never'") + "; ROLLBACK",
        "INSERT INTO t VALUES (3, 'c')",
    )
    rows = outbox.take(5)
    assert told(rows) == [
        ("message", "outbox", '"first"'),
        ("insert", '{"id":1}', '{"id":1,"v":"a"}'),
        ("message", "outbox", '"\\\\xff00"'),
        ("insert", '{"id":2}', '{"id":2,"v":"b"}'),
        ("insert", '{"id":3}', '{"id":3,"v":"c"}'),
    ]
    assert is_ordered(rows)
    assert len({(row["_commit_lsn"], row["_xid"], row["_commit_ts"]) for row in rows[:4]}) == 1
    assert {(row["_table"], row["before"]) for row in (rows[0], rows[2])} == {(None, None)}


@pytest.mark.parametrize("limit", ["1", "1000"])
def test_messages_of_a_subtransaction_stand_where_they_were_written(limit: str, pg: Session, outbox: Driver) -> None:
    """The server sends one behind the row of the whole transaction that follows it in the WAL."""
    outbox.restart(maxRowsPerBatch=limit)
    outbox.take(0)
    emitted = f"SAVEPOINT s; {EMIT.format(repr('between'))}; RELEASE s;"
    run(
        pg,
        f"BEGIN; INSERT INTO t VALUES (1, 'a'); {emitted} INSERT INTO t VALUES (2, 'b'); {emitted}"
        f"INSERT INTO t VALUES (3, 'c'), (4, 'd'); {emitted} TRUNCATE t; {emitted} COMMIT",
    )
    rows = outbox.take(9)
    assert kinds(rows) == [
        "insert", "message", "insert", "message", "insert", "insert", "message", "truncate", "message"
    ]  # fmt: skip
    assert is_ordered(rows)


def test_messages_that_are_not_transactional_come_at_once(pg: Session, outbox: Driver) -> None:
    """Each ends where the next record begins, which may be a commit's."""
    lsns = []
    for i in range(20):
        run(pg, "BEGIN", f"INSERT INTO t VALUES ({i}, 'x')")
        ((lsn,),) = run(pg, "SELECT pg_logical_emit_message(false, 'Audit', 'at once')::text")
        lsns.append(Lsn.parse(lsn))
        run(pg, "COMMIT" if i % 2 else "ROLLBACK")
    rows = outbox.take(30)
    assert is_ordered(rows)
    alone = [row for row in rows if row["_change_type"] == "message"]
    assert values(alone, "_commit_lsn", "_seq", "_commit_ts", "_xid", "key", "after") == [
        (lsn - 1, lsn - 1, None, None, "Audit", '"at once"') for lsn in lsns
    ]


def test_messages_that_are_not_transactional_come_also_where_a_batch_ends_before_them(
    pg: Session, drive: Drive
) -> None:
    """A server that is asked for what comes behind a record's beginning leaves it out."""
    require_messages(pg)
    driver = begun(drive, maxRowsPerBatch="10")
    run(pg, "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 10) AS i")
    for i in range(6):
        run(pg, f"SELECT pg_logical_emit_message(false, 'Audit', '{i}')")
    run(pg, "INSERT INTO t VALUES (11, 'behind')")
    expected = ["insert"] * 10 + ["message"] * 6 + ["insert"]
    for limit in ("10", "1", "2", "1"):
        driver.restart(maxRowsPerBatch=limit)
        if rows := driver.batch():
            assert driver.again() == rows
    for _ in expected[len(driver.rows) :]:
        wait_until(lambda: bool(driver.batch()))
        driver.restart(maxRowsPerBatch="1")
    assert kinds(driver.rows) == expected
    assert is_ordered(driver.rows)


def test_a_message_that_is_not_transactional_comes_though_what_is_behind_it_is_refused(
    pg: Session, drive: Drive
) -> None:
    require_messages(pg)
    driver = begun(drive, onTruncate="fail")
    run(pg, "INSERT INTO t VALUES (1, 'a')")
    driver.take(1)
    run(pg, "SELECT pg_logical_emit_message(false, 'Audit', 'x')", "TRUNCATE t")
    driver.refusal("public.t was truncated", rows=None)
    driver.restart(onTruncate="emit")
    wait_until(lambda: driver.batch() is not None and len(driver.rows) == 3)
    assert kinds(driver.rows) == ["insert", "message", "truncate"]


@pytest.mark.corner
def test_a_message_across_the_end_of_a_batch_comes_after_a_restart(pg: Session, outbox: Driver) -> None:
    """The WAL on disk may end with a page, within a record: a batch that ends there has not brought the message."""
    run(pg, "INSERT INTO t VALUES (1, 'before')")
    outbox.take(1)
    outbox.stop()
    wait_until(lambda: run(pg, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 's' AND NOT active"))
    ((text,),) = run(pg, "SELECT pg_logical_emit_message(false, 'Audit', repeat('x', 20000))::text")
    end_of_page = Lsn(Lsn.parse(text) // 8192 * 8192 - 8192)
    run(pg, "INSERT INTO t VALUES (2, 'behind')")
    offset = replace(outbox.offset, position=Position.before(end_of_page))
    outbox.continue_from(json.dumps(offset.to_json()))
    outbox.start()
    rows = outbox.take(2)
    assert rows[0]["_commit_lsn"] == Lsn.parse(text) - 1
    assert told(rows)[1:] == [("insert", '{"id":2}', '{"id":2,"v":"behind"}')]
    # The slot has kept it until the batch was done.
    run(pg, "INSERT INTO t VALUES (3, 'last')")
    outbox.take(1)
    confirmed = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = 's'"
    wait_until(lambda: run(pg, confirmed.replace("%s", f"'{text}'")) == [(True,)])


@pytest.mark.corner
@pytest.mark.parametrize("rolled_back", [False, True])
def test_messages_of_a_large_transaction_come_with_its_commit(
    pg: Session, drive: Drive, rolled_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is streamed before it commits. Of a part that is rolled back PostgreSQL sends messages as if of the whole."""
    require_messages(pg)
    run(
        pg,
        "DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET logical_decoding_work_mem = ''64kB''',"
        " current_database()); END$$",
    )
    caplog.set_level(logging.WARNING)
    outbox = begun(drive, maxRowsPerBatch="700")
    run(pg, "BEGIN", EMIT.format("'first'"), "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 2000) i")
    if rolled_back:
        run(pg, "SAVEPOINT s", EMIT.format("'gone'"))
        run(pg, "INSERT INTO t SELECT -i, repeat('x', 100) FROM generate_series(1, 2000) i", "ROLLBACK TO s")
    run(pg, "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(2001, 3000) i")
    run(
        pg,
        "SELECT count(pg_logical_emit_message(true, 'outbox', i::text)) FROM generate_series(1, 1500) AS i",
        "COMMIT",
    )
    rows = outbox.take(4501)
    assert outbox.batches >= 7
    assert is_ordered(rows)
    assert [row["_change_type"] for row in rows] == ["message", *["insert"] * 3000, *["message"] * 1500]
    contents = [row["after"] for row in rows if row["_change_type"] == "message"]
    assert contents == ['"first"', *(f'"{i}"' for i in range(1, 1501))]
    said = [text for text in caplog.messages if "does not say which of its logical decoding messages" in text]
    assert len(said) == rolled_back
    ((streamed,),) = run(pg, "SELECT stream_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = 's'")
    assert streamed


@pytest.mark.corner
def test_messages_come_once_over_lost_sessions_and_restarts(pg: Session, outbox: Driver) -> None:
    """A batch may end between messages of one commit."""
    outbox.restart(maxRowsPerBatch="40")
    for i in range(6):
        run(
            pg,
            f"BEGIN; INSERT INTO t VALUES ({i}, 'a');"
            f"SELECT pg_logical_emit_message(true, 'outbox', '{i} ' || k) FROM generate_series(1, 100) AS k; COMMIT",
            f"SELECT pg_logical_emit_message(false, 'Audit', '{i}')",
        )
    rows: list[Row] = []
    for step in range(100):
        if len(rows) >= 612:
            break
        rows += outbox.batch()
        if step % 3 == 1:
            run(
                pg, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's' AND active"
            )
        if step % 5 == 4:
            outbox.restart()
    assert is_ordered(rows)
    expected = [
        one
        for i in range(6)
        for one in (
            ("insert", f'{{"id":{i}}}', f'{{"id":{i},"v":"a"}}'),
            *(("message", "outbox", f'"{i} {k}"') for k in range(1, 101)),
            ("message", "Audit", f'"{i}"'),
        )
    ]
    assert told(rows) == expected


def test_a_request_gives_the_table_again_and_a_malformed_one_is_ignored(
    pg: Session, outbox: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, "INSERT INTO t VALUES (1, 'a')")
    outbox.take(1)
    run(
        pg,
        "SELECT pg_logical_emit_message(true, 'pgcdc', 'nonsense')",
        'SELECT pg_logical_emit_message(true, \'pgcdc\', \'{"snapshot": ["public.t"], "slot": "another"}\')',
        "INSERT INTO t VALUES (2, 'b')",
    )
    assert told(outbox.take(1)) == [("insert", '{"id":2}', '{"id":2,"v":"b"}')]
    run(pg, 'SELECT pg_logical_emit_message(true, \'pgcdc\', \'{"snapshot": ["public.t"], "slot": "s"}\')')
    rows = outbox.take(3)
    assert values(rows, "_change_type", "_table", "key") == [
        ("truncate", "public.t", None),
        ("snapshot", "public.t", '{"id":1}'),
        ("snapshot", "public.t", '{"id":2}'),
    ]
    (ignored,) = [text for text in caplog.messages if "is ignored" in text]
    assert ignored.endswith("is ignored: it is not JSON in UTF-8")


@pytest.mark.corner
def test_an_outbox_in_spark(spark: SparkSession, db: str, pg: Session, tmp_path: Path) -> None:
    """As docs/stream.md shows it; rows of tables are typed beside the messages."""
    require_messages(pg)
    options = {"tables": "public.*", "publication": "p", "messagePrefixes": "outbox"}
    with querying(spark, tmp_path, pg, db, **options) as query:
        typed: list[tuple[int, str]] = []

        def events(batch: DataFrame) -> DataFrame:
            typed.extend((row.id, row.v) for row in project(batch, "public.t", url=db).collect())
            return batch.where("_change_type = 'message'").selectExpr("get_json_object(after, '$') AS event")

        query.each = events
        query.start()
        wait_until(lambda: run(pg, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 's' AND active"), 120)
        run(pg, "BEGIN; INSERT INTO t VALUES (1, 'a');" + EMIT.format('\'{"event": "paid"}\'') + "; COMMIT")
        query.take(1)
    assert query.rows == [{"event": '{"event": "paid"}'}]
    assert typed == [(1, "a")]
