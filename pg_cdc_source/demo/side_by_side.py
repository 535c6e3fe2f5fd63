"""Read beside Spark's JDBC source: a sum while money moves, and a table that is large enough to show speed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg2
from psycopg2.extensions import parse_dsn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich.console import Console

from pg_cdc_source.demo.jdbc import jdbc_options
from pg_cdc_source.demo.progress import shown
from pg_cdc_source.demo.shop import Opened, orders_coming_in

_ROUNDS = 10
_READINGS_FOR_EACH_ORDER = 20

# Beside the shop, so that no mirror takes it. It is read before anything could be lost in a crash.
_READINGS = """
CREATE UNLOGGED TABLE readings (
  id bigint NOT NULL,
  sensor integer NOT NULL,
  at timestamptz NOT NULL,
  celsius double precision NOT NULL,
  humidity real,
  litres numeric(12,3) NOT NULL,
  state text NOT NULL,
  firmware uuid NOT NULL
);
INSERT INTO readings
SELECT n, n % 5000, timestamptz '2025-01-01 00:00+00' + n * interval '1.000001 seconds', n % 400 / 8.0,
  CASE WHEN n % 11 > 0 THEN n % 1000 / 10.0 END, n % 100000 / 1000.0,
  (ARRAY['ok', 'ok', 'ok', 'warming up', 'needs service'])[1 + n % 5], md5((n % 40)::text)::uuid
FROM generate_series(1, %s) AS n;
"""


@dataclass(frozen=True, slots=True)
class ReaderResult:
    """What one way to read has shown. ``true_sums`` of ``sums`` were what the sum is at every moment."""

    reader: str
    true_sums: int
    sums: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str
    load: Callable[[str, int], DataFrame]  # a table whose ids begin with 1, and end with this one


def add_readings(url: str, orders: int) -> int:
    """Make a table that is large beside the shop's; returns how many rows it has."""
    count = orders * _READINGS_FOR_EACH_ORDER
    with contextlib.closing(psycopg2.connect(url)) as session, session, session.cursor() as cursor:
        cursor.execute(_READINGS.replace("%s", str(count)))
        return count


def read_side_by_side(
    spark: SparkSession, url: str, opened: Opened, readings: int, console: Console, *, with_jdbc: bool
) -> tuple[ReaderResult, ...]:
    """Let both, or ``pgsnapshot`` alone, add up balances while orders move them, then read all readings."""
    readers = [_ours(spark, url), *([_jdbc(spark, url)] if with_jdbc else [])]
    true = dict.fromkeys(readers, 0)
    with console.status("Adding up all balances while money moves"), orders_coming_in(url):
        for _ in range(_ROUNDS):
            for reader in readers:
                total = reader.load("shop.customers", opened.orders // 3).agg(f.sum("balance")).collect()[0][0]
                true[reader] += str(total) == opened.balance
    results = []
    for reader in readers:
        with shown(console, spark, f"Reading {readings:,} rows with {reader.name}", url):
            start = time.monotonic()
            reader.load("readings", readings).write.format("noop").mode("overwrite").save()
            results.append(ReaderResult(reader.name, true[reader], _ROUNDS, readings, time.monotonic() - start))
    return tuple(results)


def _ours(spark: SparkSession, url: str) -> _Reader:
    def load(table: str, last_id: int) -> DataFrame:
        # Small tables have one range; the sums shall be of several.
        return spark.read.format("pgsnapshot").options(url=url, dbtable=table, numPartitions=_partitions(spark)).load()

    return _Reader("pgsnapshot", load)


def _jdbc(spark: SparkSession, url: str) -> _Reader:
    def load(table: str, last_id: int) -> DataFrame:
        bounds = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(last_id)}
        options = {**jdbc_options(parse_dsn(url)), **bounds, "dbtable": table}
        return spark.read.format("jdbc").options(**options, numPartitions=_partitions(spark)).load()

    return _Reader("Spark JDBC", load)


def _partitions(spark: SparkSession) -> int:
    return max(2, spark.sparkContext.defaultParallelism)
