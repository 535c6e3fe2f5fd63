"""``changeFormat=changelog``: rows and columns as Delta's change data feed and Spark's CHANGES have them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from driving import SLOT, Drive, Row, drop_slots, kinds, querying, run, values
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from streams import load_stream

from pg_cdc_source.errors import ServerSetupError
from pg_cdc_source.spark.pgcdc import HAS_LIMITS, PgCdcDataSource

OWN = ["_change_type", "_commit_version", "_commit_timestamp"]
T = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "ALTER TABLE t REPLICA IDENTITY FULL",
    "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
)
BIG = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) AS n)"


def by_row(rows: list[Row]) -> list[tuple[Any, ...]]:
    return values(rows, "_change_type", "id", "v")


# --- its shape -------------------------------------------------------------------------------------------------------


def test_rows_and_columns_are_those_of_deltas_change_data_feed(pg: Session, drive: Drive, tmp_path: Path) -> None:
    run(pg, *T)
    schema = pa.schema([pa.field("id", pa.int32()), pa.field("v", pa.string())])
    delta = DeltaTable.create(tmp_path, schema, configuration={"delta.enableChangeDataFeed": "true"})
    driver = drive(dbtable="t", changeFormat="changelog")
    ours = driver.take(2)

    def to_both(sql: str, act: Any) -> None:
        run(pg, sql)
        act()

    write_deltalake(delta, pa.table({"id": [1, 2], "v": ["a", "b"]}, schema), mode="append")
    to_both("UPDATE t SET v = 'c' WHERE id = 1", lambda: delta.update(predicate="id = 1", updates={"v": "'c'"}))
    to_both("UPDATE t SET v = v || '!'", lambda: delta.update(updates={"v": "concat(v, '!')"}))
    to_both("DELETE FROM t WHERE id = 2", lambda: delta.delete("id = 2"))
    ours += driver.take(7)
    theirs = pa.table(delta.load_cdf(starting_version=1).read_all())
    names = PgCdcDataSource(driver.options).schema().names
    assert names == theirs.schema.names

    def in_order(rows: list[Row]) -> list[list[tuple[Any, ...]]]:
        versions = sorted({row["_commit_version"] for row in rows})
        return [sorted(by_row([row for row in rows if row["_commit_version"] == version])) for version in versions]

    assert in_order(ours) == in_order(theirs.to_pylist())


@pytest.mark.matrix("changeFormat=changelog")
def test_a_snapshot_is_inserts_and_an_update_two_rows(pg: Session, drive: Drive) -> None:
    run(pg, *T)
    driver = drive(dbtable="t", changeFormat="changelog")
    snapshot = driver.take(2)
    assert by_row(snapshot) == [("insert", 1, "a"), ("insert", 2, "b")]
    assert {row["_commit_version"] for row in snapshot} == {driver.offset.origin - 1}
    first_of_1970 = dt.datetime(1970, 1, 1, microsecond=1000, tzinfo=dt.timezone.utc)
    assert {row["_commit_timestamp"] for row in snapshot} == {first_of_1970}
    run(pg, "BEGIN; INSERT INTO t VALUES (3, NULL); UPDATE t SET v = 'x' WHERE id = 1;"
            " UPDATE t SET id = 5 WHERE id = 2;"
        " DELETE FROM t WHERE id = 3; COMMIT")  # fmt: skip
    rows = driver.take(6)
    assert by_row(rows) == [
        ("insert", 3, None),
        ("update_preimage", 1, "a"),
        ("update_postimage", 1, "x"),
        ("delete", 2, "b"),
        ("insert", 5, "b"),
        ("delete", 3, None),
    ]
    (version,) = {row["_commit_version"] for row in rows}
    assert snapshot[0]["_commit_version"] < version <= driver.offset.position.lsn
    (now,) = run(pg, "SELECT now()")[0]
    (then,) = {row["_commit_timestamp"] for row in rows}
    assert dt.timedelta(0) <= now - then < dt.timedelta(minutes=5)
    assert set(rows[0]) == {"id", "v", *OWN}


def test_a_value_out_of_line_is_in_both_rows(pg: Session, drive: Drive) -> None:
    run(pg, *T, "ALTER TABLE t ALTER v SET STORAGE EXTERNAL, ADD n int", f"UPDATE t SET v = {BIG}")
    (big,) = run(pg, "SELECT DISTINCT v FROM t")[0]
    driver = drive(dbtable="t", changeFormat="changelog")
    driver.take(2)
    run(pg, "UPDATE t SET n = 1 WHERE id = 1", "DELETE FROM t WHERE id = 2")
    assert values(driver.take(3), "_change_type", "v", "n") == [
        ("update_preimage", big, None),
        ("update_postimage", big, 1),
        ("delete", big, None),
    ]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_two_rows_of_an_update_are_never_cut_apart(limit: int, pg: Session, drive: Drive) -> None:
    run(pg, *T)
    driver = drive(dbtable="t", changeFormat="changelog", maxRowsPerBatch=str(limit))
    driver.take(2)
    run(pg, "INSERT INTO t SELECT i, i FROM generate_series(3, 5) AS i", "UPDATE t SET v = v || '!'")
    rows: list[Row] = []
    while len(rows) < 13:
        batch = driver.batch()
        assert kinds(batch).count("update_preimage") == kinds(batch).count("update_postimage")
        assert len(batch) <= 2 * limit
        rows += batch
        if HAS_LIMITS:
            # The rest of a commit comes to another process as it would have come to this one.
            driver.restart()
    assert by_row(rows) == [
        *(("insert", i, str(i)) for i in (3, 4, 5)),
        *((f"update_{half}image", i, f"{text}{mark}")
          for i, text in enumerate("ab345", 1) for half, mark in (("pre", ""), ("post", "!"))),
    ]  # fmt: skip


def test_a_snapshot_that_was_lost_is_turned_back(pg: Session, drive: Drive) -> None:
    run(pg, *T, "CREATE TABLE other (id int PRIMARY KEY)")
    run(pg, "CREATE PUBLICATION s FOR TABLE t")
    run(pg, f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")
    run(pg, "UPDATE t SET v = 'later' WHERE id = 1", "DELETE FROM t WHERE id = 2")
    driver = drive(dbtable="t", changeFormat="changelog")
    rows = driver.take(5)
    assert sorted(by_row(rows[:2])) == [("insert", 1, "a"), ("insert", 2, "b")]
    assert by_row(rows[2:]) == [("update_preimage", 1, "a"), ("update_postimage", 1, "later"), ("delete", 2, "b")]


# --- what it cannot have ---------------------------------------------------------------------------------------------


def test_less_than_full_is_refused_before_anything_is_made(pg: Session, drive: Drive) -> None:
    run(pg, T[0])
    driver = drive(dbtable="t", changeFormat="changelog")
    remedy = 'ALTER TABLE "public"."t" REPLICA IDENTITY FULL'
    text = driver.refusal(
        "public.t does not have REPLICA IDENTITY FULL", f"Remedy: {remedy}; or", kind=ServerSetupError
    )
    assert text.startswith("[SERVER_SETUP] ")
    assert run(pg, "SELECT (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM pg_replication_slots"
                   " WHERE database = current_database())") == [(0, 0)]  # fmt: skip
    run(pg, "CREATE PUBLICATION s FOR TABLE t")
    driver.restart()
    driver.refusal("does not have REPLICA IDENTITY FULL", kind=ServerSetupError)
    run(pg, remedy, "INSERT INTO t VALUES (1, 'a')")
    driver.restart()
    driver.take(1)


def test_an_identity_that_becomes_less_ends_the_stream_before_the_change(pg: Session, drive: Drive) -> None:
    run(pg, *T)
    driver = drive(dbtable="t", changeFormat="changelog")
    driver.take(2)
    run(
        pg,
        "UPDATE t SET v = 'c' WHERE id = 1",
        "ALTER TABLE t REPLICA IDENTITY DEFAULT",
        "INSERT INTO t VALUES (3, 'd')",
    )
    assert kinds(driver.take(3)) == ["update_preimage", "update_postimage", "insert"]
    run(pg, "UPDATE t SET v = 'e' WHERE id = 1")
    driver.refusal("public.t: the commit at ", "was not FULL then", "ALTER TABLE public.t REPLICA IDENTITY FULL")
    # Not even when it is FULL again: the old row of that change is nowhere.
    run(pg, "ALTER TABLE t REPLICA IDENTITY FULL")
    driver.restart()
    driver.refusal("public.t: the commit at ")


def test_a_partitioned_table_is_refused(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t DEFAULT",
        "ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t_1 REPLICA IDENTITY FULL")  # fmt: skip
    drive(dbtable="t", changeFormat="changelog").refusal("public.t is partitioned", kind=ServerSetupError)


def test_where_only_inserts_are_published_no_old_rows_are_needed(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE t (id int, v text)", "CREATE PUBLICATION s FOR TABLE t WITH (publish = 'insert')")
    run(pg, "INSERT INTO t VALUES (1, 'a')")
    driver = drive(dbtable="t", changeFormat="changelog")
    driver.take(1)
    run(pg, "INSERT INTO t VALUES (2, 'b')", "UPDATE t SET v = 'c'", "DELETE FROM t", "INSERT INTO t VALUES (3, 'd')")
    assert by_row(driver.take(2)) == [("insert", 2, "b"), ("insert", 3, "d")]


def test_a_truncate_ends_the_stream_or_is_left_out(pg: Session, drive: Drive) -> None:
    run(pg, *T)
    driver = drive(dbtable="t", changeFormat="changelog")
    driver.take(2)
    run(pg, "TRUNCATE t", "INSERT INTO t VALUES (3, 'c')")
    driver.refusal("public.t was truncated by the commit at ", "onTruncate=ignore leaves it out")
    driver.restart(onTruncate="ignore")
    assert by_row(driver.take(1)) == [("insert", 3, "c")]


def test_a_column_that_was_added_is_null_in_rows_from_before(pg: Session, drive: Drive) -> None:
    run(pg, *T)
    driver = drive(dbtable="t", changeFormat="changelog")
    driver.take(2)
    driver.stop()
    run(pg, "UPDATE t SET v = 'c' WHERE id = 1", "ALTER TABLE t ADD n int DEFAULT 5", "UPDATE t SET n = 6 WHERE id = 1")
    driver.start()
    assert values(driver.take(4), "_change_type", "v", "n") == [
        ("update_preimage", "a", None),
        ("update_postimage", "c", None),
        ("update_preimage", "c", 5),
        ("update_postimage", "c", 6),
    ]


# --- in Spark --------------------------------------------------------------------------------------------------------


def test_a_query_that_was_written_for_a_change_data_feed_runs_unchanged(
    spark: SparkSession, tmp_path: Path, db: str, pg: Session
) -> None:
    run(pg, *T)
    with querying(spark, tmp_path, pg, db, dbtable="t", changeFormat="changelog") as query:
        query.each = lambda df: (
            df.filter(F.col("_change_type") != "update_preimage").select("id", "v", *OWN).orderBy("_commit_version")
        )
        query.start()
        query.take(2)
        run(pg, "UPDATE t SET v = 'c' WHERE id = 1", "DELETE FROM t WHERE id = 2")
        query.take(4)
    assert by_row(query.rows[2:]) == [("update_postimage", 1, "c"), ("delete", 2, "b")]
    assert all(row["_commit_timestamp"] is not None for row in query.rows)


def test_rows_of_the_snapshot_are_not_late_for_a_watermark(
    spark: SparkSession, tmp_path: Path, db: str, pg: Session
) -> None:
    run(pg, *T)
    rows = load_stream(spark, db, dbtable="t", slot="s", changeFormat="changelog")
    rows = rows.withWatermark("_commit_timestamp", "1 hour").dropDuplicates(["id", "_commit_timestamp"])
    found: list[int] = []
    writer = rows.writeStream.foreachBatch(lambda batch, _: found.extend(row["id"] for row in batch.collect()))
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
        drop_slots(pg)
    assert sorted(found) == [1, 2]


def test_rows_that_are_asked_for_again_do_not_end_it(pg: Session, drive: Drive) -> None:
    run(pg, *T)
    driver = drive(dbtable="t", changeFormat="changelog")
    driver.take(2)
    run(pg, """SELECT pg_logical_emit_message(true, 'pgcdc', '{"snapshot": ["*"]}')""", "INSERT INTO t VALUES (3, 'c')")
    assert by_row(driver.take(1)) == [("insert", 3, "c")]
    # A row that takes back all others would end the query, at each start.
    assert driver.offset.due == ()
