"""What a reader keeps in memory is bounded by bytes: neither wide rows nor long tables fill it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from frames import load
from psycopg2.extensions import connection as Session
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

MB = 1 << 20


class Peak:
    """The most memory that one worker had resident."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def watching_workers() -> Iterator[Peak]:
    """Ask the kernel, again and again, for the peak of each Python process below the driver's JVM."""
    gateway = SparkContext._gateway
    assert gateway is not None
    jvm = psutil.Process(gateway.proc.pid)
    peak, stop = Peak(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for process in jvm.children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError, IndexError):
                    peak.bytes = max(peak.bytes, peak_bytes(process.pid))

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.fixture
def spark(spark_session: Callable[..., SparkSession]) -> SparkSession:
    """A session whose workers are new for each task: what earlier tests took does not count."""
    return spark_session(**{"spark.python.worker.reuse": "false"})


def summary(df: DataFrame, *expressions: str) -> tuple[int, ...]:
    row = df.selectExpr(*expressions).first()
    assert row is not None
    return tuple(row)


# 50 MB that cannot be compressed, made fast: the same 5 MB of random bytes ten times, which pglz does not see.
RANDOM_BYTES = (
    "(SELECT string_agg(sha512((seed || '-' || i)::bytea), ''::bytea ORDER BY i) FROM generate_series(1, 78125) AS i)"
)
FIFTY_MB = {
    "bytea": (f"SELECT decode(repeat(encode(r, 'hex'), 10), 'hex') FROM (SELECT {RANDOM_BYTES} AS r) AS one", "bytea"),
    "text": ("SELECT repeat('a', 50000000)", "text"),
}


@pytest.mark.parametrize("kind", FIFTY_MB)
def test_values_of_50_mb_are_read_within_1_gb(kind: str, db: str, pg: Session, spark: SparkSession) -> None:
    select, type_name = FIFTY_MB[kind]
    with pg.cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE wide (id int, v {type_name});"
            f" INSERT INTO wide SELECT 1, v FROM ({select.replace('seed', '1')}) AS one (v)"
        )
        # The TOASTed value is copied as it is, five times.
        cursor.execute("INSERT INTO wide SELECT i, v FROM wide, generate_series(2, 6) AS i")
        cursor.execute("SELECT octet_length(v), md5(v) FROM wide WHERE id = 6")
        length, digest = cursor.fetchone()
    assert length == 50_000_000
    with watching_workers() as peak:
        df = load(spark, db, dbtable="wide", numPartitions=1)
        got = df.selectExpr("id", "octet_length(v) AS length", "md5(CAST(v AS BINARY)) AS digest").collect()
    assert sorted(map(tuple, got)) == [(i, length, digest) for i in range(1, 7)]
    assert 100 * MB < peak.bytes < 1024 * MB


def test_a_long_table_is_read_within_300_mb(db: str, pg: Session, spark: SparkSession) -> None:
    rows = 2_000_000
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE UNLOGGED TABLE long AS SELECT i AS id, i::bigint * 7 AS n, 'row number ' || i AS t,"
            f" (i % 1000)::numeric(10,2) AS d FROM generate_series(1, {rows}) AS i"
        )
    with watching_workers() as peak:
        df = load(spark, db, dbtable="long", numPartitions=2)
        got = summary(df, "count(*)", "sum(id)", "sum(n)", "sum(length(t))")
    assert got[:3] == (rows, rows * (rows + 1) // 2, 7 * rows * (rows + 1) // 2)
    assert 50 * MB < peak.bytes < 300 * MB
