"""Faults inside a read: it gives every row exactly once, or one error that says what happened."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from databases import connect
from driving import refusal_of
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from refusals import refusal
from scans import planned, rows_of
from servers import second_server
from sessions import SparkSessions
from watch import holders, keeper_processes, readers, wait_until

from pg_cdc_source import open_snapshot
from pg_cdc_source.errors import UnrepresentableError


def run(pg: Session, statements: str) -> list[tuple[Any, ...]]:
    with pg.cursor() as cursor:
        cursor.execute(statements)
        return cursor.fetchall() if cursor.description else []


class Action(threading.Thread):
    """An action that runs beside the test."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(name="action", daemon=True)
        self._act = act
        self._outcome: list[Any] = []
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome.append(self._act())
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        self.join(120)
        assert not self.is_alive(), "the action did not end"
        if self._error is not None:
            raise self._error
        return self._outcome[0]


# --- servers and databases ------------------------------------------------------------------------------------------


def test_a_server_that_restarts_fails_the_action_and_not_the_next_one(spark: SparkSession) -> None:
    with second_server({}) as url:
        with connect(url) as session:
            run(session, "CREATE TABLE t AS SELECT generate_series(1, 20000) AS id")
            df = load(
                spark,
                url,
                dbtable="t",
                numPartitions=4,
                where="id % 1000 > 0 OR pg_sleep(0.2) IS NOT NULL",
                batchBytes="64kB",
            )
            action = Action(lambda: refusal(df.count))
            wait_until(lambda: len(holders(session)) == 2 and readers(session))
            # PostgreSQL answers the crash of one of its processes with a restart.
            os.kill(session.info.backend_pid, signal.SIGKILL)
        text = action.result()
        assert "[SNAPSHOT_LOST] the snapshot of this action has ended" in text
        assert "Remedy: run the action again" in text
        assert load(spark, url, dbtable="t").count() == 20000
        assert df.count() == 20000


def test_the_keeper_ends_when_its_database_is_gone(
    db: str, pg: Session, spark: SparkSession, spark_sessions: SparkSessions
) -> None:
    before = keeper_processes(spark_sessions.scratch)
    run(pg, "CREATE DATABASE short_lived")
    try:
        run(pg, "CREATE TABLE t AS SELECT 1 AS id")
        url = f"{db} dbname=short_lived"
        with connect(url) as session:
            run(session, "CREATE TABLE t AS SELECT 1 AS id")
        assert load(spark, url, dbtable="t").count() == 1
        keepers = keeper_processes(spark_sessions.scratch) - before
        assert keepers
    finally:
        run(pg, "DROP DATABASE short_lived WITH (FORCE)")
    wait_until(lambda: not any(keeper.is_running() for keeper in keepers))


# --- values that Spark cannot hold ----------------------------------------------------------------------------------

UNREPRESENTABLE = {
    "numeric(10,2)": ("'NaN'", "NaN"),
    "date": ("'infinity'", "infinity"),
    "timestamptz": ("'20000-01-01'", "a year outside 1 to 9999"),
    "timestamp[]": ("ARRAY['-infinity'::timestamp]", "an element: infinity"),
    "int[]": ("'{{1,2},{3,4}}'", "an array of more than one dimension"),
}
ORDINARY = {
    "numeric(10,2)": "i",
    "date": "date '2020-01-01' + i",
    "timestamptz": "timestamptz '2020-01-01' + i * interval '1 s'",
    "timestamp[]": "ARRAY[timestamp '2020-01-01']",
    "int[]": "ARRAY[i]",
}


def fill(pg: Session, type_name: str) -> str:
    """Make ``t``, in which row 4321 has a value that Spark cannot hold; that row's ctid."""
    literal, _ = UNREPRESENTABLE[type_name]
    value = f"CASE i WHEN 4321 THEN {literal}::{type_name} ELSE ({ORDINARY[type_name]})::{type_name} END"
    run(
        pg,
        f"CREATE TABLE t (id int NOT NULL, n {type_name}, padding text);"
        f" INSERT INTO t SELECT i, {value}, repeat('x', 100) FROM generate_series(1, 5000) AS i;"
        # The first rows become holes: a row's number in the range is not its number in the table.
        " DELETE FROM t WHERE id <= 1000",
    )
    [(ctid,)] = run(pg, "SELECT ctid::text FROM t WHERE id = 4321")
    return str(ctid)


@pytest.mark.parametrize("type_name", UNREPRESENTABLE)
def test_a_value_that_spark_cannot_hold_is_named_by_its_place(type_name: str, db: str, pg: Session) -> None:
    ctid, (_, reason) = fill(pg, type_name), UNREPRESENTABLE[type_name]
    expected = ("public.t, column n", f"ctid {ctid}: {reason}", "asString=n", "unrepresentable=null")
    with open_snapshot(db) as snapshot:
        for partitions in ("1", "5"):
            scan = planned(snapshot, dbtable="t", numPartitions=partitions)
            text = refusal_of(partial(rows_of, scan), *expected, kind=UnrepresentableError)
            assert "4321" not in text
        nulls = rows_of(planned(snapshot, dbtable="t", unrepresentable="null"))
        assert [row["id"] for row in nulls if row["n"] in (None, [None])] == [4321]
        [as_text] = rows_of(planned(snapshot, dbtable="t", asString="n", where="id = 4321"))
    assert [(as_text["n"],)] == run(pg, "SET TimeZone = 'UTC'; SELECT n::text FROM t WHERE id = 4321")


def test_a_value_that_spark_cannot_hold_is_named_in_spark(db: str, pg: Session, spark: SparkSession) -> None:
    ctid = fill(pg, "date")
    for cut in ({"numPartitions": 1}, {"numPartitions": 5}):
        df = load(spark, db, dbtable="t", **cut)
        text = refusal(df.collect, "UnrepresentableError", "public.t, column n", f"ctid {ctid}: infinity", "asString=n")
        assert "4321" not in text
        assert "unrepresentable=null" in text
    nulls = load(spark, db, dbtable="t", unrepresentable="null").where("n IS NULL")
    assert [row.id for row in nulls.collect()] == [4321]
    as_text = load(spark, db, dbtable="t", asString="n", where="id = 4321").first()
    assert as_text is not None
    assert as_text.n == "infinity"


def test_a_place_is_right_where_an_index_alone_holds_the_columns(db: str, pg: Session, spark: SparkSession) -> None:
    run(
        pg,
        "CREATE TABLE t (n numeric(10,2), padding text) WITH (autovacuum_enabled = off);"
        " INSERT INTO t SELECT CASE i WHEN 77 THEN 'NaN' ELSE (9000 - i)::numeric END, repeat('x', 500)"
        " FROM generate_series(1, 3000) AS i; CREATE INDEX ON t (n)",
    )

    def index_alone() -> bool:
        # Not while another session, as autovacuum's, has a snapshot that is older than the rows.
        run(pg, "VACUUM ANALYZE t")
        return "Index Only Scan" in str(run(pg, "EXPLAIN SELECT n FROM t"))

    # PostgreSQL would read n from the index, in another order than the table's.
    wait_until(index_alone)
    [(ctid,)] = run(pg, "SELECT ctid::text FROM t WHERE n = 'NaN'")
    refusal(load(spark, db, dbtable="t", columns="n").collect, f"ctid {ctid}: NaN")
    [row] = load(spark, db, dbtable="t", columns="n", where="n = 8000").collect()
    assert row.n == Decimal("8000.00")


def test_a_value_in_a_query_is_named_by_its_row(db: str, spark: SparkSession) -> None:
    df = load(spark, db, query="SELECT CASE i WHEN 3 THEN date '-infinity' END AS d FROM generate_series(1, 5) AS i")
    refusal(df.collect, "UnrepresentableError", "the query, column d (date), row 3: infinity", "asString=d")
