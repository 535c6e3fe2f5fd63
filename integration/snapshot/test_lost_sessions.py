"""Sessions that end in the middle of an action: rows are read once or the action fails, and nothing stays behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from databases import connect
from frames import load
from losses import ending_sessions
from psycopg2.extensions import connection as Session
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from sessions import SparkSessions
from watch import holders, keeper_processes, open_transactions, readers, session_names, wait_until

from pg_cdc_source import open_snapshot
from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres.snapshots import SnapshotSpec, make_snapshot
from pg_cdc_source.snapshot import reader, receiving
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import Plan, ScanRange, make_plan
from pg_cdc_source.snapshot.source import Source, plan_ranges
from pg_cdc_source.values import native

ROWS = 60_000
# Rows that make a scan take long enough to be interrupted, without much CPU: 3 ms for every 300th.
SLOW = "id % 300 > 0 OR pg_sleep(0.003) IS NOT NULL"


@pytest.fixture
def rows(pg: Session) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE rows (id int NOT NULL, padding text);"
            f" INSERT INTO rows SELECT i, repeat('x', 400) FROM generate_series(1, {ROWS}) AS i"
        )


def slow_rows(spark: SparkSession, db: str, **options: str | int) -> DataFrame:
    """All rows, in four steps of some 150 ms and several chunks each."""
    read: dict[str, str | int] = {"dbtable": "rows", "columns": "id,padding", "where": SLOW}
    return load(spark, db, **{**read, "lsnColumn": "lsn", "numPartitions": 4, **options})


def summary(df: DataFrame) -> tuple[int, ...]:
    row = df.selectExpr("count(*)", "count(DISTINCT id)", "sum(id)", "count(DISTINCT lsn)").first()
    assert row is not None
    return tuple(row)


ALL_ROWS = (ROWS, ROWS, ROWS * (ROWS + 1) // 2, 1)


@pytest.mark.usefixtures("rows")
def test_a_reader_that_loses_its_session_repeats_no_row_and_misses_none(spark: SparkSession, db: str) -> None:
    df = slow_rows(spark, db)
    # The first action starts what the others find: it says nothing about how long these take.
    assert summary(df) == ALL_ROWS
    began = time.monotonic()
    assert summary(df) == ALL_ROWS
    # Seldom enough that a step, begun again, comes to its end in between, on slow machines, too.
    every_seconds = max(1.0, time.monotonic() - began)
    with ending_sessions(db, "pgsnapshot:%?%", every_seconds, "state = 'active' AND query LIKE 'COPY%%'") as ended:
        for _ in range(60):
            assert summary(df) == ALL_ROWS
            if len(ended) >= 3:
                break
    assert len(ended) >= 3


def planned(options: dict[str, str], **more: str) -> tuple[Plan, Source, list[ScanRange]]:
    parsed = parse_snapshot_options({**options, "dbtable": "rows", "numPartitions": "1", **more})
    plan = make_plan(parsed)
    return plan, *plan_ranges(plan, parsed)


def ids_in(batches: Iterable[pa.RecordBatch]) -> list[int]:
    return [id for batch in batches for id in batch.column("id").to_pylist()]


@pytest.mark.usefixtures("rows")
def test_a_step_goes_on_behind_the_rows_that_were_handed_on(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture
) -> None:
    with open_snapshot(db) as opened:
        # A step is 16 MB, far more than waits in the buffers of server and client.
        plan, source, [scan_range] = planned(dict(opened.options), batchBytes="64kB")
        batches = read_range(plan, source, scan_range, "1")
        found = ids_in([next(batches)])
        end_sessions_like(pg, "pgsnapshot:reading")
        found += ids_in(batches)
    assert "connecting again" in caplog.text
    assert sorted(found) == list(range(1, ROWS + 1))


# How many transactions have the lock is no part of a snapshot.
VOLATILE = "id > 1000 * (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 42)"


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("kept_back_bytes", [reader.KEPT_BACK_BYTES, 0])
def test_a_predicate_that_chooses_other_rows_in_another_session_loses_none(
    kept_back_bytes: int, db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "KEPT_BACK_BYTES", kept_back_bytes)
    received = receiving.receive

    def receive_until_lost(*arguments: Any) -> Iterator[receiving.Decoded]:
        for number, chunk in enumerate(received(*arguments)):
            yield chunk
            if number == 2:
                monkeypatch.setattr(reader, "receive", received)
                with pg.cursor() as cursor:
                    cursor.execute("SELECT pg_advisory_lock(42, 1)")
                raise TransientError("the session is lost")

    monkeypatch.setattr(reader, "receive", receive_until_lost)
    with open_snapshot(db) as opened:
        plan, source, [scan_range] = planned(dict(opened.options), where=VOLATILE)
        if kept_back_bytes:
            assert sorted(ids_in(read_range(plan, source, scan_range, "1"))) == list(range(1001, ROWS + 1))
        else:
            with pytest.raises(TransientError, match="the session is lost"):
                list(read_range(plan, source, scan_range, "1"))


@pytest.mark.usefixtures("rows")
def test_tasks_of_a_worker_share_a_session_that_ends_after_the_last_one(
    spark: SparkSession, db: str, pg: Session
) -> None:
    df = slow_rows(spark, db, numPartitions=12)
    # On a machine that is busy, no task may come for half a second behind any of one action.
    for _ in range(5):
        idle_seconds, at_a_time = sessions_during(db, pg, lambda: summary(df) == ALL_ROWS)
        # A task takes 50 ms at least, so each session was seen. Two run at a time, each in a worker with one session.
        # This one ends where no task has come for half a second, and not with the task before.
        assert 1 <= max(at_a_time) <= 2
        assert min(idle_seconds.values()) > 0.25
        if len(idle_seconds) < 12:
            return
    pytest.fail("each of twelve tasks had a session of its own, in five actions")


def sessions_during(db: str, pg: Session, action: Callable[[], bool]) -> tuple[dict[int, float], set[int]]:
    """The longest that each reader's session is idle, by its process, and how many there are at a time."""
    idle_seconds: dict[int, float] = {}
    at_a_time: set[int] = set()
    ended = threading.Event()

    def look() -> None:
        with connect(db) as session, session.cursor() as cursor:
            while not ended.wait(0.01):
                cursor.execute(
                    "SELECT pid, CASE WHEN state LIKE 'idle%' THEN extract(epoch FROM clock_timestamp() - state_change)"
                    " ELSE 0 END::float8 FROM pg_stat_activity WHERE application_name LIKE 'pgsnapshot:%?%'"
                )
                found = cursor.fetchall()
                at_a_time.add(len(found))
                idle_seconds.update({pid: max(idle, idle_seconds.get(pid, 0.0)) for pid, idle in found})

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert action()
        wait_until(lambda: not session_names(pg, "pgsnapshot:%?%"), 5)
    finally:
        ended.set()
        looking.join()
    return idle_seconds, at_a_time


@pytest.mark.usefixtures("rows")
def test_a_lost_holder_is_replaced_and_nothing_is_noticed(spark: SparkSession, db: str, pg: Session) -> None:
    # One of two: where the other one has not been replaced yet, the snapshot would end.
    twin = (
        "EXISTS (SELECT FROM pg_stat_activity AS twin WHERE twin.pid <> pg_stat_activity.pid AND"
        " rtrim(twin.application_name, '0123456789ABCDEF-')"
        " = rtrim(pg_stat_activity.application_name, '0123456789ABCDEF-'))"
    )
    with ending_sessions(db, "pgsnapshot:%:%:%", 0.5, twin) as ended:
        for _ in range(60):
            assert summary(slow_rows(spark, db)) == ALL_ROWS
            if len(ended) >= 2:
                break
    assert len(ended) >= 2
    wait_until(lambda: (names := holders(pg)) and all(len(group) == 2 for group in by_execution(names).values()))


def by_execution(names: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rsplit(":", 1)[0], []).append(name)
    return groups


def end_sessions_like(pg: Session, like: str) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE %s",
            (like,),
        )


@pytest.mark.usefixtures("rows")
def test_a_holder_that_is_lost_does_not_keep_the_other_ones_locks(db: str, pg: Session) -> None:
    """The keeper finds a loss when it next uses the session, which may be to release locks."""
    spec = SnapshotSpec("off", None, 10.0)
    options = parse_connection_options({"url": db})

    def name_for(found: str) -> str:
        return f"pgsnapshot:test:1:{found}"

    held = make_snapshot(options, spec, name_for)
    with contextlib.closing(held), pg.cursor() as cursor:
        held.add_holder(options, name_for, held.first.snapshot_id)
        cursor.execute("SELECT 'rows'::regclass::oid::bigint")
        held.lock([cursor.fetchone()[0]], within_seconds=10)
        cursor.execute("SELECT pg_terminate_backend(%s)", (held.first.session.info.backend_pid,))
        wait_until(lambda: len(holders(pg)) == 1)
        held.unlock()
        # Autovacuum may be at the new table as well.
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
            " WHERE relation = 'rows'::regclass AND application_name LIKE 'pgsnapshot:%'"
        )
        assert cursor.fetchone() == (0,)


@pytest.mark.usefixtures("rows")
def test_without_any_holder_left_the_action_fails_and_the_next_one_works(
    spark: SparkSession, db: str, pg: Session, spark_sessions: SparkSessions
) -> None:
    before = keeper_processes(spark_sessions.scratch)
    df = slow_rows(spark, db, where="id % 300 > 0 OR pg_sleep(0.05) IS NOT NULL")
    outcome: list[BaseException] = []

    def act() -> None:
        try:
            summary(df)
        except PySparkException as error:
            outcome.append(error)

    action = threading.Thread(target=act)
    action.start()
    wait_until(lambda: len(holders(pg)) == 2 and readers(pg))
    (keeper,) = keeper_processes(spark_sessions.scratch) - before
    # Else it might replace one holder from the other while that one is on its way out.
    keeper.suspend()
    try:
        end_sessions_like(pg, "pgsnapshot:%:%:%")
        wait_until(lambda: not holders(pg))
        # The readers have to look for a snapshot again.
        end_sessions_like(pg, "pgsnapshot:%?%")
    finally:
        keeper.resume()
    action.join()
    [error] = outcome
    assert "[SNAPSHOT_LOST] the snapshot of this action has ended" in str(error)
    assert "Remedy: run the action again" in str(error)
    assert summary(slow_rows(spark, db)) == ALL_ROWS


@pytest.mark.usefixtures("rows")
def test_a_limit_leaves_no_reader_behind(spark: SparkSession, db: str, pg: Session) -> None:
    assert len(slow_rows(spark, db, snapshotIdle="1s").limit(3).collect()) == 3
    wait_until(lambda: not session_names(pg, "pgsnapshot:%?%"), 5)
    wait_until(lambda: not open_transactions(pg), 10)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("way", ["pulled", "pushed"])
def test_a_reader_that_is_left_early_ends_its_session_at_once(
    way: str, db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "pushed":
        monkeypatch.setattr(native, "LIBRARY", None)
    elif native.LIBRARY is None:
        pytest.skip("the accelerator is not compiled here")
    with open_snapshot(db) as opened:
        plan, source, [scan_range] = planned(dict(opened.options), batchBytes="64kB")
        # The server may be at any place: what it has sent may wait in either's buffers.
        for _ in range(12):
            batches = read_range(plan, source, scan_range, "1")
            assert next(iter(batches)).num_rows
            del batches
            wait_until(lambda: not session_names(pg, "pgsnapshot:reading"), 5)


@pytest.mark.usefixtures("rows")
def test_a_cancelled_action_leaves_no_reader_behind(spark: SparkSession, db: str, pg: Session) -> None:
    df = slow_rows(spark, db, where="id % 300 > 0 OR pg_sleep(0.1) IS NOT NULL", snapshotIdle="1s")
    outcome: list[BaseException] = []

    def act() -> None:
        try:
            summary(df)
        except Exception as error:
            outcome.append(error)

    action = threading.Thread(target=act)
    action.start()
    wait_until(lambda: readers(pg))
    spark.sparkContext.cancelAllJobs()
    action.join()
    assert "cancelled" in str(outcome[0])
    # A worker that does not end by itself is given 2 s, and PostgreSQL looks for its client every 5 s.
    wait_until(lambda: not session_names(pg, "pgsnapshot:%?%"), 10)
    wait_until(lambda: not open_transactions(pg), 10)
