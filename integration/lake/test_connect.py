"""``mirror`` by a client of Spark Connect: the server's processes write the lake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lake_jars
import pytest
from clusters import connect_server
from driving import drop_slots, run
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from sessions import SparkSessions

TABLES = (
    "CREATE TABLE customers (id int PRIMARY KEY, name text, letter text)",
    # Values that do not travel with what changes beside them.
    "ALTER TABLE customers ALTER letter SET STORAGE EXTERNAL",
    "INSERT INTO customers SELECT i, 'customer ' || i, repeat(md5(i::text), 80) FROM generate_series(1, 1000) AS i",
    "CREATE TABLE items (order_id bigint, line int, price numeric(10, 2), note text, PRIMARY KEY (order_id, line))",
    "INSERT INTO items SELECT i / 3, i % 3, i * 1.01, NULL FROM generate_series(1, 3000) AS i",
)
TARGETS = {
    "deltalake": "{directory}/lake/{{table}}",
    "delta": "spark_catalog.remote.{{table}}",
    "iceberg": "lake.remote.{{table}}",
}


@pytest.fixture(scope="module")
def connect_url(spark_sessions: SparkSessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Connect server that all formats share: databases, catalogs and checkpoints are each one's own."""
    # The JVM of other tests needs little while it has no session.
    spark_sessions.stop()
    scratch = tmp_path_factory.mktemp("connect")
    with connect_server(scratch / "server", "local[2]", lake_jars.conf(scratch / "warehouse")) as url:
        yield url


@pytest.mark.parametrize(
    "format", ["deltalake", *(pytest.param(name, marks=pytest.mark.corner) for name in ("delta", "iceberg"))]
)
def test_a_client_of_a_connect_server_mirrors(
    format: str, connect_url: str, db: str, pg: Session, tmp_path: Path
) -> None:
    if format != "deltalake" and (why := lake_jars.lacking(format)) is not None:
        pytest.skip(why)
    run(pg, *TABLES)
    target = TARGETS[format].format(directory=tmp_path)
    client = Path(__file__).parents[1] / "helpers" / "connect_mirror.py"
    command = [sys.executable, str(client), connect_url, db, str(tmp_path), format, target]
    environment = {**os.environ, "JAVA_HOME": "/nonexistent"}  # the client starts no JVM
    told = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    found = json.loads(told.stdout.splitlines()[-1])
    assert found == {f"public.{table}": rows_of(pg, table) for table in ("customers", "items")}
    batches = [int(line) for line in (tmp_path / "batches").read_text().splitlines()]
    assert batches == list(range(len(batches)))
    drop_slots(pg)


def rows_of(pg: Session, table: str) -> list[list[str | None]]:
    with pg.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(table)))
        return sorted([None if value is None else str(value) for value in row] for row in cursor)
