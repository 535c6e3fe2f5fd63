"""Drivers, processes, sessions and servers that die under a stream: it goes on without a gap and without a repeat."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pyarrow as pa
import pytest
from crashing_driver import Errand, Point
from databases import connect
from losses import RestartableServer, ending_sessions
from psycopg2.extensions import connection as Session
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from replica import Replica, rows_of
from servers import second_server
from threads import at_work
from watch import session_names, wait_until

from pg_cdc_source.spark.pgcdc import HAS_LIMITS

SLOT = "crashes"
MARKER = "the last row of all"
TABLES = ("public.journal", "public.ledger")
ACCOUNTS = 1000
BIG = 9000
# Of changes; the big transaction is several of that.
ROWS_PER_BATCH = 2000


def create_tables(pg: Session) -> None:
    """``ledger`` has a key, and values that are TOASTed; ``journal`` has none, and rows that are alike."""
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE ledger (id int PRIMARY KEY, owner text, amount numeric(12, 2), note text);"
            " CREATE TABLE journal (day int, what text);"
            " ALTER TABLE ledger REPLICA IDENTITY FULL; ALTER TABLE journal REPLICA IDENTITY FULL;"
            " ALTER TABLE ledger ALTER note SET STORAGE EXTERNAL;"
            " INSERT INTO ledger"
            f" SELECT i, 'o' || i, i, repeat('n', i % 50 * 60) FROM generate_series(1, {ACCOUNTS}) AS i;"
            f" INSERT INTO journal SELECT i % 7, 'opened' FROM generate_series(1, {ACCOUNTS}) AS i"
        )


@pytest.fixture
def source(pg: Session) -> Iterator[None]:
    create_tables(pg)
    yield
    drop_slot(pg)


def drop_slot(pg: Session) -> None:
    def drop() -> bool:
        with pg.cursor() as cursor:
            ours = "pg_replication_slots WHERE database = current_database()"
            cursor.execute(f"SELECT pg_drop_replication_slot(slot_name) FROM {ours} AND NOT active")
            cursor.execute(f"SELECT FROM {ours}")
            return bool(cursor.rowcount == 0)

    wait_until(drop)


def write(db: str, stop: threading.Event) -> None:
    """Change both tables in small transactions, some thirty a second."""
    chance = random.Random(23)
    with connect(db) as session, session.cursor() as cursor:
        # A test may write several times, and keys that were given before may still be there.
        cursor.execute("SELECT greatest(%s, max(id)) FROM ledger", (ACCOUNTS * 10,))
        row = cursor.fetchone()
        assert row is not None
        new = row[0]
        while not stop.wait(0.03):
            account = chance.randint(1, ACCOUNTS)
            what = chance.choices(("amount", "note", "key", "delete", "insert", "rollback"), (8, 2, 2, 1, 2, 1))[0]
            new += 1
            statement = {
                "amount": f"UPDATE ledger SET amount = amount + 1 WHERE id BETWEEN {account} AND {account + 3}",
                "note": f"UPDATE ledger SET note = repeat('m', {chance.randint(0, 5000)}) WHERE id = {account}",
                "key": f"UPDATE ledger SET id = {new} WHERE id = {account}",
                "delete": f"DELETE FROM ledger WHERE id = {account}",
                "insert": f"INSERT INTO ledger VALUES ({account}, 'new', 0, repeat('i', {new % 5000}))"
                " ON CONFLICT (id) DO NOTHING",
                "rollback": "SAVEPOINT s; DELETE FROM ledger; ROLLBACK TO s",
            }[what]
            cursor.execute(f"BEGIN; {statement}; INSERT INTO journal VALUES ({new % 7}, '{what}'); COMMIT")


class Driver:
    """A process of ``crashing_driver.py``, whose Spark starts at once and waits for an errand."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        scratch.mkdir()
        self._log = scratch.with_suffix(".log")
        program = Path(__file__).parents[1] / "helpers" / "crashing_driver.py"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, program, scratch], stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def start(self, errand: Errand) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(errand)).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, look: Callable[[], bool], seconds: float = 180) -> None:
        """Wait until something is to be seen while the driver runs; where it ends before, its log is shown."""

        # Looked at once: what was there may be gone at the next look.
        def seen_or_ended() -> str:
            if look():
                return "seen"
            return "" if self._process.poll() is None else "ended"

        if wait_until(seen_or_ended, seconds) == "ended":
            pytest.fail(self._log.read_text(errors="replace")[-5000:])

    def killed(self) -> bool:
        return self._process.poll() == -signal.SIGKILL

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def processes(self) -> list[psutil.Process]:
        """What it has started and still runs: the JVM and its workers have its directory for temporary files."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self._scratch):
                    found.append(process)
        return found


class Drivers:
    """Drivers that wait: one that has done its errand in order is there for the next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Driver] = []
        self._idle: list[Driver] = []

    def take(self) -> Driver:
        if not self._idle:
            self._idle.append(Driver(self._directory / f"driver{len(self._started)}"))
            self._started += self._idle
        return self._idle.pop()

    def give_back(self, driver: Driver) -> None:
        self._idle.append(driver)

    def close(self) -> None:
        for driver in self._started:
            driver.close()


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    opened = Drivers(tmp_path_factory.mktemp("drivers"))
    yield opened
    opened.close()


def expect_nothing_left(pg: Session, driver: Driver | None = None) -> None:
    """Within 10 s: no session, no process, and a slot that the next reader can have."""

    def left() -> list[str]:
        with pg.cursor() as cursor:
            cursor.execute("SELECT slot_name FROM pg_replication_slots WHERE active AND slot_name = %s", (SLOT,))
            active = [f"slot {slot}" for (slot,) in cursor]
        processes = [f"process {process.pid}" for process in driver.processes()] if driver else []
        return [*active, *session_names(pg, "pgcdc:%"), *session_names(pg, "pgsnapshot:%"), *processes]

    wait_until(lambda: not left(), 10)


def read_batches(directory: Path) -> list[list[dict[str, Any]]]:
    """The rows of each batch, in order. Whatever came more than once was the same each time."""
    paths = list((directory / "batches").glob("*.jsonl"))
    batches = []
    for number in range(len(paths)):
        last = (directory / "batches" / f"{number}.jsonl").read_text().splitlines()
        for before in (directory / "batches").glob(f"{number}.*.before"):
            assert sorted(before.read_text().splitlines()) == sorted(last), f"batch {number} came again with other rows"
        batches.append([json.loads(line) for line in last])
    return batches


# How far a driver comes before it dies, in batches behind the last one that Spark had committed before.
BATCHES = {"snapshot": 1, "committed": 3, "transaction": 1, "sink": 4}


@pytest.mark.usefixtures("source")
@pytest.mark.matrix("kill -9 of the driver, replay")
def test_a_killed_driver_goes_on_where_spark_had_come(db: str, pg: Session, drivers: Drivers, tmp_path: Path) -> None:
    """One death after another, with one checkpoint: what one left behind is what the next one begins with."""
    points: tuple[Point, ...] = ("snapshot", "sink", "committed")
    if HAS_LIMITS:
        # Before Spark 4.2 no batch ends within a transaction.
        points = (*points, "transaction")
    options = {
        "url": db,
        "tables": "public.ledger,public.journal",
        "slot": SLOT,
        "maxRowsPerBatch": str(ROWS_PER_BATCH),
        "partitionBytes": "32kB",
        # Less than the first table has, so that the second one comes in another batch.
        "maxBytesPerBatch": "256kB",
    }
    commits = tmp_path / "checkpoint" / "commits"
    driver = drivers.take()
    with at_work(partial(write, db)):
        for point in points:
            # Its Spark starts while this driver works.
            following = drivers.take()
            batch = newest(commits) + BATCHES[point]
            driver.start(Errand(options, str(tmp_path), MARKER, point, batch))
            if point == "transaction":
                driver.wait((commits / str(batch)).exists)
                with pg.cursor() as cursor:
                    cursor.execute(f"INSERT INTO journal SELECT i % 7, 'big' FROM generate_series(1, {BIG}) AS i")
            driver.wait(driver.killed)
            expect_nothing_left(pg, driver)
            driver = following
        driver.start(Errand(options, str(tmp_path), MARKER))
        driver.wait(lambda: bool(session_names(pg, "pgcdc:%:changes")))
    with pg.cursor() as cursor:
        cursor.execute("INSERT INTO journal VALUES (0, %s)", (MARKER,))
    driver.wait((tmp_path / "done").exists)
    expect_nothing_left(pg)
    drivers.give_back(driver)
    replica = Replica()
    for rows in read_batches(tmp_path):
        replica.apply(rows)
    for table in TABLES:
        assert replica.rows(table) == rows_of(pg, table)


def newest(commits: Path) -> int:
    """The last batch that Spark has committed, -1 before the first."""
    return max((int(path.name) for path in commits.glob("[0-9]*")), default=-1)


# --- processes, sessions and servers ----------------------------------------------------------------------------------


class Sink:
    """Keeps the rows of each batch, and knows whether it has seen the marker."""

    def __init__(self) -> None:
        self.batches: dict[int, list[dict[str, Any]]] = {}
        self.done = False

    def __call__(self, df: DataFrame, batch: int) -> None:
        self.batches[batch] = [row.asDict(recursive=True) for row in df.collect()]
        self.done |= any(MARKER in str(row["after"]) for row in self.batches[batch])

    def expect_equal(self, pg: Session) -> None:
        replica = Replica()
        for _, rows in sorted(self.batches.items()):
            replica.apply(rows)
        for table in TABLES:
            assert replica.rows(table) == rows_of(pg, table)


@contextmanager
def streaming(spark: SparkSession, url: str, checkpoint: Path, sink: Any, **options: str) -> Iterator[StreamingQuery]:
    df = spark.readStream.format("pgcdc").options(url=url, slot=SLOT, tables=",".join(TABLES), **options).load()
    query = df.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()


def wait_while_active(query: StreamingQuery, look: Callable[[], object], seconds: float = 180) -> None:
    """Wait until something is to be seen of a query that runs."""
    wait_until(lambda: look() or query.exception(), seconds)
    if (error := query.exception()) is not None:
        raise error


def is_active(pg: Session) -> bool:
    with pg.cursor() as cursor:
        cursor.execute("SELECT FROM pg_replication_slots WHERE slot_name = %s AND active", (SLOT,))
        return bool(cursor.rowcount)


def source_process(spark: SparkSession, url: str) -> psutil.Process:
    """The process that reads the slot: the one below Spark's JVM that is connected to the server for good."""
    jvm = psutil.Process(int(spark._jvm.java.lang.ProcessHandle.current().pid()))  # type: ignore[union-attr]
    port = int(psycopg2.extensions.parse_dsn(url)["port"])

    def only_one() -> list[psutil.Process]:
        found = []
        for process in jvm.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                connected = any(c.raddr and c.raddr.port == port for c in process.net_connections())
                if connected and "pg_cdc_source.snapshot.keeper" not in process.cmdline():
                    found.append(process)
        return found if len(found) == 1 else []

    [process] = wait_until(only_one)
    return process


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


# Well below a second where nothing else runs.
FREE_SECONDS = 2


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("how", ["stop()", "SIGTERM twice", "SIGKILL"])
def test_a_source_process_that_ends_in_a_backlog_frees_its_slot_at_once(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, how: str
) -> None:
    rows = 400_000 if how == "stop()" else 200_000

    def sink(df: DataFrame, batch: int) -> None:
        df.write.format("noop").mode("append").save()

    with streaming(spark, db, tmp_path, sink, maxRowsPerBatch="10000") as query:
        wait_while_active(query, lambda: session_names(pg, "pgcdc:%:changes"))
        with pg.cursor() as cursor:
            cursor.execute(f"INSERT INTO journal SELECT i % 7, 'backlog' FROM generate_series(1, {rows}) AS i")
        # In its midst: something of it is committed, most of it is not.
        wait_while_active(query, lambda: (query.lastProgress or {"numInputRows": 0})["numInputRows"] == 10000)
        process = source_process(spark, db)
        if how == "stop()":
            query.stop()
        else:
            for _ in range(1 if how == "SIGKILL" else 2):
                process.send_signal(signal.SIGKILL if how == "SIGKILL" else signal.SIGTERM)
        ended = time.monotonic()
        wait_until(lambda: not is_active(pg))
        assert time.monotonic() - ended < FREE_SECONDS
        if how != "stop()":
            # Nobody has stopped it, and it does not go on as if nothing had happened.
            with pytest.raises(StreamingQueryException):
                query.awaitTermination(60)
    # It lets go of the slot first.
    wait_until(lambda: has_ended(process), FREE_SECONDS)
    with streaming(spark, db, tmp_path, sink, maxRowsPerBatch="10000") as query:
        wait_while_active(query, lambda: is_active(pg))
        wait_while_active(query, lambda: (query.lastProgress or {"numInputRows": 0})["numInputRows"] > 0)
    wait_until(lambda: not session_names(pg, "pgcdc:%"), FREE_SECONDS)


@pytest.mark.usefixtures("source")
def test_stopping_during_the_snapshot_leaves_no_session(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"

    def hang(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seen.touch()
            time.sleep(60)
            yield batch

    def sink(df: DataFrame, batch: int) -> None:
        try:
            df.mapInArrow(hang, df.schema).write.format("noop").mode("append").save()
        except Exception:
            # Spark looks through the whole text with a regular expression that overflows its stack.
            raise RuntimeError("interrupted") from None

    with streaming(spark, db, tmp_path / "checkpoint", sink, partitionBytes="64kB") as query:
        wait_while_active(query, seen.exists)
        query.stop()
        wait_until(lambda: not session_names(pg, "pgcdc:%"), FREE_SECONDS)
    collected = Sink()
    with pg.cursor() as cursor:
        cursor.execute("DELETE FROM ledger WHERE id %% 2 = 0; INSERT INTO journal VALUES (0, %s)", (MARKER,))
    with streaming(spark, db, tmp_path / "checkpoint", collected) as query:
        wait_while_active(query, lambda: collected.done)
    collected.expect_equal(pg)


@pytest.mark.usefixtures("source")
def test_a_driver_that_loses_its_jvm_frees_its_slot_at_once(
    db: str, pg: Session, drivers: Drivers, tmp_path: Path
) -> None:
    driver = drivers.take()
    driver.start(Errand({"url": db, "tables": ",".join(TABLES), "slot": SLOT}, str(tmp_path), MARKER))
    driver.wait(lambda: bool(session_names(pg, "pgcdc:%:changes")) and is_active(pg))
    [jvm] = [process for process in driver.processes() if process.name() == "java"]
    jvm.kill()
    wait_until(lambda: not is_active(pg), FREE_SECONDS)
    expect_nothing_left(pg)


@pytest.mark.matrix("lost sessions and restarts of the server")
@pytest.mark.usefixtures("source")
def test_lost_sessions_are_replaced_and_nothing_is_lost_or_repeated(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    sink = Sink()

    def lose(query: StreamingQuery, like: str) -> None:
        with at_work(partial(write, db)), ending_sessions(db, like, 0.5) as ended:
            with pg.cursor() as cursor:
                cursor.execute(f"INSERT INTO journal SELECT i % 7, 'big' FROM generate_series(1, {BIG}) AS i")
            wait_while_active(query, lambda: len(ended) >= 4)

    with streaming(spark, db, tmp_path, sink, maxRowsPerBatch=str(ROWS_PER_BATCH)) as query:
        wait_while_active(query, lambda: session_names(pg, "pgcdc:%:changes"))
        lose(query, "pgcdc:%:changes")
        lose(query, "pgcdc:%:source")
        with pg.cursor() as cursor:
            cursor.execute("INSERT INTO journal VALUES (0, %s)", (MARKER,))
        wait_while_active(query, lambda: sink.done)
    sink.expect_equal(pg)


@pytest.mark.matrix("lost sessions and restarts of the server")
def test_a_restart_of_the_server_neither_waits_for_the_stream_nor_ends_it(spark: SparkSession, tmp_path: Path) -> None:
    sink, go_on = Sink(), threading.Event()

    def slow(df: DataFrame, batch: int) -> None:
        sink(df, batch)
        go_on.wait(60)

    def restart(server: RestartableServer, mode: str) -> None:
        go_on.clear()
        known = len(sink.batches)
        with connect(server.url) as pg, pg.cursor() as cursor:
            cursor.execute(f"INSERT INTO journal SELECT i, '{mode}' FROM generate_series(1, 1000) AS i")
            # Spark is busy with this batch all the while, so nothing more is committed to the slot.
            wait_while_active(query, lambda: len(sink.batches) > known)
            cursor.execute("UPDATE ledger SET amount = -amount WHERE id <= 1000")
        began = time.monotonic()
        server.stop(mode)
        assert time.monotonic() - began < 10
        server.start()
        go_on.set()

    with second_server({}) as url, contextlib.closing(RestartableServer(url)) as server:
        with connect(url) as pg:
            create_tables(pg)
        with streaming(spark, url, tmp_path, slow) as query:
            go_on.set()
            with connect(url) as pg:
                wait_while_active(query, lambda: session_names(pg, "pgcdc:%:changes"))
            restart(server, "immediate")
            restart(server, "fast")
            with connect(url) as pg, pg.cursor() as cursor:
                cursor.execute("INSERT INTO journal VALUES (0, %s)", (MARKER,))
            wait_while_active(query, lambda: sink.done)
        with connect(url) as pg:
            sink.expect_equal(pg)
