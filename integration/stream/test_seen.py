"""What a stream says of itself: in Spark's progress, in the log."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Drive, Driver, drop_slots, querying, run
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from watch import wait_until

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream import next_offset

FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
SECRET = "a value of a row"

pytestmark = pytest.mark.usefixtures("tables")
reported = pytest.mark.skipif(not HAS_LIMITS, reason="Spark asks a Python source for its latest offset from 4.2 on")


@pytest.fixture
def tables(pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", 'CREATE TABLE "T 2" (id int PRIMARY KEY, v text)')
    run(pg, f"INSERT INTO t SELECT i, '{SECRET}' FROM generate_series(1, 5) AS i")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """``lines()``: the fields of each batch's line so far."""
    with caplog.at_level(logging.INFO, "pg_cdc_source"):
        yield lambda: [
            {key: json.loads(text) if text[0] == '"' else text for key, text in FIELD.findall(record.getMessage())}
            for record in caplog.records
            if record.name == "pg_cdc_source.stream.batch_log"
        ]
    assert SECRET not in caplog.text


def end_of_wal(pg: Session) -> Lsn:
    ((lsn,),) = run(pg, "SELECT pg_current_wal_flush_lsn()")
    return Lsn.parse(lsn)


def report(driver: Driver) -> dict[str, Any]:
    """What Spark is told right after it was told where the next batch ends."""
    found = driver._reader.reportLatestOffset()
    assert found is not None
    assert json.loads(json.dumps(found)) == found
    return dict(found)


@reported
def test_the_latest_offset_says_how_far_the_stream_is_behind(pg: Session, drive: Drive) -> None:
    driver = drive(tables="public.*", maxRowsPerBatch="10")
    assert driver._reader.reportLatestOffset() is None  # nothing has been asked of the server yet
    driver.take(5)
    began = time.monotonic()
    for first in range(10, 110, 10):
        run(pg, f"INSERT INTO t SELECT i, 'x' FROM generate_series({first}, {first + 9}) AS i")
    before = end_of_wal(pg)
    time.sleep(1)  # what is measured
    assert len(driver.batch()) == 10
    behind = report(driver)
    assert (behind["tables"], behind["slot"]) == ("public.*", "s")
    assert before <= Lsn.parse(behind["lsn"]) + 1 <= end_of_wal(pg)
    # Nine commits are left, of about a kilobyte each.
    assert 5_000 < behind["lagBytes"] < 100_000
    assert 1 <= behind["lagSeconds"] <= time.monotonic() - began
    assert behind["bufferedRows"] > 0
    driver.take(90)

    def caught_up() -> bool:
        driver.batch()
        now = report(driver)
        return bool(now["lagBytes"] == now["lagSeconds"] == now["bufferedRows"] == 0)

    wait_until(caught_up)
    assert driver.offset.position.lsn <= Lsn.parse(report(driver)["lsn"])


@reported
def test_wal_of_other_tables_is_no_lag(pg: Session, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    # The offset stays where it is, without batches that only move the slot.
    monkeypatch.setattr(next_offset, "IDLE_SECONDS", 3600.0)
    driver = drive(dbtable="t")
    driver.take(5)
    run(pg, "CREATE TABLE other (v text)", "INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 2000)")
    end = end_of_wal(pg)
    offset = driver.offset
    # The server tells within a second that there is nothing for this stream.
    wait_until(lambda: (driver.batch() or True) and report(driver)["lagBytes"] < 10_000)
    assert Lsn.parse(report(driver)["lsn"]) + 1 >= end
    assert driver.offset == offset


@reported
def test_a_server_that_is_away_costs_no_batch(pg: Session, drive: Drive) -> None:
    driver = drive(dbtable="t")
    driver.take(5)
    run(pg, "INSERT INTO t VALUES (10, 'x')")
    wait_until(lambda: (driver.batch() or True) and len(driver.rows) == 6)
    run(pg, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgcdc:s:source'")
    assert driver._reader.reportLatestOffset() is None
    wait_until(lambda: (driver.batch() or True) and driver._reader.reportLatestOffset() is not None)


@reported
def test_a_querys_progress_shows_it(pg: Session, spark: SparkSession, db: str, tmp_path: Path) -> None:
    with querying(spark, tmp_path, pg, db, tables="public.*") as query:
        running = query.start()
        query.take(5)
        run(pg, "INSERT INTO t VALUES (10, 'x')")
        query.take(6)

        def shown() -> dict[str, Any] | None:
            progress = running.lastProgress
            found = None if progress is None else json.loads(progress.sources[0].latestOffset or "null")
            return found if found and found["lagBytes"] == 0 else None

        found = wait_until(shown) or {}
        assert (found["tables"], found["slot"]) == ("public.*", "s")


def test_each_batch_is_a_line_of_the_log(pg: Session, drive: Drive, lines: Any) -> None:
    driver = drive(tables="public.*", maxRowsPerBatch="100")
    driver.take(5)
    first, _, *_ = lines()
    assert {"slot": "s", "rows": "0", "bytes": "0"}.items() <= first.items()
    # One batch for each table, or one for all (Spark 4.0 and 4.1).
    assert ",".join(line["snapshot"] for line in lines() if "snapshot" in line) == 'public."T 2":1,public.t:1'
    count = len(lines())
    run(
        pg,
        f"BEGIN; INSERT INTO t SELECT i, '{SECRET}' FROM generate_series(10, 39) AS i;"
        f"""INSERT INTO "T 2" SELECT i, '{SECRET}' FROM generate_series(1, 20) AS i; COMMIT""",
    )
    driver.take(50)
    line = next(line for line in lines()[count:] if line["rows"] == "50")
    assert line["tables"] == 'public.t:30,public."T 2":20'
    assert 1_000 < int(line["bytes"]) < 100_000
    assert Lsn.parse(line["start"]) < Lsn.parse(line["end"]) <= end_of_wal(pg)
    assert line["end"] == str(driver.offset.position.lsn)
    assert Lsn.parse(line["end_of_wal"]) > Lsn.parse(line["end"])
    assert 0 <= float(line["seconds"]) < 30
    assert {"buffered_rows", "buffered_bytes", "spilled_bytes", "lag_bytes", "lag_seconds"} <= line.keys()


def test_a_batch_within_a_commit_says_where_it_ends(pg: Session, drive: Drive, lines: Any) -> None:
    driver = drive(dbtable="t", maxRowsPerBatch="10")
    driver.take(5)
    run(pg, "INSERT INTO t SELECT i, 'x' FROM generate_series(10, 34) AS i")
    driver.take(25)
    changes = [line for line in lines() if line["rows"] != "0"]
    lsn = driver.rows[-1]["_commit_lsn"]
    assert [(line["rows"], line["tables"]) for line in changes] == [("10", "t:10"), ("10", "t:10"), ("5", "t:5")]
    last = [Lsn(driver.rows[5 + rows - 1]["_seq"]) for rows in (10, 20)]
    assert [line["end"] for line in changes[:2]] == [f"{Lsn(lsn)}:{number}" for number in last]


SCRIPT = """
import sys
from pathlib import Path
import pyspark
from pg_cdc_source import register
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session

url, directory = sys.argv[1], Path(sys.argv[2])
conf = {"spark.executor.memory": "1g", "spark.log.level": "ERROR", "spark.executorEnv.PG_CDC_LOG": "INFO"}
spark = start_session("local-cluster[1,1,1024]", conf, directory, log=directory / "driver")
register(spark)
stream = spark.readStream.format("pgcdc").options(url=url, dbtable="t", slot="s").load()
query = stream.writeStream.format("noop").option("checkpointLocation", str(directory / "checkpoint")).start()
query.processAllAvailable()
query.stop()
for place in (Path(pyspark.__file__).parent / "work" / spark.sparkContext.applicationId).rglob("stderr"):
    (directory / "executor").write_bytes(place.read_bytes())
stop_session(spark)
end_jvm()
"""


def test_lines_come_where_the_pages_say(pg: Session, db: str, tmp_path: Path) -> None:
    try:
        subprocess.run(
            [sys.executable, "-c", SCRIPT, db, str(tmp_path)],
            env={**os.environ, "PG_CDC_LOG": "INFO"},
            timeout=180,
            check=True,
        )
    finally:
        drop_slots(pg)
    read, batch = (
        "INFO pg_cdc_source.snapshot.reader: read table=public.t ",
        "INFO pg_cdc_source.stream.batch_log: batch ",
    )
    texts = {place: (tmp_path / place).read_text() for place in ("driver", "executor")}
    assert [place for place, text in texts.items() if batch in text] == ["driver"]
    assert [place for place, text in texts.items() if read in text] == ["executor"]
    assert SECRET not in "".join(texts.values())


def test_ranges_of_the_tables_are_lines_of_the_other_format(
    pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pg_cdc_source.snapshot"):
        drive(dbtable="t").take(5)
    [line] = [record.getMessage() for record in caplog.records if record.name == "pg_cdc_source.snapshot.reader"]
    assert line.startswith("read table=public.t blocks=0-end execution=test rows=5 bytes=")
    assert SECRET not in caplog.text
