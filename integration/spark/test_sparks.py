"""Spark as users set it up: clusters, Connect, and sessions whose settings must not change a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bank import ACCOUNTS, TABLES, TOTAL, join, open_bank, self_join, transfers
from clusters import connect_server, standalone_cluster
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from sessions import SparkSessions
from streams import Collected, load_stream, running, wait_for_rows
from watch import wait_until

from pg_cdc_source import collapse, project


def drop_slot(pg: Session, slot: str) -> None:
    """Drop a slot as soon as its stream has let it go."""
    with pg.cursor() as cursor:

        def let_go() -> bool:
            cursor.execute("SELECT active FROM pg_replication_slots WHERE slot_name = %s", (slot,))
            return bool(cursor.fetchall() == [(False,)])

        wait_until(let_go)
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


# Hundreds of transfers in the time of an action, and the cores are Spark's.
PAUSE_SECONDS = 0.01


# --- clusters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standalone(spark_sessions: SparkSessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The master of a cluster of two workers."""
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as url:
        yield url
        # Before its master goes: a driver that loses it would end the JVM's context with an error.
        spark_sessions.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, spark_session: Callable[..., SparkSession]) -> SparkSession:
    """A session on the master that the test is called with, which has two executors where it has any."""
    master = request.getfixturevalue("standalone") if request.param == "standalone" else request.param
    spark = spark_session(master=master)
    if not master.startswith("local["):

        def executors() -> bool:
            known = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
            # The driver counts as one.
            return len(known) == 3

        wait_until(executors, 120)
    return spark


MASTERS = [
    pytest.param("local-cluster[2,1,1024]", id="local-cluster", marks=pytest.mark.matrix("local-cluster")),
    pytest.param("standalone", id="standalone", marks=pytest.mark.matrix("standalone cluster")),
]


@pytest.mark.parametrize("cluster", MASTERS, indirect=True)
def test_executors_read_one_point_and_its_changes(cluster: SparkSession, db: str, pg: Session, tmp_path: Path) -> None:
    open_bank(pg)
    ours = [load(cluster, db, dbtable=table, numPartitions=3, lsnColumn="lsn") for table in TABLES]
    with transfers(db, PAUSE_SECONDS) as done:
        wait_until(lambda: done.committed > 10)
        points = []
        for action in (self_join, join):
            ((total, rows, lsns),) = action(*ours).collect()
            assert (total, rows, len(lsns)) == (TOTAL, ACCOUNTS, 1), action.__name__
            points += lsns
        assert points[0] < points[1], "no money moved meanwhile"
    into = Collected()
    rows = load_stream(cluster, db, dbtable=TABLES[0], slot="cluster", partitionBytes="300kB")
    parts: list[int] = []
    with running(rows, tmp_path, into, lambda batch, _: parts.append(batch.rdd.getNumPartitions())) as query:
        found = {row["id"]: row["balance"] for row in wait_for_rows(query, into, ACCOUNTS)}
        with pg.cursor() as cursor:
            cursor.execute("UPDATE checking SET balance = -balance WHERE id % 2 = 0")
        changes = wait_for_rows(query, into, ACCOUNTS + ACCOUNTS // 2)[ACCOUNTS:]
    assert (max(parts) > 2) == (pg.server_version >= 140000)  # before, a table is one range
    assert {row["_change_type"] for row in changes} == {"update"}
    found |= {row["id"]: row["balance"] for row in changes}
    with pg.cursor() as cursor:
        cursor.execute("SELECT id, balance FROM checking")
        assert found == dict(cursor.fetchall())
    drop_slot(pg, "cluster")


@pytest.mark.matrix("Spark Connect")
def test_a_client_of_a_connect_server_reads_and_follows(
    standalone: str, spark_sessions: SparkSessions, db: str, pg: Session, tmp_path: Path
) -> None:
    """Client, server, workers and executors are processes of their own; the client starts no JVM."""
    # The cluster has no core left while a session of another test is there.
    spark_sessions.stop()
    open_bank(pg)
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int PRIMARY KEY, x text); CREATE PUBLICATION remote FOR TABLE t")
        cursor.execute("SELECT pg_create_logical_replication_slot('remote', 'pgoutput')")
        # One transaction, so that no batch ends within it.
        cursor.execute(
            "INSERT INTO t SELECT i, i FROM generate_series(1, 9) AS i;"
            " UPDATE t SET x = 'changed' WHERE id = 1; DELETE FROM t WHERE id = 2"
        )
    client = Path(__file__).parents[1] / "helpers" / "connect_remote.py"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": "/nonexistent"}
    with connect_server(tmp_path / "server", standalone) as url:
        command = [sys.executable, str(client), url, db, str(tmp_path)]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as running_client:
            assert running_client.stdout is not None
            told = (json.loads(line) for line in running_client.stdout if line.startswith(b"{"))
            # Until the sums are read: the last part is of other tables.
            with transfers(db, PAUSE_SECONDS):
                seen = next(told)
            seen |= next(told)
        assert running_client.returncode == 0
    assert [*seen["held"], seen["sums"]] == [[TOTAL, 2 * ACCOUNTS, 1]] * 3
    expected = [[i, str(i), "insert"] for i in range(3, 10)]
    assert seen["changes"] == [[1, "changed", "insert"], [2, None, "delete"], *expected]
    drop_slot(pg, "remote")


# --- settings of the session -----------------------------------------------------------------------------------------

MOMENTS = [
    # In the gap and in the hour that New York's clocks show twice; where Kathmandu's zone changed; where zones began.
    *("2024-03-10 02:30:00", "2024-03-10 07:30:00.000001", "2024-11-03 05:30:00", "2024-11-03 06:30:00"),
    *("1985-12-31 18:29:59.999999", "1985-12-31 18:30:00", "1883-11-18 17:00:00", "1582-10-10 12:00:00"),
    *("1969-12-31 23:59:59.5", "0002-01-01 00:00:00", "9998-12-31 23:59:59.999999"),
]
ZONE = "spark.sql.session.timeZone"
SETTINGS: dict[str, dict[str, str]] = {
    "New York": {ZONE: "America/New_York"},
    "Kathmandu": {ZONE: "Asia/Kathmandu"},
    "without ANSI": {"spark.sql.ansi.enabled": "false"},
    "timestamps without zone": {"spark.sql.timestampType": "TIMESTAMP_NTZ"},
    "small Arrow batches": {"spark.sql.execution.arrow.maxRecordsPerBatch": "2"},
    "large Arrow types": {"spark.sql.execution.arrow.useLargeVarTypes": "true"},
    "compressed Arrow": {"spark.sql.execution.arrow.compression.codec": "zstd"},
    "without Arrow": {"spark.sql.execution.arrow.pyspark.enabled": "false"},
    "binary as bytearray": {"spark.sql.execution.pyspark.binaryAsBytes": "false"},
    "names by their case": {"spark.sql.caseSensitive": "true"},
    "filters pushed down": {"spark.sql.python.filterPushdown.enabled": "true"},
    "not adaptive": {"spark.sql.adaptive.enabled": "false"},
}
# What a stream is run under, since it takes longer: everything that can go together.
TOGETHER = {
    "New York": ["New York", "without ANSI", "timestamps without zone", "compressed Arrow", "filters pushed down"],
    "Kathmandu": ["Kathmandu", "small Arrow batches", "large Arrow types", "without Arrow", "binary as bytearray"],
}
TYPES = ["int", "timestamp_ntz", "timestamp", "date", "array<string>", "binary", "decimal(12,2)"]


@pytest.fixture
def moments(pg: Session) -> None:
    with pg.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
        cursor.execute(
            "CREATE TABLE moments (id int PRIMARY KEY, local timestamp, instant timestamptz, day date, texts text[],"
            " raw bytea, price numeric(12,2));"
            " INSERT INTO moments SELECT n, m::timestamp, m::timestamptz, m::date, ARRAY[m, NULL], m::bytea, n / 4.0"
            " FROM unnest(%s) WITH ORDINALITY AS given (m, n); INSERT INTO moments VALUES (0)",
            (MOMENTS,),
        )


def seen_by_postgresql(pg: Session, zone: str) -> list[tuple[Any, ...]]:
    """Every row, with the instant as microseconds and as the clocks of ``zone`` show it."""
    with pg.cursor() as cursor:
        cursor.execute(
            # Before 14, extract() gives a float8, too coarse for the microseconds of old times.
            "SELECT id, local::text, extract(epoch FROM date_trunc('second', instant))::bigint * 1000000"
            "  + extract(microseconds FROM instant)::bigint %% 1000000, (instant AT TIME ZONE %s)::text,"
            " day::text, array_to_json(texts)::text, upper(encode(raw, 'hex')), price::text FROM moments ORDER BY id",
            (zone,),
        )
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def seen_by_spark(rows: DataFrame) -> list[tuple[Any, ...]]:
    texts = ("string(local)", "unix_micros(instant)", "string(instant)", "string(day)")
    found = rows.selectExpr("id", *texts, "to_json(texts)", "hex(raw)", "string(price)").collect()
    return sorted(tuple(row) for row in found)


@pytest.fixture
def set_all(spark: SparkSession) -> Iterator[Callable[[dict[str, str]], None]]:
    """Change settings of the session, in place of those that were changed before; all are as they were afterwards."""
    before: dict[str, str | None] = {}

    def set_all(settings: dict[str, str]) -> None:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
        before.clear()
        for name, value in settings.items():
            before[name] = spark.conf.get(name, None)
            spark.conf.set(name, value)

    yield set_all
    set_all({})


@pytest.mark.matrix("time zones, ANSI, Arrow's settings")
def test_settings_change_no_value_of_a_snapshot(
    spark: SparkSession, db: str, pg: Session, moments: None, set_all: Callable[[dict[str, str]], None]
) -> None:
    loaded_before = load(spark, db, dbtable="moments", numPartitions=2)
    assert [field.dataType.simpleString() for field in loaded_before.schema] == TYPES
    for name, settings in SETTINGS.items():
        set_all(settings)
        loaded_under = load(spark, db, dbtable="moments")
        assert loaded_under.schema == loaded_before.schema, name
        expected = seen_by_postgresql(pg, settings.get(ZONE, "UTC"))
        found = seen_by_spark(loaded_before.unionAll(loaded_under))
        assert (found[::2], found[1::2]) == (expected, expected), name


@pytest.mark.matrix("time zones, ANSI, Arrow's settings")
@pytest.mark.parametrize("together", TOGETHER)
def test_settings_change_no_value_of_a_stream(
    together: str,
    spark: SparkSession,
    db: str,
    pg: Session,
    moments: None,
    set_all: Callable[[dict[str, str]], None],
    tmp_path: Path,
) -> None:
    settings = {key: value for name in TOGETHER[together] for key, value in SETTINGS[name].items()}
    set_all(settings)
    found: dict[int, tuple[Any, ...]] = {}
    late: list[float] = []

    def apply(batch: DataFrame, _: int) -> None:
        typed = project(batch, "moments", url=db)
        assert [field.dataType.simpleString() for field in typed.schema][: len(TYPES)] == TYPES
        times = batch.where("_commit_ts IS NOT NULL").selectExpr("unix_millis(now()) - unix_millis(_commit_ts)")
        late.extend(row[0] / 1000 for row in times.collect())
        # Last: the query is stopped when this is what it has to be.
        found.update((row[0], row) for row in seen_by_spark(collapse(typed, "id")))

    rows = load_stream(spark, db, tables="public.moments", slot="settings")
    query = rows.writeStream.foreachBatch(apply).option("checkpointLocation", str(tmp_path)).start()
    try:
        wait_until(lambda: query.exception() or len(found) > len(MOMENTS), 180)
        with pg.cursor() as cursor:
            cursor.execute("UPDATE moments SET price = price + 1, day = day + 1 WHERE id > 3")
        expected = seen_by_postgresql(pg, settings[ZONE])
        wait_until(lambda: query.exception() or [found[i] for i in sorted(found)] == expected, 120)
    finally:
        query.stop()
    assert query.exception() is None
    assert late
    # A zone that was taken for another one would make it hours.
    assert all(-60 < seconds < 600 for seconds in late)
    drop_slot(pg, "settings")


def test_python_workers_may_be_new_for_every_task(
    spark_session: Callable[..., SparkSession], db: str, pg: Session, tmp_path: Path
) -> None:
    """Without Spark's daemon, workers are children of the JVM itself, and none does two things."""
    settings = {"spark.python.use.daemon": "false", "spark.python.worker.reuse": "false"}
    # Spark gives such a worker 10 s to start, too few on a slow and busy machine: a task may fail and run again.
    spark = spark_session("local[2, 4]", **settings, **{"spark.python.unix.domain.socket.enabled": "true"})
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 9)")
    snapshot = load(spark, db, dbtable="t", lsnColumn="lsn")
    assert snapshot.unionAll(snapshot).selectExpr("count(*)", "count(DISTINCT lsn)").collect() == [(18, 1)]
    into = Collected()
    with running(load_stream(spark, db, dbtable="t", slot="new"), tmp_path, into) as query:
        assert {row["id"] for row in wait_for_rows(query, into, 9)} == set(range(1, 10))
    drop_slot(pg, "new")
