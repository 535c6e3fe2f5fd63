"""The examples do what they say, run as scripts, twice and more."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import COMMAND
from deltalake import DeltaTable
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from watch import wait_until

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
    assert copied() == rows_of(pg, "t")


def test_append_log_has_every_change_once(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log() -> list[tuple[Any, ...]]:
        run_example(monkeypatch, "append_log.py", db, "public", str(tmp_path))
        written = spark.read.parquet(str(tmp_path / "log")).orderBy("_commit_lsn", "_seq", "_table", "after")
        value = [f.get_json_object(name, "$.v") for name in ("before", "after")]
        return [tuple(row) for row in written.select("_table", "_change_type", *value).collect()]

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
    assert log() == expected


def processes_of(scratch: str) -> list[str]:
    """What runs with ``scratch`` as its directory for temporary files, but for what vanishes meanwhile."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == scratch:
                found.append(" ".join(process.info["cmdline"] or []))
    return found


def test_the_demo_proves_both_copies_and_leaves_nothing() -> None:
    # Not pytest's directory: the demo's server runs as another account, which must be able to look in.
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        command = [COMMAND, "demo"]
        result = subprocess.run(
            [*command, "--json", "--orders", "3000", "--seconds", "2"],
            env={**os.environ, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        wait_until(lambda: not processes_of(scratch))
        assert list(Path(scratch).iterdir()) == []
    found = json.loads(result.stdout)
    assert found["consistent"]
    assert found["stream"]["changes"] > 100
    for part in ("snapshot", "stream"):
        assert [table["equals_source"] for table in found[part]["tables"]] == [True] * 5
        assert found[part]["broken_rules"] == []
