"""``mirror``: tables of a lake are PostgreSQL's at the LSN that the ledger says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND
from databases import connect
from deltalake import DeltaTable
from driving import drop_slots, run
from lake import rows_of, rows_of_lake
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from threads import at_work
from watch import wait_until

from pg_cdc_source import mirror, mirror_at
from pg_cdc_source.errors import OptionError
from pg_cdc_source.mirrors.delta_rs_ledger import DeltaRsLedger

SHOP = (
    "CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL, joined timestamptz, tags text[])",
    "CREATE TABLE items (order_id bigint, line int, price numeric(10, 2), note text, PRIMARY KEY (order_id, line))",
    "INSERT INTO customers SELECT i, 'customer ' || i, '2026-01-01Z'::timestamptz + i * interval '1 s',"
    " ARRAY['a', NULL] FROM generate_series(1, 1000) AS i",
    "INSERT INTO items SELECT i / 3, i % 3, i * 1.01, NULL FROM generate_series(1, 3000) AS i",
)
Start = Callable[..., StreamingQuery]


@pytest.fixture
def start(spark: SparkSession, db: str, pg: Session, tmp_path: Path) -> Iterator[Start]:
    queries = []

    def start(**options: Any) -> StreamingQuery:
        given = {"tables": "public.*", "target": f"{tmp_path}/lake/{{table}}", **options}
        query = mirror(spark, url=db, slot="s", checkpoint=f"{tmp_path}/checkpoint", **given)
        queries.append(query)
        return query

    yield start
    for query in queries:
        query.stop()
    drop_slots(pg)


def lake(spark: SparkSession, tmp_path: Path, table: str, lsn: int | None = None) -> Counter[tuple[Any, ...]]:
    found = mirror_at(spark, f"{tmp_path}/lake/_pgcdc", lsn)
    return Counter(tuple(map(repr, row)) for row in found[f"public.{table}"].collect())


def source(spark: SparkSession, db: str, table: str) -> Counter[tuple[Any, ...]]:
    rows = spark.read.format("pgsnapshot").options(url=db, dbtable=table).load()
    return Counter(tuple(map(repr, row)) for row in rows.collect())


def test_tables_are_loaded_and_followed(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path
) -> None:
    # A name that is not one of a file's everywhere.
    run(pg, *SHOP, 'CREATE TABLE "two wörds" (id int PRIMARY KEY)', 'INSERT INTO "two wörds" VALUES (1), (2)')
    query = start()

    def same() -> bool:
        assert query.exception() is None, query.exception()
        if DeltaRsLedger(f"{tmp_path}/lake/_pgcdc").last() is None:
            return False
        found = mirror_at(spark, f"{tmp_path}/lake/_pgcdc")
        return len(found) == 3 and all(
            lake(spark, tmp_path, table) == source(spark, db, table) for table in ("customers", "items", '"two wörds"')
        )

    wait_until(same, 90)
    run(pg, "UPDATE customers SET name = 'changed' WHERE id % 10 = 0", "DELETE FROM items WHERE line = 2",
        "INSERT INTO items VALUES (5000, 1, 3.50, 'new')", "UPDATE items SET order_id = 6000 WHERE order_id = 5000",
        "UPDATE customers SET id = id + 10000 WHERE id = 7",
        "INSERT INTO customers VALUES (2000, 'x', NULL, '{}')")  # fmt: skip
    wait_until(same, 60)
    run(pg, "TRUNCATE items", "INSERT INTO items VALUES (1, 1, 1, 'after')")
    wait_until(same, 60)
    run(pg, "ALTER TABLE customers ADD COLUMN level int NOT NULL DEFAULT 7",
        "ALTER TABLE customers RENAME name TO called",
        "UPDATE customers SET called = 'again' WHERE id < 5", "ALTER TABLE items DROP COLUMN note",
        "INSERT INTO items VALUES (2, 2, 2)")  # fmt: skip
    wait_until(same, 60)


def test_a_driver_that_is_killed_goes_on_where_it_was(db: str, pg: Session, tmp_path: Path) -> None:
    run(pg, *SHOP, "CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE TABLE b (id int PRIMARY KEY, n int)",
        *(f"INSERT INTO {name} SELECT i, 100 FROM generate_series(1, 500) AS i" for name in "ab"))  # fmt: skip
    ledger, program = DeltaRsLedger(f"{tmp_path}/lake/_pgcdc"), Path(__file__).parents[1] / "helpers" / "mirroring.py"
    chance = random.Random(5)

    def transfer(stop: threading.Event) -> None:
        with connect(db) as session, session.cursor() as cursor:
            while not stop.wait(0.002):
                i, j, amount = chance.randint(1, 500), chance.randint(1, 500), chance.randint(1, 9)
                cursor.execute(f"BEGIN; UPDATE a SET n = n - {amount} WHERE id = {i};"
                               f" UPDATE b SET n = n + {amount} WHERE id = {j}; COMMIT")  # fmt: skip

    def batches() -> int:
        last = ledger.last()
        return -1 if last is None else last.batch_id

    def is_same() -> bool:
        last = ledger.last()
        return last is not None and all(
            rows_of_lake(f"{tmp_path}/lake/{name}", last.tables[f"public.{name}"]) == rows_of(pg, name) for name in "ab"
        )

    for kills in range(2):
        process = subprocess.Popen([sys.executable, program, tmp_path, db], start_new_session=True)
        try:
            with at_work(transfer):
                before = batches()
                wait_until(lambda before=before: batches() > before, 120)  # type: ignore[misc]
                # Somewhere in a batch.
                time.sleep(chance.uniform(0, 1.5))
                if kills == 0:
                    continue
            wait_until(is_same, 60)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = DeltaTable(ledger.path).to_pyarrow_table().to_pylist()
    assert len(rows) == len({row["batch_id"] for row in rows})
    for row in rows:
        tables = dict(row["tables"])
        if {"public.a", "public.b"} <= tables.keys() - dict(row["set_aside"]).keys():
            found = [rows_of_lake(f"{tmp_path}/lake/{name}", tables[f"public.{name}"]) for name in "ab"]
            assert sum(int(n or 0) * count for rows in found for (_, n), count in rows.items()) == 100_000
    drop_slots(pg)


def test_the_command_takes_what_is_there(spark: SparkSession, db: str, pg: Session, tmp_path: Path) -> None:
    run(pg, *SHOP)
    command = [COMMAND, "mirror", db, "--tables", "public.*", "--slot", "s", "--target", f"{tmp_path}/{{table}}"]
    command += ["--checkpoint", f"{tmp_path}/checkpoint", "--once"]
    command += ["--mode", "append", "--mode", "public.items=history", "--on-schema-change", "additive"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "public.items" in result.stdout
    for table in ("customers", "items"):
        assert sum(rows_of_lake(f"{tmp_path}/{table}").values()) == sum(rows_of(pg, table).values())
    given: dict[str, Any] = {"url": db, "tables": "public.*", "slot": "s", "target": f"{tmp_path}/{{table}}"}
    with pytest.raises(OptionError, match="items was written with the mode history, and cannot go on with append"):
        mirror(spark, **given, checkpoint=f"{tmp_path}/checkpoint", mode="append")
    with pytest.raises(OptionError, match="customers was written with the mode append, and cannot go on with merge"):
        mirror(spark, **given, checkpoint=f"{tmp_path}/checkpoint", mode={"public.items": "history"})
    drop_slots(pg)
