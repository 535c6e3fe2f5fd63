"""The examples do what they say, run as scripts, twice and more."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from commands import COMMAND
from deltalake import DeltaTable
from psycopg2.extensions import connection as Session
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from sessions import JVM_OPTIONS
from watch import wait_until

from pg_cdc_source import Lsn, mirror_at

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run an example as a script, in the Spark session that is there."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def run(pg: Session, sql: str) -> None:
    with pg.cursor() as cursor:
        cursor.execute(sql)


def rows_of(pg: Session, table: str) -> Counter[tuple[Any, ...]]:
    with pg.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        return Counter(cursor)


@pytest.fixture(autouse=True)
def _slots_dropped(pg: Session) -> Iterator[None]:
    yield

    def dropped() -> bool:
        with pg.cursor() as cursor:
            here = "FROM pg_replication_slots WHERE database = current_database()"
            cursor.execute(f"SELECT pg_drop_replication_slot(slot_name) {here} AND NOT active")
            cursor.execute(f"SELECT {here}")
            return bool(cursor.rowcount == 0)

    wait_until(dropped)


def test_stream_to_delta_keeps_a_table_equal(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "delta")

    def copied() -> Counter[tuple[Any, ...]]:
        run_example(monkeypatch, "stream_to_delta.py", db, "public.t", "id,Kind", target, str(tmp_path / "checkpoint"))
        columns = DeltaTable(target).to_pyarrow_table().columns
        return Counter(zip(*(column.to_pylist() for column in columns), strict=True))

    def copied_at_last() -> Counter[tuple[Any, ...]]:
        with contextlib.suppress(StreamingQueryException):
            return copied()
        return Counter()

    # The large text is stored out of line, so that it does not travel with an update of the number.
    run(
        pg,
        'CREATE TABLE t (id int, "Kind" text, n numeric(8,2), body text, at timestamptz, PRIMARY KEY (id, "Kind"));'
        " ALTER TABLE t ALTER body SET STORAGE EXTERNAL;"
        " INSERT INTO t SELECT i, 'k' || i % 3, i, repeat(i::text, 5000), now() FROM generate_series(1, 30) AS i",
    )
    assert copied() == rows_of(pg, "t")
    run(pg, "UPDATE t SET n = n + 1 WHERE id < 10; DELETE FROM t WHERE id = 5; INSERT INTO t VALUES (31, 'k', 0)")
    run(pg, "UPDATE t SET id = 100, body = 'moved' WHERE id = 7; DELETE FROM t WHERE id = 31")
    assert copied() == rows_of(pg, "t")
    run(pg, "CREATE TABLE unrelated AS SELECT 1")
    assert copied() == rows_of(pg, "t"), "a batch without rows changed something"
    run(pg, "TRUNCATE t; INSERT INTO t VALUES (1, 'new', 1.5, NULL, NULL)")
    run(pg, "INSERT INTO t VALUES (2, 'before', 2.5, NULL, NULL)")
    run(pg, "ALTER TABLE t ADD COLUMN note text")
    run(pg, "INSERT INTO t VALUES (3, 'behind', 2.5, NULL, NULL, 'a note')")
    wait_until(lambda: copied_at_last() == rows_of(pg, "t"))
    run(pg, "ALTER TABLE t ALTER n TYPE numeric(10, 4); INSERT INTO t VALUES (4, 'finer', 1.2345)")

    def is_refused() -> bool:
        try:
            copied()
        except StreamingQueryException as error:
            return "has other types for ['n']" in str(error)
        return False

    # Delta's own merge would round the value.
    wait_until(is_refused)


def test_append_log_has_every_change_once(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log() -> list[tuple[Any, ...]]:
        run_example(monkeypatch, "append_log.py", db, "public", str(tmp_path))
        written = spark.read.parquet(str(tmp_path / "log")).where("_change_type <> 'schema'")
        value = [f.get_json_object(name, "$.v") for name in ("before", "after")]
        rows = written.orderBy("_commit_lsn", "_seq", "table", "after").select("table", "_change_type", *value)
        return [tuple(row) for row in rows.collect()]

    run(pg, "CREATE TABLE a (id int PRIMARY KEY, v text); INSERT INTO a VALUES (1, 'one'), (2, 'two')")
    run(pg, "CREATE TABLE b (v text); ALTER TABLE b REPLICA IDENTITY FULL; INSERT INTO b VALUES ('x')")
    expected: list[tuple[Any, ...]] = [
        ("public.a", "snapshot", None, "one"),
        ("public.a", "snapshot", None, "two"),
        ("public.b", "snapshot", None, "x"),
    ]
    assert log() == expected
    run(pg, "INSERT INTO a VALUES (3, 'three')")
    run(pg, "UPDATE b SET v = 'y'")
    run(pg, "DELETE FROM a WHERE id = 1")
    expected += [
        ("public.a", "insert", None, "three"),
        ("public.b", "update", "x", "y"),
        ("public.a", "delete", None, None),
    ]
    assert log() == expected
    run(pg, "ALTER TABLE a ADD COLUMN w int")
    run(pg, "INSERT INTO a VALUES (4, 'four', 4)")
    expected.append(("public.a", "insert", None, "four"))
    assert log() == expected
    seen = pd.read_parquet(tmp_path / "log")
    assert dict(seen["table"].value_counts()) == {"public.a": 7, "public.b": 3}
    assert json.loads(seen["after"][seen["_change_type"] == "insert"].max())["w"] == 4


def processes_of(scratch: str) -> list[str]:
    """What runs with ``scratch`` as its directory for temporary files, but for what vanishes meanwhile."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == scratch:
                found.append(" ".join(process.info["cmdline"] or []))
    return found


# The mirror comes sooner where there is nothing to compare reads with.
NO_JDBC = {"PG_CDC_JDBC_JAR": "/nonexistent", "https_proxy": "http://127.0.0.1:1"}


def demo(scratch: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the demo with ``scratch`` as its directory for temporary files."""
    # Its server runs as another account, which must be able to look in.
    Path(scratch).chmod(0o755)
    return subprocess.Popen(
        [COMMAND, "demo", "--orders", "1000", *arguments],
        env={**os.environ, "TMPDIR": scratch, "JDK_JAVA_OPTIONS": JVM_OPTIONS, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_demo_proves_both_copies_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    with tempfile.TemporaryDirectory() as scratch:
        process = demo(scratch, "--json", "--seconds", "2", "--keep", str(lake))
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        wait_until(lambda: not processes_of(scratch))
        assert list(Path(scratch).iterdir()) == []
    found = json.loads(out)
    assert found["consistent"]
    ours, jdbc = found["readers"]
    assert (ours["reader"], ours["true_sums"], ours["sums"]) == ("pgsnapshot", 10, 10)
    assert (jdbc["reader"], jdbc["sums"]) == ("Spark JDBC", 10)
    assert ours["rows"] == jdbc["rows"] == 20_000
    end = found["mirror"]["at_the_end"]
    for tables in (found["snapshot"]["tables"], end["tables"]):
        assert [table["equals_source"] for table in tables] == [True] * 5
    assert found["snapshot"]["broken_rules"] == found["mirror"]["meanwhile"]["broken_rules"] == []
    assert found["mirror"]["changes"] > 100
    assert end["takings"] == end["takings_in_lake"]
    assert Lsn.parse(found["mirror"]["meanwhile"]["lsn"]) < Lsn.parse(end["lsn"])
    kept = mirror_at(spark, f"{lake}/_pgcdc")
    assert {name: rows.count() for name, rows in kept.items()} == {
        f"shop.{table['table']}": table["rows"] for table in end["tables"]
    }


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_demo_is_stopped_and_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    with tempfile.TemporaryDirectory() as scratch:
        process = demo(scratch, "--seconds", "600", "--keep", str(lake), environment=NO_JDBC)
        try:
            # In the middle of a batch.
            wait_until(lambda: any(lake.glob("*/*.parquet")), 300)
            if how is signal.SIGKILL:
                process.kill()
                process.communicate(timeout=60)
            else:
                os.killpg(process.pid, how)
                assert process.communicate(timeout=60) == ("", "stopped; nothing is left behind\n")
                assert process.returncode == 130
                assert not lake.exists()
        finally:
            process.kill()
        wait_until(lambda: not processes_of(scratch))
        assert list(Path(scratch).iterdir()) == []
