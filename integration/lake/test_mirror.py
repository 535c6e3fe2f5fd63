"""``mirror``: tables of a lake are PostgreSQL's at the LSN that the ledger says."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from audit import JUDGE, TRIGGERS, Noted, lsns_by_judge, noted
from audit import versions as versions_of
from commands import COMMAND
from databases import connect
from deltalake import DeltaTable, write_deltalake
from driving import drop_slots, run
from kept_rows import Expected, deleted, expect_rows, logged, stated
from lake import Rows, rows_of, rows_of_arrow, rows_of_lake
from object_store import BUCKET, object_store
from points import some_of
from psycopg2.extensions import connection as Session
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from threads import at_work
from watch import wait_until

from pg_cdc_source import mirror, mirror_at
from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.ledger import MODES
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.mirrors.delta_rs_lake import DeltaRsLake
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
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory of an object store that this process and its children reach."""
    with object_store(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3a://{BUCKET}/shop"


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


def test_settings_of_a_session_change_no_value_that_is_read(spark: SparkSession, tmp_path: Path) -> None:
    old = datetime(1200, 1, 1, tzinfo=timezone.utc)
    write_deltalake(f"{tmp_path}/t", pa.table({"d": [old.date()], "z": pa.array([old], pa.timestamp("us", "UTC"))}))
    lake = DeltaRsLake(spark, Targets.of(f"{tmp_path}/{{table}}", None), Shapes(), compacts=False)
    key = "spark.sql.parquet.datetimeRebaseModeInRead"
    spark.conf.set(key, "LEGACY")
    try:
        ((day, micros),) = lake.read("public.t", 0).selectExpr("string(d)", "unix_micros(z)").collect()
    finally:
        spark.conf.unset(key)
    assert (day, micros) == ("1200-01-01", old.timestamp() * 1_000_000)


def counted(rows: DataFrame) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(map(repr, row)) for row in rows.collect())


def lake(spark: SparkSession, tmp_path: Path, table: str) -> Counter[tuple[Any, ...]]:
    return counted(mirror_at(spark, f"{tmp_path}/lake/_pgcdc")[f"public.{table}"])


def source(spark: SparkSession, db: str, table: str) -> Counter[tuple[Any, ...]]:
    return counted(spark.read.format("pgsnapshot").options(url=db, dbtable=table).load())


def test_tables_are_loaded_and_followed(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name that is not one of a file's everywhere.
    run(pg, *SHOP, 'CREATE TABLE "two wörds" (id int PRIMARY KEY)', 'INSERT INTO "two wörds" VALUES (1), (2)')
    query = start(tables=["public.*"])
    ledger, looked_at = DeltaRsLedger(f"{tmp_path}/lake/_pgcdc"), -1

    def same() -> bool:
        nonlocal looked_at
        assert query.exception() is None, query.exception()
        last = ledger.last()
        # Spark need not be asked before there is something new.
        if last is None or last.batch_id == looked_at:
            return False
        looked_at = last.batch_id
        found = mirror_at(spark, ledger.path)
        return len(found) == 3 and all(
            counted(found[f"public.{table}"]) == source(spark, db, table)
            for table in ("customers", "items", '"two wörds"')
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
    newest = ledger.last()
    assert newest is not None
    monkeypatch.setattr(DeltaRsLake, "is_of", lambda _, table, version, mark: table != "public.items")
    assert mirror_at(spark, ledger.path, newest.lsn).keys() == newest.tables.keys() - {"public.items"}


# One table for each mode. All of them change alike, so that the triggers of one have seen what happened to all.
ALIKE: Mapping[str, tuple[str, Expected]] = {
    "log": ("append", partial(logged, identity=("id", "n", "v"))),
    "states": ("history", stated),
    "t": ("merge", deleted),
}
# First rows that are read again after a kill are turned back to the snapshot's point under REPLICA IDENTITY FULL.
KEPT = (
    *(f"CREATE TABLE {name} (id int PRIMARY KEY, n int, v text)" for name in ALIKE),
    *(f"ALTER TABLE {name} ALTER v SET STORAGE EXTERNAL, REPLICA IDENTITY FULL" for name in ALIKE),
    *(f"INSERT INTO {name} SELECT i, 0, repeat(md5(i::text), 80) FROM generate_series(1, 40) AS i" for name in ALIKE),
    *TRIGGERS,
    *JUDGE,
)


def changes(chance: random.Random, truncates: float) -> Iterator[str]:
    """Statements that are one transaction, of the table ``{}``. Some change nothing, for want of a row."""
    i, j = chance.sample(range(1, 60), 2)
    insert = f"INSERT INTO {{0}} VALUES ({i}, {j}, repeat(md5('{i}'), 80)) ON CONFLICT DO NOTHING"
    update = f"UPDATE {{0}} SET n = n + {j} WHERE id = {i}"
    delete = f"DELETE FROM {{0}} WHERE id = {i}"
    move = f"UPDATE {{0}} SET id = {j} WHERE id = {i} AND NOT EXISTS (SELECT FROM {{0}} WHERE id = {j})"
    new = f"UPDATE {{0}} SET v = repeat(md5('{i} {j}'), 80) WHERE id = {i}"
    kinds = ((update,), (update, update), (insert,), (delete,), (move, update), (delete, insert), (insert, delete),
             (new, move), ("TRUNCATE {0}", insert))  # fmt: skip
    yield from chance.choices(kinds, (40, 5, 20, 5, 10, 5, 5, 10, truncates))[0]


def test_a_driver_that_is_killed_goes_on_where_it_was(db: str, pg: Session, start: Start, tmp_path: Path) -> None:
    run(pg, *KEPT, *(f"CREATE TABLE {name} (id int PRIMARY KEY, n int)" for name in "ab"),
        *(f"INSERT INTO {name} SELECT i, 100 FROM generate_series(1, 500) AS i" for name in "ab"))  # fmt: skip
    first = [{"id": i, "n": n, "v": v} for i, n, v in run(pg, "SELECT id, n, v FROM t ORDER BY id")]
    ledger, program = DeltaRsLedger(f"{tmp_path}/lake/_pgcdc"), Path(__file__).parents[1] / "helpers" / "mirroring.py"
    given = {"mode": {f"public.{name}": mode for name, (mode, _) in ALIKE.items()}, "deletes": "soft"}
    chance = random.Random(5)
    done: list[int] = []  # the last batch before each start

    def transfer(stop: threading.Event) -> None:
        with connect(db) as session, session.cursor() as cursor:
            while not stop.wait(0.02):
                # Nobody else's TRUNCATE goes along with first rows that are read again.
                truncates = 0.5 if len(versions()) == 5 else 0
                i, j, amount = chance.randint(1, 500), chance.randint(1, 500), chance.randint(1, 9)
                cursor.execute(f"BEGIN; UPDATE a SET n = n - {amount} WHERE id = {i};"
                               f" UPDATE b SET n = n + {amount} WHERE id = {j};"
                               + "; ".join(what.format(name) for what in changes(chance, truncates) for name in ALIKE)
                               + "; COMMIT")  # fmt: skip

    def versions() -> Mapping[str, int]:
        last = ledger.last()
        return {} if last is None else last.tables

    def is_within_a_batch(process: subprocess.Popen[bytes]) -> bool:
        """Whether the log has a commit that the ledger does not know; the driver stands still then."""
        known = versions()
        if len(known) < 5 or DeltaTable(f"{tmp_path}/lake/log").version() == known["public.log"]:
            return False
        os.killpg(process.pid, signal.SIGSTOP)
        if DeltaTable(f"{tmp_path}/lake/log").version() > versions()["public.log"]:
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return False

    def present(name: str) -> Rows:
        rows = DeltaTable(f"{tmp_path}/lake/{name}").to_pyarrow_table()
        return rows_of_arrow(rows.filter(pc.invert(rows["_deleted"])).drop_columns(["_deleted", "_deleted_lsn"]))

    with at_work(transfer):
        for kills in range(2):
            modes = ["deltalake", "local[2]", json.dumps(given)]
            process = subprocess.Popen([sys.executable, program, tmp_path, db, *modes], start_new_session=True)
            try:
                if kills == 0:
                    wait_until(versions, 120)
                    # Somewhere in the first rows, or not long behind them.
                    time.sleep(chance.uniform(0, 1.5))
                else:
                    wait_until(lambda process=process: is_within_a_batch(process), 120)  # type: ignore[misc]
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            last = ledger.last()
            assert last is not None
            done.append(last.batch_id)
        query = start(**given)
        # Behind what was under way.
        known = versions()["public.log"]
        wait_until(lambda: query.exception() or versions()["public.log"] > known + 3, 120)
    wait_until(lambda: query.exception() or all(present(name) == rows_of(pg, name) for name in "abt"), 120)
    query.stop()
    rows = DeltaTable(ledger.path).to_pyarrow_table().sort_by("batch_id").to_pylist()
    assert len(rows) == len({row["batch_id"] for row in rows})
    assert not rows[-1]["set_aside"], rows[-1]["set_aside"]
    # The three batches behind each start among them.
    rows = some_of(rows, 12, [i for i, row in enumerate(rows) if any(0 < row["batch_id"] - at < 4 for at in done)])
    expect_transfers_are_whole(rows, tmp_path)
    expect_what_triggers_have_seen(rows, noted(pg, lsns_by_judge(pg)), first, tmp_path)


def expect_transfers_are_whole(rows: list[dict[str, Any]], directory: Path) -> None:
    """At each of these rows of the ledger, what is taken from one table is in the other."""
    for row in rows:
        tables = dict(row["tables"])
        if {"public.a", "public.b"} <= tables.keys() - dict(row["set_aside"]).keys():
            found = [DeltaTable(f"{directory}/lake/{name}", version=tables[f"public.{name}"]) for name in "ab"]
            assert sum(pc.sum(table.to_pyarrow_table()["n"]).as_py() for table in found) == 100_000


def expect_what_triggers_have_seen(
    rows: list[dict[str, Any]], seen: list[Noted], first: list[dict[str, Any]], directory: Path
) -> None:
    """At each of these rows of the ledger, the table of each mode has what it should have at this row's LSN."""
    log = DeltaTable(f"{directory}/lake/log").to_pyarrow_table()
    (begin,) = pc.unique(log.filter(pc.equal(log["_change_type"], "snapshot"))["_commit_lsn"]).to_pylist()
    there = [change for change in seen if change.lsn <= begin]
    first = sorted((dict(v.values) for v in versions_of(there, first, 0) if v.end is None), key=itemgetter("id"))
    looked = 0
    for row in rows:
        tables, set_aside = dict(row["tables"]), dict(row["set_aside"])
        behind = [change for change in seen if begin < change.lsn <= row["lsn"]]
        for name, (mode, expected) in ALIKE.items():
            if (version := tables.get(f"public.{name}")) is not None and f"public.{name}" not in set_aside:
                found = DeltaTable(f"{directory}/lake/{name}", version=version).to_pyarrow_table().to_pylist()
                expect_rows(mode, found, list(expected(behind, first, begin)))
                looked += 1
    assert looked > 12


def test_the_command_takes_what_is_there_into_an_object_store(
    spark: SparkSession, db: str, pg: Session, tmp_path: Path, store: str
) -> None:
    run(pg, *SHOP, 'CREATE TABLE "two wörds" (id int PRIMARY KEY)', 'INSERT INTO "two wörds" VALUES (1), (2)')
    command = [COMMAND, "mirror", db, "--tables", "public.*", "--slot", "s", "--target", f"{store}/{{table}}"]
    command += ["--checkpoint", f"{tmp_path}/checkpoint", "--once", "--no-auto-compact"]
    command += ["--mode", "append", "--mode", "public.items=history", "--on-schema-change", "additive"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "public.items" in result.stdout
    for table in ("customers", "items", "two wörds"):
        assert sum(rows_of_lake(f"{store}/{table}").values()) == sum(rows_of(pg, table).values())
    given: dict[str, Any] = {"url": db, "tables": "public.*", "slot": "s", "target": f"{store}/{{table}}"}
    with pytest.raises(OptionError, match="items was written with the mode history, and cannot go on with append"):
        mirror(spark, **given, checkpoint=f"{tmp_path}/checkpoint", mode="append")
    with pytest.raises(OptionError, match="was written with the mode append, and cannot go on with merge"):
        mirror(spark, **given, checkpoint=f"{tmp_path}/checkpoint", mode={"public.items": "history"})
    drop_slots(pg)


def test_a_checkpoint_goes_on_in_its_own_lake_alone(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path
) -> None:
    run(pg, *SHOP)
    start(once=True).awaitTermination()
    run(pg, "DELETE FROM items WHERE line = 1", "INSERT INTO customers VALUES (5000, 'new', NULL, NULL)")
    for other in ({"target": f"{tmp_path}/other/{{table}}"}, {"ledger": f"{tmp_path}/other/_pgcdc"}):
        query = start(once=True, **other)
        with pytest.raises(StreamingQueryException, match="has no batch of this checkpoint, which is at batch"):
            query.awaitTermination()
    assert not list(tmp_path.glob("other/*/_delta_log"))
    start(once=True).awaitTermination()
    for table in ("customers", "items"):
        assert lake(spark, tmp_path, table) == source(spark, db, table)


def test_a_lake_that_was_moved_is_read_where_it_is(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path
) -> None:
    run(pg, *SHOP)
    start(once=True).awaitTermination()
    run(pg, "UPDATE items SET line = line WHERE line = 2")
    ((present,),) = run(pg, "SELECT pg_current_wal_lsn()")
    start(once=True).awaitTermination()
    # Until the next run, PostgreSQL keeps what comes behind this one, and nothing of before.
    slot = "FROM pg_replication_slots WHERE slot_type = 'logical'"
    assert run(pg, f"SELECT confirmed_flush_lsn >= '{present}' {slot}") == [(True,)]
    (tmp_path / "lake").rename(tmp_path / "moved to")
    run(pg, "DELETE FROM items WHERE line = 1")
    start(once=True, target=f"{tmp_path}/moved to/{{table}}").awaitTermination()
    # What Spark takes a path for is not what delta-rs does.
    elsewhere = spark.newSession()
    elsewhere.conf.set("fs.defaultFS", "hdfs://nowhere")
    found = mirror_at(elsewhere, f"file://{tmp_path}/moved to/_pgcdc")
    for table in ("customers", "items"):
        assert counted(found[f"public.{table}"]) == source(spark, db, table)


def test_tables_are_opened_at_the_start_where_the_ledger_does_not_say_what_they_keep(
    pg: Session, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[set[str]] = []
    monkeypatch.setattr(DeltaRsLake, "require_shapes", lambda lake, tables: looked_at.append(set(tables)))
    run(pg, *SHOP)
    start(once=True).awaitTermination()
    # As ledgers of before are.
    ledger = DeltaRsLedger(f"{tmp_path}/lake/_pgcdc")
    ledger.note({MODES: ""})
    for number in range(2):
        run(pg, f"INSERT INTO customers VALUES ({5000 + number}, 'late', NULL, NULL)")
        start(once=True).awaitTermination()
    last = ledger.last()
    assert last is not None
    assert looked_at == [set(), last.tables.keys(), set()]


def test_a_path_that_is_not_one_place_to_spark_and_to_arrow_is_refused(
    spark: SparkSession, db: str, tmp_path: Path
) -> None:
    elsewhere = spark.newSession()
    elsewhere.conf.set("fs.defaultFS", "hdfs://nowhere")
    given: dict[str, Any] = {"url": db, "tables": "public.*", "slot": "s", "checkpoint": f"file://{tmp_path}/c"}
    with pytest.raises(OptionError, match=r"has no scheme: to Spark it is a path of hdfs"):
        mirror(elsewhere, target=f"{tmp_path}/lake/{{table}}", **given)
    given |= {"checkpoint": f"{tmp_path}/checkpoint", "format": "iceberg"}
    with pytest.raises(OptionError, match=r"pgcdc-staging has no scheme"):
        mirror(elsewhere, target="lake.shop.{table}", **given)


def test_a_checkpoint_that_is_older_than_the_ledger_is_refused(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path
) -> None:
    run(pg, *SHOP)
    start(once=True).awaitTermination()
    checkpoint, old, new = (tmp_path / name for name in ("checkpoint", "old", "new"))
    shutil.copytree(checkpoint, old)

    def leaves_the_slot() -> None:
        """As a run does that is killed: the slot stays where it was."""
        came: list[int] = []
        query = start(on_batch=lambda applied: came.append(sum(applied.rows.values())))
        wait_until(lambda: sum(came) or not query.isActive)
        query.stop()

    def moves_the_slot() -> None:
        start(once=True).awaitTermination()

    for number, bring in enumerate((leaves_the_slot, moves_the_slot)):
        run(pg, f"INSERT INTO customers VALUES ({5000 + number}, 'late', NULL, NULL)")
        bring()
        checkpoint.rename(new)
        shutil.copytree(old, checkpoint)
        run(pg, f"INSERT INTO customers VALUES ({6000 + number}, 'later', NULL, NULL)")
        with pytest.raises(StreamingQueryException, match="the checkpoint is older than the ledger"):
            start(once=True, onSlotLost="resnapshot").awaitTermination()
        shutil.rmtree(checkpoint)
        new.rename(checkpoint)


@pytest.mark.parametrize("once", [pytest.param(True, marks=pytest.mark.corner), False])
def test_a_backlog_comes_in_batches_also_right_after_a_start(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path, once: bool
) -> None:
    run(pg, *SHOP)
    came: list[int] = []

    def bring(rows: int, **options: Any) -> None:
        came.clear()
        query = start(once=once, on_batch=lambda applied: came.append(sum(applied.rows.values())), **options)
        if once:
            query.awaitTermination()
            assert query.exception() is None
        else:
            wait_until(lambda: sum(came) == rows or not query.isActive)
            query.stop()
        assert sum(came) == rows

    bring(4_000, maxBytesPerBatch="64kB")
    assert [rows for rows in came if rows] == [1_000, 3_000]
    for first in range(10_000, 11_000, 50):
        run(pg, f"INSERT INTO customers SELECT i, 'late', NULL, NULL FROM generate_series({first}, {first + 49}) AS i")
    bring(1_000, maxRowsPerBatch=200)
    assert max(came) <= 200
    assert lake(spark, tmp_path, "customers") == source(spark, db, "customers")


def test_an_interval_makes_fewer_batches_and_holds_no_full_one_back(db: str, pg: Session, start: Start) -> None:
    run(pg, *SHOP)
    start(once=True).awaitTermination()
    keys = iter(range(10_000, 20_000))
    came: list[int] = []

    def insert_one() -> None:
        run(pg, f"INSERT INTO customers VALUES ({next(keys)}, 'late', NULL, NULL)")

    def follow(**options: Any) -> StreamingQuery:
        came.clear()
        return start(on_batch=lambda of: came.append(sum(of.rows.values())), **options)

    for _ in range(600):
        insert_one()
    query = follow(maxRowsPerBatch=200, interval="1h")
    # The first one takes what has been received so far, and what fills no batch stays.
    wait_until(lambda: sum(came) > 400 or not query.isActive)
    # Without an interval, these would come as they are committed.
    for _ in range(410):
        insert_one()
    wait_until(lambda: sum(came) > 810 or not query.isActive)
    assert len(came) <= 6
    # The rest of what is larger than a batch, and a part of which is there.
    run(pg, "UPDATE customers SET name = 'all' WHERE id < 500")
    wait_until(lambda: sum(came) == 1_509 or not query.isActive)
    query.stop()
    insert_one()
    query = follow(interval="1s")
    # At once, and then at an interval.
    wait_until(lambda: sum(came) == 1 or not query.isActive)
    insert_one()
    wait_until(lambda: sum(came) == 2 or not query.isActive)
    query.stop()


@pytest.mark.corner
def test_a_start_that_takes_what_is_there_goes_on_behind_the_batch_of_a_crash(
    spark: SparkSession, db: str, pg: Session, start: Start, tmp_path: Path
) -> None:
    run(pg, *SHOP)
    start(once=True).awaitTermination()
    run(pg, "INSERT INTO customers VALUES (5000, 'of the batch', NULL, NULL)")

    def breaks(applied: Applied) -> None:
        raise RuntimeError("as a crash, before Spark has committed the batch")

    with pytest.raises(StreamingQueryException, match="as a crash"):
        start(once=True, on_batch=breaks).awaitTermination()
    run(pg, "INSERT INTO customers VALUES (5001, 'of the rest', NULL, NULL)")
    start(once=True).awaitTermination()
    assert lake(spark, tmp_path, "customers") == source(spark, db, "customers")
    # And where nothing is there.
    start(once=True).awaitTermination()
