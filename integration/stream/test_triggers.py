"""Spark's triggers of scheduled runs: each run takes what is there, and the next one the rest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from driving import Drive, drop_slots, run
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from streams import load_stream

from pg_cdc_source.errors import SlotLostError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.spark.own_trigger import OWN_TRIGGER, OwnTrigger
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream import membership
from pg_cdc_source.stream.tables.source_session import SourceSession

WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"


@pytest.mark.skipif(HAS_LIMITS, reason="a Spark that names start and limit asks once for each batch")
def test_a_first_end_that_is_asked_for_twice_is_the_same(
    pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    """As Spark 4.0 and 4.1 do with the wrapper, before they read anything."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    driver = drive(dbtable="t")
    for key in (2, 3):
        first, second = driver.plan_and_ask_again(partial(run, pg, f"INSERT INTO t VALUES ({key})"))
        assert first == second
        assert [row["id"] for row in driver.batch()] == [key - 1]
        driver.restart()
    assert "are read as of" not in caplog.text


@pytest.mark.skipif(HAS_LIMITS, reason="a Spark that names start and limit repeats a batch before it asks")
def test_a_gap_is_noticed_where_the_end_is_asked_for_before_a_batch_is_repeated(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the wrapper has it after a crash. The log says where the server may not send what is written later."""
    monkeypatch.setattr(membership, "has_stale_publications", lambda _: True)
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.t")
    driver.take(1)
    run(pg, "INSERT INTO t VALUES (2)")
    assert driver.attempt_rows()
    driver.stop()
    run(pg, "ALTER PUBLICATION s DROP TABLE t", "INSERT INTO t VALUES (3)", "ALTER PUBLICATION s ADD TABLE t")
    driver.restart()
    rows = driver.plan_before_repeating()
    assert [row["_change_type"] for row in rows] == ["truncate", "snapshot", "snapshot", "snapshot"]
    assert "public.t joins the stream at the end of a batch. This version of PostgreSQL may not send" in caplog.text


@pytest.mark.skipif(HAS_LIMITS, reason="a Spark that names start and limit repeats a batch before it asks")
def test_rows_are_the_same_again_where_the_end_is_asked_for_before_a_batch_is_repeated(
    pg: Session, drive: Drive
) -> None:
    """Their layouts are those of the time at which it was asked for, whatever became of the table since."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION s FOR TABLE t")
    driver = drive(tables="public.t", onSchemaChange="emit")
    driver.take(2)
    run(pg, "INSERT INTO t VALUES (2)")
    assert driver.attempt_rows()
    driver.stop()
    run(pg, "ALTER TABLE t ADD c int", "INSERT INTO t VALUES (3, 7)")
    driver.restart()
    anew = partial(run, pg, "ALTER TABLE t DROP c", "ALTER TABLE t ADD c int DEFAULT 5")
    rows = driver.plan_before_repeating(anew)
    assert [row["_change_type"] for row in rows] == ["schema", "insert"]
    assert driver.again() == rows


@pytest.mark.skipif(HAS_LIMITS, reason="a Spark that names start and limit does not ask for partitions of nothing")
def test_a_server_that_was_set_back_is_noticed_where_spark_first_names_the_unfinished_batch(
    pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does after a crash, and a mirror goes on from there."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    driver = drive(tables="public.t", **{OWN_TRIGGER: OwnTrigger(once=False, interval=0.0).text})
    driver.take(1)
    run(pg, "INSERT INTO t VALUES (2)")
    assert driver.attempt_rows()
    driver.restart()
    assert driver.partitions_of_nothing() == []
    monkeypatch.setattr(SourceSession, "read_end_of_wal", lambda self: Lsn(8))
    with pytest.raises(SlotLostError, match="set back"):
        driver.batch()


@pytest.mark.corner
@pytest.mark.parametrize("wrapper", ["true", "false"])
def test_each_run_takes_what_is_there(wrapper: str, spark: SparkSession, db: str, pg: Session, tmp_path: Path) -> None:
    """Spark 4.0 and 4.1 with the wrapper ask for the newest offset twice before they read anything."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (0)")
    found: list[int] = []
    before = spark.conf.get(WRAPPER)
    spark.conf.set(WRAPPER, wrapper)
    try:
        for i in range(1, 4):
            ((present,),) = run(pg, "SELECT pg_current_wal_lsn()")
            rows = load_stream(spark, db, dbtable="t", slot="scheduled")
            writer = rows.writeStream.foreachBatch(lambda batch, _: found.extend(row["id"] for row in batch.collect()))
            query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
            try:
                query.awaitTermination()
            finally:
                query.stop()
            assert found == list(range(i))
            if HAS_LIMITS:
                # Until the next run, PostgreSQL keeps what comes behind this one, and nothing of before.
                slot = "FROM pg_replication_slots WHERE slot_name = 'scheduled'"
                assert run(pg, f"SELECT confirmed_flush_lsn >= '{present}' {slot}") == [(True,)]
            run(pg, f"INSERT INTO t VALUES ({i})")
    finally:
        spark.conf.set(WRAPPER, before or "false")
        drop_slots(pg)
