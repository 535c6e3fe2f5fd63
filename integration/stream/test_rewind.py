"""An initial snapshot whose process died is read again as it was, however much its tables have changed since."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Session
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from replica import Replica, rows_of
from rewinding import SLOT, Rows, Sink, Start, counted, source
from watch import session_names, wait_until

from pg_cdc_source.errors import TransientError
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.snapshot.driver import Process
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream.first_rows import rewind
from pg_cdc_source.stream.tables import slot_history


@pytest.fixture(autouse=True)
def _slot_dropped(pg: Session) -> Iterator[None]:
    yield
    wait_until(lambda: not session_names(pg, f"pgcdc:{SLOT}:%"))
    run(pg, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()")


@pytest.fixture(autouse=True)
def _outside_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")


@pytest.fixture
def start(db: str, spark: SparkSession, tmp_path: Path) -> Start:
    def begin(sink: Sink, tables: str) -> StreamingQuery:
        reader = spark.readStream.format("pgcdc").options(url=db, slot=SLOT, tables=tables)
        # Both smaller than a table, so that each has several ranges and, since Spark 4.2, a batch of its own.
        df = reader.options(partitionBytes="64kB", maxBytesPerBatch="64kB").load()
        return df.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    return begin


def run(pg: Session, *statements: str) -> None:
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


# --- exactly ----------------------------------------------------------------------------------------------------------

TYPES = (
    "s varchar(20), n numeric, d numeric(12, 2), f float8, r real, b bytea, z timestamptz, t timestamp, y date,"
    " a int[], w text[], u uuid, j jsonb, i interval, o bool, m mood, big text"
)
VALUES = (
    "'s' || i, (i * 1.5e10)::numeric / 7, i / 3.0, CASE i % 5 WHEN 0 THEN 'NaN' WHEN 1 THEN '-0' ELSE i / 7.0 END,"
    " i / 3.0::real, decode(lpad(to_hex(i), 8, '0'), 'hex'),"
    " timestamptz '2024-03-01 00:00:00.123456+02' + i * '1 h'::interval,"
    " timestamp '1999-12-31' + i * '1 d'::interval, CASE WHEN i % 3 > 0 THEN date '1970-01-01' + i END,"
    " ARRAY[i, NULL, -i], CASE WHEN i % 4 > 0 THEN ARRAY['', 'x,\"' || i] END, lpad(i::text, 32, '0')::uuid,"
    " jsonb_build_object('k', i, 'l', 1.50), i * '1 day 3 hours'::interval, i % 2 = 0, 'happy'::mood,"
    " repeat(md5(i::text), i % 200)"
)


def create_typed(pg: Session, columns: str, rows: str) -> None:
    run(
        pg,
        "CREATE TYPE mood AS ENUM ('happy', 'sad')",
        f"CREATE TABLE t ({columns}, {TYPES}); ALTER TABLE t REPLICA IDENTITY FULL",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO t SELECT {rows}, {VALUES} FROM generate_series(1, 1000) AS i",
    )


CHANGES = (
    "UPDATE t SET s = 'changed', f = f + 1 WHERE id % 10 = 1",
    "UPDATE t SET big = big || 'x' WHERE id % 10 = 2",
    "DELETE FROM t WHERE id % 10 = 3",
    "UPDATE t SET id = id + 5000 WHERE id % 10 = 4",
    f"INSERT INTO t SELECT i, {{more}}{VALUES} FROM generate_series(2001, 2300) AS i",
    # Back to what it was, and again; and the key of a deleted row for a new one.
    "UPDATE t SET s = 'passing' WHERE id % 10 = 5; UPDATE t SET s = 's' || id WHERE id % 10 = 5",
    "BEGIN; DELETE FROM t WHERE id = 2005; UPDATE t SET id = 2005 WHERE id = 6;"
    " UPDATE t SET n = NULL WHERE id = 2005; COMMIT",
    f"INSERT INTO t SELECT i, {{more}}{VALUES} FROM generate_series(3, 103, 10) AS i;"
    " UPDATE t SET m = 'sad' WHERE id = 13",
    "BEGIN; SAVEPOINT s; UPDATE t SET s = 'rolled back'; ROLLBACK TO s; DELETE FROM t WHERE id % 10 = 7; COMMIT",
    "BEGIN; DELETE FROM t; ROLLBACK",
)

TABLES: dict[str, tuple[str, str, str]] = {
    "keyed": ("id int PRIMARY KEY", "i", ""),
    "of a key of several columns": (
        "id int, old text, k float8, PRIMARY KEY (k, old, id)",
        "i, 'k' || i % 7, i / 3.0",
        "'new', 0.5, ",
    ),
    "of a key that is an array": ("id int, l int[] PRIMARY KEY", "i, ARRAY[i]", "ARRAY[i, i, (random() * 1e9)::int], "),
    "keyless": ("id int", "i % 400", ""),
}


@pytest.mark.parametrize("layout", ["dbtable", "tables"])
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_with_whole_old_images_is_turned_back_exactly(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture, kind: str, layout: str
) -> None:
    columns, rows, more = TABLES[kind]
    create_typed(pg, columns, rows)
    changes = [change.format(more=more) for change in CHANGES]
    options = {layout: "public.t"}
    with source(db, **options) as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
    assert expected.total() == 1000
    for crash in range(2):
        run(pg, *changes[crash::2])
        with source(db, **options) as again, caplog.at_level(logging.INFO, "pg_cdc_source"):
            assert counted(again.rows(None, end)) == expected
        assert re.search("rows of public.t are read as of .* and turned back to .* exactly", caplog.text)
        assert "WARNING" not in caplog.text


@pytest.mark.parametrize("key", ["_seq", "_before", "v"])
def test_columns_of_the_envelope_may_be_named_like_change_columns(db: str, pg: Session, key: str) -> None:
    run(
        pg,
        "CREATE TABLE t (_before int, _seq int, _change_type text, v int); ALTER TABLE t REPLICA IDENTITY FULL",
        f"ALTER TABLE t ADD PRIMARY KEY ({key})",
        "INSERT INTO t SELECT i, i, 'insert', i FROM generate_series(1, 100) AS i",
    )
    with source(db, tables="t") as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
    run(pg, "UPDATE t SET _change_type = 'update' WHERE v < 10", "DELETE FROM t WHERE v > 90")
    with source(db, tables="t") as again:
        assert counted(again.rows(None, end)) == expected


def test_without_changes_the_snapshot_is_read_as_it_is(db: str, pg: Session) -> None:
    create_typed(pg, "id int PRIMARY KEY", "i")
    with source(db, dbtable="t") as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
    with source(db, dbtable="t") as again:
        assert counted(again.rows(None, end)) == expected


@pytest.mark.matrix("rewind of an unfinished snapshot")
def test_many_changes_and_large_transactions_are_turned_back(db: str, pg: Session) -> None:
    run(
        pg,
        "CREATE TABLE t (id int PRIMARY KEY, n int); ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 20000) AS i",
    )
    with source(db, tables="public.t") as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
    run(pg, *["UPDATE t SET n = n + 1"] * 3, "DELETE FROM t WHERE id > 10000", "UPDATE t SET id = -id")
    replica = Replica()
    with source(db, tables="public.t") as again:
        rows = again.rows(None, end)
        assert counted(rows) == expected
        replica.apply(rows)
        run(pg, "INSERT INTO t VALUES (0, 424242)")
        for batch in again.changes_until(end, '"n":424242'):
            replica.apply(batch)
    assert replica.rows("public.t") == rows_of(pg, "public.t")


@pytest.mark.matrix("rewind of an unfinished snapshot")
def test_partitions_are_turned_back_under_their_root(db: str, pg: Session) -> None:
    run(
        pg,
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (500)",
        # Its columns lie elsewhere than the root's; before 15 that is refused.
        "CREATE TABLE high (gone int, v text, id int NOT NULL); ALTER TABLE high DROP gone"
        if pg.server_version >= 150000
        else "CREATE TABLE high (LIKE t)",
        "ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (500) TO (1000)",
        "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE low REPLICA IDENTITY FULL;"
        " ALTER TABLE high REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, 'v' || i FROM generate_series(0, 899) AS i",
    )
    with source(db, dbtable="t") as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
    # From one partition to the other, too.
    run(pg, "UPDATE t SET id = 999 - id WHERE id < 50", "UPDATE t SET v = 'w' WHERE id % 2 = 0", "DELETE FROM low")
    with source(db, dbtable="t") as again:
        assert counted(again.rows(None, end)) == expected


def test_a_table_that_only_grew_is_turned_back_without_any_old_images(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    run(
        pg,
        "CREATE TABLE keyed (id int PRIMARY KEY, v text); CREATE TABLE keyless (id int, v text)",
        "INSERT INTO keyed SELECT i, 'v' FROM generate_series(1, 3000) AS i",
        "INSERT INTO keyless SELECT i % 5, 'v' FROM generate_series(1, 3000) AS i",
        f"CREATE PUBLICATION {SLOT} FOR TABLE keyed, keyless WITH (publish = 'insert, truncate')",
    )
    # Smaller than a table, so that each has a batch of its own.
    options = {"tables": "public.keyed,public.keyless", "maxBytesPerBatch": "64kB"}
    with source(db, **options) as first:
        end = first.next(None)
        expected = counted(first.rows(None, end))
        end2 = first.next(end)
    assert (end.done, end2.done) == (1, 2)
    before = rows_of(pg, "public.keyless")
    run(pg, "INSERT INTO keyed VALUES (3001, 'new')", "INSERT INTO keyless SELECT 3, 'v' FROM generate_series(1, 7)")
    replica = Replica()
    with source(db, **options) as again, caplog.at_level(logging.INFO, "pg_cdc_source"):
        first_rows = again.rows(None, end)
        assert counted(first_rows) == expected
        second_rows = again.rows(end, end2)
        replica.apply([*first_rows, *second_rows])
        assert replica.rows("public.keyless") == before
        run(pg, "INSERT INTO keyless VALUES (7, 'marker')")
        for batch in again.changes_until(end2, "marker"):
            replica.apply(batch)
    for table in ("public.keyed", "public.keyless"):
        assert replica.rows(table) == rows_of(pg, table)
    assert "WARNING" not in caplog.text


def test_turning_back_ends_with_its_driver(db: str, pg: Session) -> None:
    create_typed(pg, "id int PRIMARY KEY", "i")
    with source(db, dbtable="t") as first:
        end = first.next(None)
    with source(db, dbtable="t") as orphan:
        orphan.capture._parts.driver = Process(pid=(1 << 31) - 1, started="")
        with pytest.raises(TransientError, match="the driver's JVM is gone"):
            orphan.rows(None, end)


# --- as near as can be ------------------------------------------------------------------------------------------------


def upserted(rows: Rows) -> dict[str, str]:
    """What a sink has that upserts by key, deletes, and truncates."""
    found: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"])):
        if row["_change_type"] == "truncate":
            found.clear()
        elif row["_change_type"] == "delete":
            found.pop(row["key"], None)
        else:
            found[row["key"]] = row["after"]
    return found


@pytest.mark.parametrize(
    ("identity", "change", "why"),
    [
        ("DEFAULT", "UPDATE t SET v = 'w' WHERE id % 3 = 0", "did not say what rows were before"),
        ("DEFAULT", "DELETE FROM t WHERE id % 3 = 0", "did not say what rows were before"),
        ("FULL", "TRUNCATE t; INSERT INTO t SELECT i, 'u' FROM generate_series(50, 72) AS i", "truncated"),
        (
            "FULL",
            "UPDATE t SET v = 'w' WHERE id = 1; ALTER TABLE t REPLICA IDENTITY DEFAULT;"
            " UPDATE t SET v = 'x' WHERE id < 9; ALTER TABLE t REPLICA IDENTITY FULL",
            "did not say what rows were before",
        ),
    ],
)
def test_what_cannot_be_turned_back_converges_and_is_logged(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture, identity: str, change: str, why: str
) -> None:
    run(
        pg,
        f"CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t REPLICA IDENTITY {identity}",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i",
    )
    with source(db, tables="public.t") as first:
        end = first.next(None)
        first.rows(None, end)
    run(pg, *change.split("; "), "UPDATE t SET id = id + 1000 WHERE id % 5 = 0", "INSERT INTO t VALUES (5, 'new')")
    with source(db, tables="public.t") as again:
        rows = again.rows(None, end)
        run(pg, "UPDATE t SET v = 'y' WHERE id % 7 = 0", "INSERT INTO t VALUES (0, 'marker')")
        for batch in again.changes_until(end, "marker"):
            rows += batch
    with pg.cursor() as cursor:
        cursor.execute('SELECT format(\'{"id":%s}\', id), format(\'{"id":%s,"v":"%s"}\', id, v) FROM t')
        assert upserted(rows) == dict(cursor)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    [warning] = [record.getMessage() for record in warnings if record.name == rewind.__name__]
    assert warning.startswith("rows of public.t are read as of ")
    assert why in warning


def test_another_process_with_the_same_checkpoint_does_not_take_the_snapshot_for_lost(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot itself is free while the first one's tasks read."""
    monkeypatch.setattr(slot_history, "LINGERING", Backoff(0.1, attempts=2))
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'v')")
    with source(db, dbtable="public.t") as first:
        end = first.next(None)
        with source(db, dbtable="public.t") as second, pytest.raises(TransientError, match=f"slot {SLOT}"):
            second.rows(None, end)
        assert [row["id"] for row in first.rows(None, end)] == [1]
    with source(db, dbtable="public.t") as again:
        assert [row["id"] for row in again.rows(None, end)] == [1]


def test_what_the_publication_leaves_out_is_not_called_exact(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    run(
        pg,
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION rewound FOR TABLE t WITH (publish = 'insert')",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 9) AS i",
    )
    with source(db, dbtable="public.t", publication="rewound") as first:
        end = first.next(None)
        first.rows(None, end)
    run(pg, "UPDATE t SET v = 'w' WHERE id = 1", "DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (10, 'new')")
    with source(db, dbtable="public.t", publication="rewound") as again, caplog.at_level(logging.INFO):
        rows = again.rows(None, end)
        [part] = again.capture.batch(None, end).parts
    assert sorted((row["id"], row["v"]) for row in rows) == [(1, "w"), *((i, "v") for i in range(3, 10))]
    assert part.through > part.lsn
    said = [record.getMessage() for record in caplog.records if record.name == rewind.__name__]
    assert "what updates, deletes, truncates did to them in between, which the publication leaves out" in said[0]


@pytest.mark.parametrize("layout", ["dbtable", "tables"])
def test_a_key_that_came_after_the_point_tells_no_rows_of_it_apart(db: str, pg: Session, layout: str) -> None:
    run(pg, "CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i / 2, 'v' || i FROM generate_series(2, 9) AS i")  # fmt: skip

    def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The envelope has the key that the table has by now.
        return [{name: value for name, value in row.items() if name != "key"} for row in rows]

    options = {layout: "public.t"}
    with source(db, **options) as first:
        end = first.next(None)
        expected = counted(told(first.rows(None, end)))
    run(pg, "DELETE FROM t WHERE v IN ('v3', 'v5', 'v7', 'v9')", "ALTER TABLE t ADD PRIMARY KEY (id)")
    with source(db, **options) as again:
        assert counted(told(again.rows(None, end))) == expected


def test_rows_without_a_column_that_came_after_the_point_are_not_turned_back(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, "CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1, 'v')")
    with source(db, dbtable="public.t") as first:
        end = first.next(None)
        first.rows(None, end)
    run(pg, "INSERT INTO t VALUES (2, 'v')", "UPDATE t SET id = 3 WHERE id = 1", "ALTER TABLE t ADD c int DEFAULT 5")
    with source(db, dbtable="public.t") as again:
        rows = again.rows(None, end)
    assert sorted((row["id"], row["c"]) for row in rows) == [(2, 5), (3, 5)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("its columns were changed in between; they may come in the state of" in text for text in warnings)


# --- in Spark ---------------------------------------------------------------------------------------------------------


def fail(start: Start, pg: Session, sink: Sink, tables: str) -> None:
    query = start(sink, tables)
    with pytest.raises(StreamingQueryException, match="the sink fails here"):
        query.awaitTermination(180)
    wait_until(lambda: not session_names(pg, f"pgcdc:{SLOT}:%"))


def finish(start: Start, sink: Sink, tables: str) -> None:
    query = start(sink, tables)
    try:
        wait_until(lambda: sink.done or query.exception(), 180)
    finally:
        query.stop()
    assert query.exception() is None


def test_a_failed_snapshot_batch_comes_again_as_it_was_and_a_committed_one_does_not(pg: Session, start: Start) -> None:
    names = ("public.one", "public.two")
    for name in names:
        run(
            pg,
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text); ALTER TABLE {name} REPLICA IDENTITY FULL",
            f"INSERT INTO {name} SELECT i, repeat('v', 100) FROM generate_series(1, 1500) AS i",
        )
    tables = ",".join(names)
    before = {name: rows_of(pg, name) for name in names}
    interrupted = Sink(1)
    fail(start, pg, interrupted, tables)
    if HAS_LIMITS:
        assert {row["_table"] for row in interrupted.batches[0]} == {"public.one"}
    for name in names:
        run(
            pg,
            f"UPDATE {name} SET v = v || id WHERE id % 3 = 0",
            f"DELETE FROM {name} WHERE id % 5 = 0",
            f"UPDATE {name} SET id = id + 10000 WHERE id % 7 = 0",
            f"INSERT INTO {name} SELECT i, 'new' FROM generate_series(10, 200, 5) AS i",
        )
    run(pg, "INSERT INTO public.two VALUES (0, 'marker')")
    resumed = Sink(None, "marker")
    finish(start, resumed, tables)
    assert min(resumed.batches) == 1
    assert counted(resumed.batches[1]) == counted(interrupted.batches[1])
    replica = Replica()
    for _, rows in sorted({**interrupted.batches, **resumed.batches}.items()):
        replica.apply(rows)
    snapshots: Sequence[Rows] = [
        [row for row in rows if row["_change_type"] == "snapshot"]
        for rows in {**interrupted.batches, **resumed.batches}.values()
    ]
    initial = Replica()
    for rows in snapshots:
        initial.apply(rows)
    for name in names:
        assert initial.rows(name) == before[name]
        assert replica.rows(name) == rows_of(pg, name)
