"""``mirror`` into tables of Spark's own formats, by a driver that is killed while it writes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import lake_jars
import pytest
from databases import connect
from driving import drop_slots, run
from lake import rows_of, rows_of_arrow
from mirroring import arguments
from points import some_of
from psycopg2.extensions import connection as Session
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from sessions import SparkSessions
from threads import at_work
from watch import wait_until

from pg_cdc_source import mirror, mirror_at
from pg_cdc_source.mirrors.query import Format, ledger_at

PROGRAM = Path(__file__).parents[1] / "helpers" / "mirroring.py"
FORMATS = [
    pytest.param(name, marks=[*marks, pytest.mark.skipif(why is not None, reason=why or "")])
    # One of them in every run: what is tested is the same, and a minute or two is much.
    for name, marks in (("delta", [pytest.mark.repeated]), ("iceberg", [pytest.mark.corner]))
    for why in [lake_jars.lacking(name)]
]


@pytest.mark.parametrize("format", FORMATS)
def test_a_driver_that_is_killed_goes_on_where_it_was(
    format: Format, db: str, pg: Session, tmp_path: Path, spark_sessions: SparkSessions
) -> None:
    run(pg, "CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE TABLE b (id int PRIMARY KEY, n int, note text)",
        "INSERT INTO a SELECT i, 100 FROM generate_series(1, 500) AS i",
        "INSERT INTO b SELECT i, 100, repeat(md5(i::text), 200) FROM generate_series(1, 500) AS i")  # fmt: skip
    given = arguments(tmp_path, db, format)
    ledger = given["target"].format(table="_pgcdc")
    chance = random.Random(5)
    begun: list[int] = []  # batches that a kill may have broken

    def transfer(stop: threading.Event) -> None:
        with connect(db) as session, session.cursor() as cursor:
            while not stop.wait(0.02):
                i, j, amount = chance.randint(1, 500), chance.randint(1, 500), chance.randint(1, 9)
                cursor.execute(f"BEGIN; UPDATE a SET n = n - {amount} WHERE id = {i};"
                               f" UPDATE b SET n = n + {amount} WHERE id = {j}; COMMIT")  # fmt: skip

    def stage() -> set[str]:
        found = tmp_path / "checkpoint" / "pgcdc-staging"
        return {path.name for path in found.iterdir()} if found.exists() else set()

    try:
        with at_work(transfer):
            for _ in range(2):
                process = subprocess.Popen([sys.executable, PROGRAM, tmp_path, db, format], start_new_session=True)
                try:
                    before = len(commits(tmp_path))
                    wait_until(lambda before=before: len(commits(tmp_path)) > before + 4, 120)  # type: ignore[misc]
                    # What is staged is being merged, or about to be.
                    wait_until(stage, 60)
                    time.sleep(chance.uniform(0, 1.5))
                finally:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                begun.append(max(int(path.name) for path in (tmp_path / "checkpoint" / "offsets").glob("[0-9]*")))
            spark = spark_sessions.get(**lake_jars.conf(tmp_path / "warehouse"))
            query = mirror(spark, **given)
            # First rows that were read again after a kill keep their tables aside for a while.
            whole = "cardinality(set_aside) = 0 AND cardinality(tables) = 2"
            wait_for(query, lambda: rows_of_ledger(spark, ledger, format).where(whole).count() > 2)
        wait_for(query, lambda: is_same(spark, pg, ledger, format))
        query.stop()
        expect_one_point(spark, ledger, format, begun)
    finally:
        # Its warehouse is of no use to other tests.
        spark_sessions.stop()
        drop_slots(pg)


def wait_for(query: StreamingQuery, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, or the query has failed."""

    def holds() -> bool:
        assert query.exception() is None, query.exception()
        return condition()

    wait_until(holds, 120)


def rows_of_ledger(spark: SparkSession, ledger: str, format: Format) -> DataFrame:
    return spark.table(f"delta.`{ledger}`" if format == "delta" else ledger)


def commits(directory: Path) -> list[Path]:
    """The files that commits have left, of either format."""
    return [*directory.glob("lake/*/_delta_log/*.json"), *directory.glob("warehouse/iceberg/bank/*/metadata/v*.json")]


def is_same(spark: SparkSession, pg: Session, ledger: str, format: Format) -> bool:
    """Whether the tables are PostgreSQL's."""
    now = mirror_at(spark, ledger, format=format)
    return len(now) == 2 and all(rows_of_arrow(now[f"public.{name}"].toArrow()) == rows_of(pg, name) for name in "ab")


def expect_one_point(spark: SparkSession, ledger: str, format: Format, begun: Collection[int]) -> None:
    """At rows of the ledger, those of the batches ``begun`` among them, the tables are those of one point."""
    rows = rows_of_ledger(spark, ledger, format).orderBy("batch_id").collect()
    assert [row.batch_id for row in rows] == sorted({row.batch_id for row in rows})
    looked = 0
    # The batch that goes on, and the next.
    behind = [i for i, row in enumerate(rows) if row.batch_id in begun or row.batch_id - 1 in begun]
    for lsn in dict.fromkeys(row.lsn for row in some_of(rows, 8, behind)):
        tables = mirror_at(spark, ledger, lsn, format=format)
        if len(tables) == 2:
            a, b = (tables[f"public.{name}"].select("n") for name in "ab")
            assert a.union(b).selectExpr("sum(n)").collect() == [(100_000,)]
            looked += 1
    assert looked > 2
    assert ledger_at(spark, ledger, format).said
