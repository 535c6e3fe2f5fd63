"""A stream from its snapshot on: every kind of change, both schemas, and a sink that takes its time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import SLOT, Drive
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from sessions import SparkSessions
from streams import Collected, load_stream, running, wait_for_rows
from watch import session_names, wait_until

from pg_cdc_source import project

CHANGE_COLUMNS = ["_change_type", "_commit_lsn", "_seq", "_commit_ts", "_xid", "_unchanged"]


@pytest.fixture
def slot(pg: Session) -> Iterator[str]:
    """The name of a slot that is dropped after the test."""
    name = f"stream_{secrets.token_hex(4)}"
    yield name
    with pg.cursor() as cursor:
        wait_until(lambda: active_pid(pg, name) is None)
        cursor.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (name,)
        )


def run(pg: Session, sql: str) -> None:
    with pg.cursor() as cursor:
        cursor.execute(sql)


def active_pid(pg: Session, slot: str) -> int | None:
    with pg.cursor() as cursor:
        cursor.execute("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (slot,))
        row = cursor.fetchone()
        return None if row is None else row[0]


def is_read(pg: Session, slot: str) -> bool:
    """Whether the stream has begun to read its slot: one that is being created is active as well, and begins later."""
    return bool(session_names(pg, f"pgcdc:{slot}:changes")) and active_pid(pg, slot) is not None


def confirmed(pg: Session, slot: str) -> int:
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        )
        row = cursor.fetchone()
        assert row is not None
        return int(row[0])


def values(row: Any, *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def make_orders(pg: Session) -> None:
    run(
        pg,
        "CREATE TABLE orders (id int PRIMARY KEY, item text, price numeric(8,2));"
        " INSERT INTO orders SELECT i, 'item ' || i, i / 4.0 FROM generate_series(1, 1000) AS i",
    )


def test_a_typed_stream_gives_the_snapshot_and_then_every_change_in_order(
    spark: SparkSession, db: str, pg: Session, slot: str, tmp_path: Path
) -> None:
    make_orders(pg)
    into = Collected()
    rows = load_stream(spark, db, dbtable="orders", slot=slot)
    assert rows.columns == ["id", "item", "price", *CHANGE_COLUMNS]
    with running(rows, tmp_path, into) as query:
        snapshot = wait_for_rows(query, into, 1000)
        assert {values(row, "_change_type", "_seq", "_commit_ts", "_xid") for row in snapshot} == {
            ("snapshot", 0, None, None)
        }
        (lsn,) = {row["_commit_lsn"] for row in snapshot}
        run(pg, "INSERT INTO orders VALUES (1001, 'new', NULL)")
        run(
            pg,
            "BEGIN; UPDATE orders SET item = 'changed' WHERE id = 1; DELETE FROM orders WHERE id = 2;"
            " UPDATE orders SET id = -3 WHERE id = 3; SAVEPOINT s; DELETE FROM orders; ROLLBACK TO s; COMMIT",
        )
        run(pg, "BEGIN; INSERT INTO orders VALUES (1002, 'never', 0); ROLLBACK")
        run(pg, "BEGIN; TRUNCATE orders; INSERT INTO orders VALUES (1, 'after', 1); COMMIT")
        changes = wait_for_rows(query, into, 1007)[1000:]
    assert [values(row, "_change_type", "id", "item", "price") for row in changes] == [
        ("insert", 1001, "new", None),
        ("update", 1, "changed", Decimal("0.25")),
        ("delete", 2, None, None),
        ("delete", 3, None, None),
        ("insert", -3, "item 3", Decimal("0.75")),
        ("truncate", None, None, None),
        ("insert", 1, "after", Decimal("1.00")),
    ]
    positions = [(row["_commit_lsn"], row["_seq"]) for row in changes]
    assert positions == sorted(set(positions))
    assert positions[0][0] > lsn
    assert len({row["_xid"] for row in changes}) == 3
    assert all(row["_unchanged"] == [] and row["_commit_ts"] is not None for row in changes)


@pytest.mark.matrix("several tables in one stream, project()")
def test_the_envelope_holds_what_the_typed_stream_gives(
    spark: SparkSession, db: str, pg: Session, slot: str, tmp_path: Path
) -> None:
    make_orders(pg)
    run(
        pg,
        'CREATE TABLE "Other table" (a int NOT NULL UNIQUE, b text); INSERT INTO "Other table" VALUES (1, \'ü"\');'
        ' ALTER TABLE "Other table" REPLICA IDENTITY USING INDEX "Other table_a_key"',
    )
    into, projected = Collected(), Collected()
    rows = load_stream(spark, db, tables='public.orders,public."Other table"', slot=slot)
    assert rows.columns == ["_table", *CHANGE_COLUMNS, "key", "after", "before"]

    def keep_typed(batch: Any, batch_id: int) -> None:
        projected.batches[batch_id] = project(batch, "public.orders", url=db).collect()

    with running(rows, tmp_path, into, keep_typed) as query:
        snapshot = wait_for_rows(query, into, 1001)
        assert [row["key"] for row in snapshot if row["_table"] == 'public."Other table"'] == ['{"a":1}']
        run(pg, "UPDATE orders SET price = 7 WHERE id = 5; DELETE FROM orders WHERE id = 6")
        run(pg, 'UPDATE "Other table" SET a = 2')
        changes = wait_for_rows(query, into, 1005)[1001:]
    assert [values(row, "_table", "_change_type", "key", "after", "before") for row in changes] == [
        ("public.orders", "update", '{"id":5}', '{"id":5,"item":"item 5","price":"7.00"}', None),
        ("public.orders", "delete", '{"id":6}', None, '{"id":6}'),
        ('public."Other table"', "delete", '{"a":1}', None, '{"a":1}'),
        ('public."Other table"', "insert", '{"a":2}', '{"a":2,"b":"ü\\""}', None),
    ]
    typed = sorted(projected.rows, key=lambda row: (row["_commit_lsn"], row["_seq"], row["id"]))
    assert len(typed) == 1002
    assert [values(row, "_change_type", "id", "item", "price") for row in typed[-2:]] == [
        ("update", 5, "item 5", Decimal("7.00")),
        ("delete", 6, None, None),
    ]
    assert [values(row, "id", "price") for row in typed[:1000]] == [(i, Decimal(i) / 4) for i in range(1, 1001)]


@pytest.mark.matrix("old values")
def test_before_image_holds_the_old_values_that_were_sent(
    spark: SparkSession, db: str, pg: Session, slot: str, tmp_path: Path
) -> None:
    make_orders(pg)
    run(pg, "ALTER TABLE orders REPLICA IDENTITY FULL")
    into = Collected()
    rows = load_stream(spark, db, dbtable="orders", slot=slot, startFrom="now", beforeImage=True)
    with running(rows, tmp_path, into) as query:
        wait_until(lambda: is_read(pg, slot))
        run(pg, "UPDATE orders SET item = 'x' WHERE id = 1; UPDATE orders SET id = -2 WHERE id = 2")
        run(pg, "DELETE FROM orders WHERE id = 3; INSERT INTO orders VALUES (4000, NULL, NULL)")
        changes = wait_for_rows(query, into, 5)
    before = [None if row["_before"] is None else tuple(row["_before"]) for row in changes]
    assert list(zip([row["_change_type"] for row in changes], before, strict=True)) == [
        ("update", (1, "item 1", Decimal("0.25"))),
        ("delete", (2, "item 2", Decimal("0.50"))),
        ("insert", None),
        ("delete", (3, "item 3", Decimal("0.75"))),
        ("insert", None),
    ]


def test_a_sink_that_takes_long_loses_neither_session_nor_change(pg: Session, drive: Drive) -> None:
    """Longer than wal_sender_timeout: only the reader's own messages keep the server from hanging up."""
    make_orders(pg)
    run(pg, f"ALTER DATABASE {pg.info.dbname} SET wal_sender_timeout = '3s'")
    driver = drive(dbtable="orders", startFrom="now")
    wait_until(lambda: driver.batch() or driver.batches)
    run(pg, "INSERT INTO orders VALUES (2000, 'slow', 0)")
    # The sink has these rows and does not come to its end.
    slow = driver.attempt_rows()
    pid = active_pid(pg, SLOT)
    assert pid is not None
    started = now(pg)
    wait_until(lambda: now(pg) > started + 7)
    run(pg, "INSERT INTO orders VALUES (2001, 'meanwhile', 0)")
    assert active_pid(pg, SLOT) == pid
    # What the sink has not got is not confirmed.
    assert confirmed(pg, SLOT) <= slow[0]["_commit_lsn"]
    assert driver.batch() == slow
    assert [row["id"] for row in [*slow, *wait_until(driver.batch)]] == [2000, 2001]
    wait_until(lambda: not driver.batch() and confirmed(pg, SLOT) > slow[0]["_commit_lsn"])


def now(pg: Session) -> float:
    with pg.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        row = cursor.fetchone()
        assert row is not None
        return float(row[0])


@pytest.mark.matrix("transactions larger than a batch")
def test_a_large_transaction_comes_in_many_batches_and_little_memory(
    spark: SparkSession, spark_sessions: SparkSessions, db: str, pg: Session, slot: str, tmp_path: Path
) -> None:
    run(pg, "CREATE TABLE facts (id int PRIMARY KEY, note text, at timestamptz, price numeric(10,2))")
    sizes: dict[int, tuple[int, int]] = {}
    peak = 0

    def count(batch: Any, batch_id: int) -> None:
        nonlocal peak
        numbers = batch.agg({"id": "sum", "*": "count"}).collect()[0]
        sizes[batch_id] = (numbers["count(1)"], numbers["sum(id)"] or 0)
        peak = max([peak, *(process.memory_info().rss for process in source_processes(spark_sessions.scratch))])

    rows = load_stream(spark, db, dbtable="facts", slot=slot, startFrom="now", maxRowsPerBatch=25_000)
    query = rows.writeStream.foreachBatch(count).option("checkpointLocation", str(tmp_path)).start()
    try:
        wait_until(lambda: is_read(pg, slot))
        total = 200_000
        run(
            pg,
            "INSERT INTO facts SELECT i, repeat(md5(i::text), 9), now(), i / 3.0"
            f" FROM generate_series(1, {total}) AS i",
        )
        wait_until(lambda: query.exception() or sum(rows for rows, _ in list(sizes.values())) >= total, 300)
    finally:
        query.stop()
    assert query.exception() is None
    assert sum(rows for rows, _ in sizes.values()) == total
    assert sum(ids for _, ids in sizes.values()) == total * (total + 1) // 2
    assert max(rows for rows, _ in sizes.values()) <= 25_000
    assert 0 < peak < 450 << 20


def source_processes(scratch: Path) -> list[psutil.Process]:
    """The source processes of the JVM with ``scratch`` as its directory for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("TMPDIR") == str(scratch)
            if ours and any("streaming_source" in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_stopped_stream_leaves_only_its_slot(
    spark: SparkSession, db: str, pg: Session, slot: str, tmp_path: Path
) -> None:
    make_orders(pg)
    into = Collected()
    with running(load_stream(spark, db, dbtable="orders", slot=slot), tmp_path, into) as query:
        wait_for_rows(query, into, 1000)
    wait_until(lambda: active_pid(pg, slot) is None, 5)
    wait_until(lambda: not session_names(pg, "pgcdc:%"), 5)
