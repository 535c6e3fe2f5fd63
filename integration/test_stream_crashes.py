"""Drivers, processes, sessions and servers that die under a stream: it goes on without a gap and without a repeat."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import connect
from crashing_driver import Errand, Point
from psycopg2.extensions import connection as Session
from replica import Replica, rows_of
from watch import session_names, wait_until

SLOT = "crashes"
MARKER = "the last row of all"
TABLES = ("public.journal", "public.ledger")
ACCOUNTS = 4000
BIG = 9000
# Of changes; the big transaction is several of that.
ROWS_PER_BATCH = 2000


@pytest.fixture
def source(pg: Session) -> Iterator[None]:
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
    yield
    drop_slot(pg)


def drop_slot(pg: Session) -> None:
    def drop() -> bool:
        with pg.cursor() as cursor:
            cursor.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
            cursor.execute("SELECT FROM pg_replication_slots WHERE database = current_database()")
            return cursor.rowcount == 0

    wait_until(drop, 10)


@contextmanager
def writing(db: str) -> Iterator[None]:
    """Change both tables in small transactions, a hundred a second, until the block ends."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        chance = random.Random(23)
        new = ACCOUNTS * 10
        try:
            with connect(db) as session, session.cursor() as cursor:
                while not stop.wait(0.01):
                    account = chance.randint(1, ACCOUNTS)
                    what = chance.choices(
                        ("amount", "note", "key", "delete", "insert", "rollback"), (8, 2, 2, 1, 2, 1)
                    )[0]
                    new += 1
                    statement = {
                        "amount": f"UPDATE ledger SET amount = amount + 1.01 WHERE id BETWEEN {account} AND {account + 3}",
                        "note": f"UPDATE ledger SET note = repeat('m', {chance.randint(0, 5000)}) WHERE id = {account}",
                        "key": f"UPDATE ledger SET id = {new} WHERE id = {account}",
                        "delete": f"DELETE FROM ledger WHERE id = {account}",
                        "insert": f"INSERT INTO ledger VALUES ({account}, 'new', 0, repeat('i', {new % 5000}))"
                        " ON CONFLICT (id) DO NOTHING",
                        "rollback": "SAVEPOINT s; DELETE FROM ledger; ROLLBACK TO s",
                    }[what]
                    cursor.execute(f"BEGIN; {statement}; INSERT INTO journal VALUES ({new % 7}, '{what}'); COMMIT")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write, name="writing")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


class Driver:
    """A process of ``crashing_driver.py``, whose Spark starts at once and waits for an errand."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        scratch.mkdir()
        self._log = scratch.with_suffix(".log")
        program = Path(__file__).with_name("crashing_driver.py")
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
        wait_until(lambda: look() or self._process.poll() is not None, seconds)
        if not look():
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


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("point", ["snapshot", "sink", "transaction", "committed", "random"])
def test_a_killed_driver_goes_on_where_spark_had_come(
    db: str, pg: Session, drivers: Drivers, tmp_path: Path, point: Point
) -> None:
    options = {
        "url": db,
        "tables": "public.ledger,public.journal",
        "slot": SLOT,
        "maxRowsPerBatch": str(ROWS_PER_BATCH),
        "partitionBytes": "128kB",
    }
    batch = {"sink": 3, "committed": 2}.get(point, 0)
    seconds = random.uniform(0, 6)
    dying, last = drivers.take(), drivers.take()
    with writing(db):
        dying.start(Errand(options, str(tmp_path), MARKER, point, batch, seconds))
        if point == "transaction":
            dying.wait((tmp_path / "checkpoint" / "commits" / "2").exists)
            with pg.cursor() as cursor:
                cursor.execute(f"INSERT INTO journal SELECT i % 7, 'big' FROM generate_series(1, {BIG}) AS i")
        dying.wait(dying.killed)
        expect_nothing_left(pg, dying)
        last.start(Errand(options, str(tmp_path), MARKER))
        last.wait(lambda: bool(session_names(pg, "pgcdc:%:changes")))
    with pg.cursor() as cursor:
        cursor.execute("INSERT INTO journal VALUES (0, %s)", (MARKER,))
    last.wait((tmp_path / "done").exists)
    expect_nothing_left(pg)
    drivers.give_back(last)
    replica = Replica()
    for rows in read_batches(tmp_path):
        replica.apply(rows)
    for table in TABLES:
        assert replica.rows(table) == rows_of(pg, table), f"killed after {seconds} s"
