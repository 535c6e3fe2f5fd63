"""Sessions that end in the middle of an action: rows are read once or the action fails, and nothing stays behind."""

from __future__ import annotations

import threading

import pytest
from conftest import connect
from frames import load
from losses import ending_sessions
from psycopg2.extensions import connection as Session
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from watch import holders, open_transactions, readers, session_names, wait_until

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
    """All rows, in four pieces that take about 150 ms each, and more than one piece a partition."""
    return load(
        spark,
        db,
        **{"dbtable": "rows", "columns": "id", "where": SLOW, "lsnColumn": "lsn", "numPartitions": 4, **options},
    )


def summary(df: DataFrame) -> tuple[int, ...]:
    row = df.selectExpr("count(*)", "count(DISTINCT id)", "sum(id)", "count(DISTINCT lsn)").first()
    assert row is not None
    return tuple(row)


ALL_ROWS = (ROWS, ROWS, ROWS * (ROWS + 1) // 2, 1)


@pytest.mark.usefixtures("rows")
def test_a_reader_that_loses_its_session_repeats_no_row_and_misses_none(spark: SparkSession, db: str) -> None:
    df = slow_rows(spark, db)
    with ending_sessions(db, "pgsnapshot:%?%", 0.25) as ended:
        for _ in range(3):
            assert summary(df) == ALL_ROWS
    assert len(ended) >= 3


@pytest.mark.usefixtures("rows")
def test_tasks_of_a_worker_share_a_session_that_ends_after_the_last_one(
    spark: SparkSession, db: str, pg: Session
) -> None:
    df = slow_rows(spark, db, numPartitions=12)
    found: set[int] = set()
    ended = threading.Event()

    def look() -> None:
        with connect(db) as session, session.cursor() as cursor:
            while not ended.wait(0.01):
                cursor.execute("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pgsnapshot:%?%'")
                found.update(pid for (pid,) in cursor)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert summary(df) == ALL_ROWS
    finally:
        ended.set()
        looking.join()
    # A task takes 50 ms at least, so each session was seen. Two run at a time.
    assert 1 <= len(found) <= 4
    wait_until(lambda: not session_names(pg, "pgsnapshot:%?%"), 5)


@pytest.mark.usefixtures("rows")
def test_a_lost_holder_is_replaced_and_nothing_is_noticed(spark: SparkSession, db: str, pg: Session) -> None:
    with ending_sessions(db, "pgsnapshot:%:%:%", 0.5) as ended:
        for _ in range(2):
            assert summary(slow_rows(spark, db)) == ALL_ROWS
    assert len(ended) >= 2
    wait_until(lambda: (names := holders(pg)) and all(len(group) == 2 for group in by_execution(names).values()))


def by_execution(names: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rsplit(":", 1)[0], []).append(name)
    return groups


@pytest.mark.usefixtures("rows")
def test_without_any_holder_left_the_action_fails_and_the_next_one_works(
    spark: SparkSession, db: str, pg: Session
) -> None:
    df = slow_rows(spark, db, where="id % 300 > 0 OR pg_sleep(0.02) IS NOT NULL")
    outcome: list[BaseException] = []

    def act() -> None:
        try:
            summary(df)
        except PySparkException as error:
            outcome.append(error)

    action = threading.Thread(target=act)
    action.start()
    wait_until(lambda: len(holders(pg)) == 2 and readers(pg))
    with pg.cursor() as cursor:
        # Holders and readers at once: the readers have to look for a snapshot again.
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND (application_name LIKE 'pgsnapshot:%:%:%' OR application_name LIKE 'pgsnapshot:%?%')"
        )
    action.join()
    [error] = outcome
    assert "the snapshot of this action has ended" in str(error)
    assert "Remedy: run the action again" in str(error)
    assert summary(slow_rows(spark, db)) == ALL_ROWS


@pytest.mark.usefixtures("rows")
def test_a_limit_leaves_no_reader_behind(spark: SparkSession, db: str, pg: Session) -> None:
    assert len(slow_rows(spark, db, snapshotIdle="1s").limit(3).collect()) == 3
    wait_until(lambda: not session_names(pg, "pgsnapshot:%?%"), 5)
    wait_until(lambda: not open_transactions(pg), 10)


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
    wait_until(lambda: not session_names(pg, "pgsnapshot:%?%"), 10)
    wait_until(lambda: not open_transactions(pg), 10)
