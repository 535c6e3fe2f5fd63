"""The keeper: one process for each driver and database, which gives each action its snapshot and leaves nothing."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from databases import connect
from frames import load
from psycopg2.extensions import connection as Session
from psycopg2.extensions import cursor as Cursor
from psycopg2.extensions import make_dsn, parse_dsn
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StringType, StructField, StructType
from roles import conninfo, role
from sessions import SparkSessions
from watch import (
    holders,
    keeper_processes,
    keeper_sessions,
    open_transactions,
    readers,
    session_names,
    slots,
    wait_until,
)

from pg_cdc_source.errors import TransientError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres.instances import read_instance
from pg_cdc_source.postgres.snapshots import SnapshotSpec
from pg_cdc_source.snapshot.board import Request, execution_key, keeper_name
from pg_cdc_source.snapshot.driver import Process
from pg_cdc_source.snapshot.driver_files import sparks_directory
from pg_cdc_source.snapshot.keeper import marks
from pg_cdc_source.snapshot.keeper.handshake import Settings
from pg_cdc_source.snapshot.keeper.server import Keeper
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges

ROWS = 300
BLOCKS = 30  # with BLOCKS / 10 rows in each


@pytest.fixture
def slow(pg: Session) -> str:
    """A table of 30 blocks with 10 rows each."""
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE slow (id int, filler text) WITH (autovacuum_enabled = off);"
            " ALTER TABLE slow ALTER filler SET STORAGE PLAIN;"
            f" INSERT INTO slow SELECT i, repeat('x', 700) FROM generate_series(1, {ROWS}) AS i"
        )
    return "slow"


def sleeping(seconds: float) -> str:
    """A predicate that is true, ``seconds`` after it was asked for a row."""
    return f"pg_sleep({seconds}) IS NOT NULL"


@pytest.fixture
def keepers(spark_sessions: SparkSessions) -> Callable[[], set[psutil.Process]]:
    """Look for the keepers that were started since the test began."""
    before = keeper_processes(spark_sessions.scratch)
    return lambda: keeper_processes(spark_sessions.scratch) - before


class Action:
    """An action that runs in a thread, and its outcome."""

    def __init__(self, frame: DataFrame) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._rows = self._pool.submit(frame.collect)
        self._pool.shutdown(wait=False)

    def rows(self) -> list[Row]:
        return self._rows.result(180)


def insert(pg: Session, rows: int) -> None:
    with pg.cursor() as cursor:
        cursor.execute("INSERT INTO slow SELECT i, 'new' FROM generate_series(1, %s) AS i", (rows,))


# --- one process -----------------------------------------------------------------------------------------------------


def test_one_keeper_serves_a_driver_and_database(
    db: str, pg: Session, spark: SparkSession, slow: str, keepers: Callable[[], set[psutil.Process]]
) -> None:
    def count(session: SparkSession) -> int:
        return load(session, db, dbtable=slow, numPartitions=2).count()

    # Four first loads at once, two of them in a session of their own.
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, [spark, spark.newSession(), spark, spark.newSession()])) == [ROWS] * 4
    (name,) = keeper_sessions(pg)
    # Those that came second leave at once.
    (process,) = wait_until(lambda: keepers() if len(keepers()) == 1 else set())
    assert count(spark) == ROWS
    assert keeper_sessions(pg) == [name]
    assert keepers() == {process}


def test_each_database_has_a_keeper_of_its_own(
    server: str, db: str, pg: Session, spark: SparkSession, slow: str, keepers: Callable[[], set[psutil.Process]]
) -> None:
    assert load(spark, db, dbtable=slow).count() == ROWS
    (first,) = keepers()
    assert load(spark, server, query="SELECT 1 AS one").count() == 1
    with connect(server) as other:
        assert set(keeper_sessions(pg)).isdisjoint(keeper_sessions(other))
    assert first in keepers()


def test_one_server_has_one_keeper_however_it_is_named(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    given = parse_dsn(db)
    assert given["host"] == "127.0.0.1"
    frames = [
        load(spark, make_dsn(**{**given, "host": host}), dbtable=slow, lsnColumn="lsn").select("lsn")
        for host in ("127.0.0.1", "localhost")
    ]
    both = frames[0].union(frames[1]).collect()
    assert len(both) == 2 * ROWS
    assert len({row.lsn for row in both}) == 1
    assert len(keeper_sessions(pg)) == 1


def test_others_cannot_ask_the_keeper(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    assert load(spark, db, dbtable=slow).count() == ROWS
    [name] = keeper_sessions(pg)
    spec = SnapshotSpec("off", None, 10.0)
    asked = Request("4711", 60.0, 20, False, "", spec)
    with role(pg, db) as login, connect(conninfo(login)) as other, other.cursor() as cursor:
        for payload in ("{}", "", asked.to_json()):
            cursor.execute("SELECT pg_notify(%s, %s)", (name, payload))
        assert load(spark, db, dbtable=slow).count() == ROWS
    assert keeper_sessions(pg) == [name]
    # One of the same role that says nothing it knows, as another version would.
    with connect(db) as same, same.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", (name, '{"spec": {}}'))
    assert load(spark, db, dbtable=slow).count() == ROWS
    assert keeper_sessions(pg) == [name]
    _, number = execution_key("4711")
    with pg.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s", (number,))
        assert cursor.fetchone() == (0,)


def test_executions_that_fail_alike_do_not_take_the_locks_of_the_server(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "_MOST_EXECUTIONS", 20)
    with closing(marks.Marks(parse_connection_options({"url": db}), "k")) as shown:
        for execution in range(50):
            shown.show(str(execution), TransientError("the same"))
            assert str(execution) in shown
        with pg.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
            assert cursor.fetchone()[0] <= 20


def test_options_may_name_files_from_the_working_directory(
    db: str, spark: SparkSession, slow: str, spark_sessions: SparkSessions
) -> None:
    given = parse_dsn(db)
    password = given.pop("password")
    # The working directory of Spark's JVM, and so of its Python processes.
    command = spark_sessions.scratch / "token"
    command.write_text(f"#!/bin/sh\necho '{password}'\n")
    command.chmod(0o700)
    try:
        assert load(spark, make_dsn(**given), passwordCommand="./token", dbtable=slow).count() == ROWS
    finally:
        command.unlink()


def test_the_password_is_in_neither_argv_nor_environment(
    db: str, spark: SparkSession, slow: str, keepers: Callable[[], set[psutil.Process]]
) -> None:
    assert load(spark, db, dbtable=slow).count() == ROWS
    (process,) = keepers()
    password = parse_dsn(db)["password"].encode()
    for file in ("cmdline", "environ"):
        text = Path(f"/proc/{process.pid}/{file}").read_bytes()
        assert text
        assert password not in text


# --- a snapshot's life -----------------------------------------------------------------------------------------------


def test_a_snapshot_is_released_after_its_last_reader(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    assert load(spark, db, dbtable=slow, numPartitions=2, snapshotIdle="5s").count() == ROWS
    counted = time.monotonic()
    wait_until(lambda: not holders(pg), 10)
    # The last reader has ended a moment before the count came.
    assert time.monotonic() - counted > 3
    wait_until(lambda: not open_transactions(pg))
    assert len(keeper_sessions(pg)) == 1


def test_a_snapshot_lasts_as_long_as_its_readers(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    # Two ranges of about 3 s each, one after the other: much longer than snapshotIdle in all.
    frame = load(spark, db, dbtable=slow, numPartitions=2, where=sleeping(0.02), lsnColumn="lsn", snapshotIdle="2s")
    action = Action(frame.coalesce(1))
    pair = two_holders_after(pg, [])
    wait_until(lambda: readers(pg))
    # The second range is read in the session of the first and would not miss the holders: so look for them.
    while readers(pg):
        assert holders(pg) == pair
    rows = action.rows()
    assert len(rows) == ROWS
    assert len({row.lsn for row in rows}) == 1


def test_a_snapshot_lasts_through_many_short_tasks(db: str, spark: SparkSession, slow: str) -> None:
    # Each is connected for a few milliseconds only, so most looks of the keeper find no reader.
    frame = load(spark, db, dbtable=slow, numPartitions=30, lsnColumn="lsn", snapshotIdle="1s")
    rows = frame.union(frame).collect()
    assert len(rows) == 2 * ROWS
    assert len({row.lsn for row in rows}) == 1


def test_a_dataframe_takes_a_new_snapshot_after_the_release(
    db: str, pg: Session, spark: SparkSession, slow: str
) -> None:
    frame = load(spark, db, dbtable=slow, numPartitions=2, lsnColumn="lsn", snapshotIdle="3s")
    before = frame.select("lsn").collect()
    assert len(before) == ROWS
    insert(pg, 7)
    wait_until(lambda: not open_transactions(pg))
    after = frame.select("lsn").collect()
    assert len(after) == ROWS + 7
    ((first,), (second,)) = set(before), set(after)
    assert first < second


def test_two_actions_at_once_have_two_snapshots(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    frame = load(spark, db, dbtable=slow, numPartitions=2, where=sleeping(0.01), lsnColumn="lsn")
    first = Action(frame)
    wait_until(lambda: readers(pg))
    insert(pg, 7)
    second = frame.collect()
    assert (len(first.rows()), len(second)) == (ROWS, ROWS + 7)
    assert len({row.lsn for row in first.rows()} | {row.lsn for row in second}) == 2


def test_an_rdd_reads_one_snapshot_per_stage(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    frame = load(spark, db, dbtable=slow, numPartitions=3, lsnColumn="lsn")
    before = frame.rdd.collect()
    insert(pg, 7)
    after = frame.rdd.collect()
    assert (len(before), len(after)) == (ROWS, ROWS + 7)
    assert len({row.lsn for row in before}) == 1
    assert len({row.lsn for row in after}) == 1


def test_each_spark_context_has_directories_of_its_own(spark: SparkSession, spark_sessions: SparkSessions) -> None:
    """Stages are numbered from 0 again in the next one: what tells these apart is the directory (test_reasons)."""

    def directory(session: SparkSession) -> str:
        """The one that a process of the context has which plans."""

        class Directory(DataSource):
            @classmethod
            def name(cls) -> str:
                return "directory"

            def schema(self) -> StructType:
                return StructType([StructField(sparks_directory(), StringType())])

        session.dataSource.register(Directory)
        (found,) = session.read.format("directory").load().columns
        assert found
        return found

    first = directory(spark)
    spark_sessions.stop()
    second = directory(spark_sessions.get())
    assert first != second


def test_no_slot_holds_wal_while_a_long_read_runs(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    frame = load(spark, db, dbtable=slow, numPartitions=2, where=sleeping(0.03), lsnColumn="lsn")
    action = Action(frame)
    wait_until(lambda: readers(pg))
    # The session with the slot leaves as soon as others hold the snapshot, which is just after they are found.
    wait_until(lambda: not session_names(pg, "pgsnapshot%", "backend_type = 'walsender'"))
    looks = 0
    while readers(pg):
        assert slots(pg) == []
        assert session_names(pg, "pgsnapshot%", "backend_type = 'walsender'") == []
        looks += 1
    assert looks > 3
    assert len(action.rows()) == ROWS
    assert action.rows()[0].lsn is not None
    assert slots(pg) == []


# --- ends ------------------------------------------------------------------------------------------------------------

READING = """
import pickle, sys
from pg_cdc_source.snapshot.reader import read_range

for _ in read_range(*pickle.load(sys.stdin.buffer), "1"):
    pass
"""


def test_a_killed_driver_leaves_nothing(
    db: str,
    pg: Session,
    slow: str,
    own_driver: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whatever it was doing: here a task reads for minutes, in a process that goes with the driver as Spark's do."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    plan = make_plan(options := parse_snapshot_options({"url": db, "dbtable": slow, "where": sleeping(1)}))
    source, [part] = plan_ranges(plan, options)
    with subprocess.Popen([sys.executable, "-c", READING], stdin=subprocess.PIPE) as task:
        assert task.stdin is not None
        task.stdin.write(pickle.dumps((plan, source, part)))
        task.stdin.close()
        try:
            wait_until(lambda: readers(pg))
            assert len(keeper_processes(tmp_path)) == 1
            # Tasks begin with the first holder; the second one comes a moment later.
            wait_until(lambda: len(holders(pg)) == 2)
        finally:
            own_driver.kill()
            task.kill()
    wait_until(lambda: not session_names(pg, "pgsnapshot%"), 15)
    wait_until(lambda: not keeper_processes(tmp_path), 5)
    assert slots(pg) == []


def kill(processes: set[psutil.Process]) -> None:
    (process,) = processes
    os.kill(process.pid, signal.SIGKILL)


def test_without_its_keeper_an_action_that_needs_it_fails(
    db: str, pg: Session, spark: SparkSession, slow: str, keepers: Callable[[], set[psutil.Process]]
) -> None:
    # Eight tasks, of which two run at a time.
    options: dict[str, str | int] = {"dbtable": slow, "numPartitions": 8, "lsnColumn": "lsn"}
    action = Action(load(spark, db, where=sleeping(0.05), **options))
    wait_until(lambda: readers(pg))
    kill(keepers())
    insert(pg, 7)
    # As long as PostgreSQL has not noticed, a new session would still find a holder.
    wait_until(lambda: not holders(pg))
    # Tasks go on in the sessions that there are; only who needs a new one needs the keeper.
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'pgsnapshot:%?%'"
        )
    with pytest.raises(PySparkException, match=r"no process on the driver's host holds snapshots") as lost:
        action.rows()
    assert "Remedy: load the DataFrame again" in str(lost.value)
    # The next load starts another keeper.
    again = load(spark, db, **options).collect()
    assert len(again) == ROWS + 7
    assert len({row.lsn for row in again}) == 1
    assert len(keepers()) == 1


def test_readers_that_have_begun_do_not_need_the_keeper(
    db: str, pg: Session, spark: SparkSession, slow: str, keepers: Callable[[], set[psutil.Process]]
) -> None:
    frame = load(spark, db, dbtable=slow, numPartitions=2, where=sleeping(0.02), lsnColumn="lsn")
    action = Action(frame)
    wait_until(lambda: len(readers(pg)) == 2)
    kill(keepers())
    insert(pg, 7)
    assert sorted(row.id for row in action.rows()) == list(range(1, ROWS + 1))
    assert len({row.lsn for row in action.rows()}) == 1


def two_holders_after(pg: Session, lost: list[str]) -> list[str]:
    """Wait for a pair of holders that is not ``lost``; the older one comes first."""

    def look() -> list[str]:
        found = holders(pg)
        return found if len(found) == 2 and found != lost else []

    return wait_until(look)


def test_a_keeper_does_not_take_its_own_lost_session_for_another_keeper(
    db: str, pg: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network may lose the end of a session, which the server finds out about after a while."""
    options = parse_connection_options({"url": db})
    request = Request("1", 60.0, 20, False, "", SnapshotSpec("off", None, 10.0))
    settings = Settings(options, "a" * 10, Process(os.getpid(), ""), request, read_instance(pg), str(tmp_path))
    keeper, other = Keeper(settings), Keeper(settings)
    assert keeper.open(first=True)
    assert keeper._board is not None
    with closing(keeper._board):
        assert not other.open()
        with pytest.raises(TransientError, match="the server has the session that was lost"):
            keeper.open()
        wait_until(lambda: not session_names(pg, keeper_name(keeper.name)))
        assert keeper.open()
        lost, look = keeper._board, keeper._end_old_session

        def ended_meanwhile(cursor: Cursor) -> None:
            lost.close()
            wait_until(lambda: not session_names(pg, keeper_name(keeper.name)))
            look(cursor)

        with monkeypatch.context() as patch:
            patch.setattr(keeper, "_end_old_session", ended_meanwhile)
            with pytest.raises(TransientError, match="has ended just now"):
                keeper.open()
        assert keeper.open()
        keeper._close()


def test_a_holder_that_is_lost_is_replaced(db: str, pg: Session, spark: SparkSession, slow: str) -> None:
    frame = load(spark, db, dbtable=slow, numPartitions=6, where=sleeping(0.02), lsnColumn="lsn")
    action = Action(frame)
    wait_until(lambda: readers(pg))
    pair: list[str] = []
    # Each time the older one: in the end none of the first two is left.
    for _ in range(2):
        pair = two_holders_after(pg, pair)
        with pg.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (pair[0],)
            )
        insert(pg, 1)
    two_holders_after(pg, pair)
    assert sorted(row.id for row in action.rows()) == list(range(1, ROWS + 1))
    assert len({row.lsn for row in action.rows()}) == 1
