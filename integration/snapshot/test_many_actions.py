"""Many actions at once: they share snapshots, wait in line for sessions, and leave the server to others."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
from databases import connect
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from roles import conninfo, role
from servers import second_server
from watch import holders, session_names, wait_until

from pg_cdc_source.errors import ServerFullError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres.connection import connect as open_session
from pg_cdc_source.postgres.snapshots import _said
from pg_cdc_source.snapshot import connections
from pg_cdc_source.snapshot.lingering import Lingering
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import ScanRange, make_plan
from pg_cdc_source.snapshot.source import plan_load, plan_ranges
from pg_cdc_source.spark.open_snapshot import open_snapshot
from pg_cdc_source.spark.pgsnapshot import PgSnapshotReader

THREADS = 20
COUNTS = 2


class Watch:
    """What others see of a server meanwhile: our sessions when there were most, and who was not let in."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()
        self.let_in = 0
        self.refused: list[str] = []


@contextmanager
def watched(superuser: str, other: str) -> Iterator[Watch]:
    """Look at our sessions, and connect as somebody else, again and again until the block ends."""
    watch, ended = Watch(), threading.Event()

    def look() -> None:
        with connect(superuser) as session, session.cursor() as cursor:
            while not ended.wait(0.02):
                cursor.execute(
                    "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pgsnapshot:%'"
                )
                watch.most = max(watch.most, Counter(name for (name,) in cursor), key=Counter.total)

    def visit() -> None:
        while not ended.wait(0.05):
            try:
                psycopg2.connect(other).close()
                watch.let_in += 1
            except psycopg2.Error as error:
                watch.refused.append(str(error))

    threads = [threading.Thread(target=target) for target in (look, visit)]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_many_actions_leave_a_small_server_to_others(spark: SparkSession) -> None:
    with second_server({"max_connections": "30"}) as url, connect(url) as pg, role(pg, url) as other:

        def run(statement: str) -> None:
            with pg.cursor() as cursor:
                cursor.execute(statement)

        def counts(number: int) -> list[int]:
            run(f"CREATE TABLE t{number} AS SELECT generate_series(1, {number}) AS id")
            found = []
            for _ in range(COUNTS):
                # What is committed before an action begins belongs to it, whoever shares its snapshot.
                run(f"INSERT INTO t{number} VALUES (0)")
                found.append(load(spark, url, dbtable=f"t{number}").count())
            return found

        with watched(url, conninfo(other)) as watch, ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(counts, range(THREADS)))
    assert found == [[number + 1, number + 2] for number in range(THREADS)]
    assert watch.refused == []
    assert watch.let_in > 20
    assert watch.most.total() <= 12, watch.most


# --- without Spark ---------------------------------------------------------------------------------------------------


def run(pg: Session, *statements: str) -> list[Any]:
    with pg.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return [] if cursor.description is None else cursor.fetchall()


@pytest.mark.usefixtures("own_driver")
def test_executions_that_wait_share_a_snapshot_taken_after_each_began(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", "CREATE TABLE other (id int)")
    options = parse_snapshot_options({"url": db, "dbtable": "t", "slotTimeout": "60s", "consistentPoint": "require"})
    plan = make_plan(options)
    source, [part] = plan_ranges(plan, options)

    def rows(execution: int) -> int:
        return sum(batch.num_rows for batch in read_range(plan, source, part, str(execution)))

    with connect(db) as writer, ThreadPoolExecutor(10) as pool:
        # The first one's slot waits for this transaction, the others wait for the keeper to be done with that.
        run(writer, "BEGIN", "INSERT INTO other VALUES (1)")
        first = pool.submit(rows, 1)
        wait_until(lambda: session_names(pg, "pgsnapshot:making", "backend_type = 'walsender'"))
        run(pg, "INSERT INTO t VALUES (2)")
        others = [pool.submit(rows, execution) for execution in range(2, 11)]
        # They look for the snapshot once they have asked for it.
        wait_until(lambda: len(session_names(pg, "pgsnapshot:%?%", "query LIKE '%%announced AS%%'")) == 10)
        run(writer, "COMMIT")
        assert [other.result(60) for other in others] == [2] * 9
        assert first.result(60) in (1, 2)
        # The snapshots that are there are of no use to who begins later.
        run(pg, "INSERT INTO t VALUES (3)")
        assert rows(11) == 3
        snapshots = {name.split(":")[2] for name in holders(pg)}
    assert len(snapshots) == 3


@pytest.mark.usefixtures("own_driver")
def test_executions_have_snapshots_of_their_own_in_one_session(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int)")
    options = parse_snapshot_options({"url": db, "dbtable": "t", "maxConnections": "4"})
    plan = make_plan(options)
    source, [part] = plan_ranges(plan, options)

    def rows(execution: int) -> int:
        return sum(batch.num_rows for batch in read_range(plan, source, part, str(execution)))

    for execution in range(1, 11):
        run(pg, f"INSERT INTO t VALUES ({execution})")
        assert rows(execution) == execution
    # Each goes on seeing what it saw.
    assert [rows(execution) for execution in range(1, 11)] == list(range(1, 11))
    assert len(holders(pg)) == 1


@pytest.mark.usefixtures("own_driver")
def test_what_is_read_for_longer_outlives_the_pool(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT generate_series(1, 100000) AS id")
    plan = make_plan(options := parse_snapshot_options({"url": db, "dbtable": "t"}))
    source, [part] = plan_ranges(plan, options)
    reading = read_range(plan, source, part, "1")
    first = next(iter(reading))
    run(pg, "INSERT INTO t VALUES (0)")
    [pool] = holders(pg)
    # Two of its own, and the pool is let go.
    wait_until(lambda: pool not in (own := holders(pg)) and len(own) == 2)
    rest = [read_range(plan, source, part, "1") for _ in range(2)]
    assert first.num_rows + sum(batch.num_rows for batch in reading) == 100_000
    assert [sum(batch.num_rows for batch in batches) for batches in rest] == [100_000] * 2


class Planners:
    """Two processes, as Spark has them for ``load()`` and for the ranges of its action, and the sessions they open."""

    def __init__(self, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._options = parse_snapshot_options(options)
        self._monkeypatch = monkeypatch
        self._kept = [Lingering(600.0, connections.Planning.close) for _ in range(2)]
        self._opened = 0
        monkeypatch.setattr(connections, "connect", self._connect)

    def _connect(self, *args: Any, **kwargs: Any) -> Session:
        self._opened += 1
        return open_session(*args, **kwargs)

    def load_and_plan(self, after_seconds: float = 0.0) -> tuple[list[ScanRange], int]:
        """The ranges, and how many sessions were opened for them."""
        self._opened = 0
        self._monkeypatch.setattr(connections, "_KEPT", self._kept[0])
        plan, planned = plan_load(self._options)
        if planned is not None:
            planned = replace(planned, at=planned.at - after_seconds)
        self._monkeypatch.setattr(connections, "_KEPT", self._kept[1])
        _, ranges = plan_ranges(plan, self._options, planned)
        return ranges, self._opened

    def close(self) -> None:
        for kept in self._kept:
            if (planning := kept.take()) is not None:
                planning.close()


@pytest.fixture
def planners(own_driver: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Planners]]:
    """``planners(option=...)``; what they have kept is closed."""
    made = []

    def make(**options: str) -> Planners:
        made.append(Planners(options, monkeypatch))
        return made[-1]

    yield make
    for planners in made:
        planners.close()


def test_a_load_that_is_acted_on_at_once_is_planned_in_one_session(
    db: str, pg: Session, planners: Callable[..., Planners]
) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", "CREATE TABLE p (id int) PARTITION BY LIST (id)")
    # Four are too few to keep one.
    of = planners(url=db, dbtable="t", maxConnections="4")
    ranges, with_a_new_keeper = of.load_and_plan()
    assert with_a_new_keeper == 2
    assert of.load_and_plan() == (ranges, 1)
    assert of.load_and_plan(after_seconds=3.0) == (ranges, 2)
    # Tasks get their own ranges alone.
    plan, planned = plan_load(options := parse_snapshot_options({"url": db, "dbtable": "t"}))
    assert planned is not None
    assert PgSnapshotReader(plan, options, planned).__getstate__()["_planned"] is None
    # There may be more partitions by the time of the action.
    options = parse_snapshot_options({"url": db, "dbtable": "p"})
    assert plan_load(options)[1] is None


def test_a_session_of_planning_is_kept_for_the_next_load(
    db: str, pg: Session, planners: Callable[..., Planners]
) -> None:
    run(pg, "CREATE TABLE t (id int)")
    of = planners(url=db, dbtable="t")
    assert of.load_and_plan()[1] == 2
    assert [of.load_and_plan(after_seconds=3.0)[1] for _ in range(3)] == [0, 0, 0]
    # It waits without a transaction, a lock, or an old view of the catalog.
    ((state, snapshot),) = run(
        pg,
        "SELECT DISTINCT state, backend_xmin::text FROM pg_stat_activity"
        " WHERE application_name = 'pgsnapshot:planning'",
    )
    assert (state, snapshot) == ("idle", None)
    run(pg, "DROP TABLE t", "CREATE TABLE t (id int, more text)")
    ranges, opened = of.load_and_plan(after_seconds=3.0)
    assert (len(ranges[0].pieces[0].attnums), opened) == (2, 0)
    # One that was lost is noticed before anything is planned in it.
    run(pg, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgsnapshot:planning'")
    assert of.load_and_plan(after_seconds=3.0) == (ranges, 2)


def test_a_session_in_which_the_users_sql_was_planned_is_not_kept(
    db: str, pg: Session, planners: Callable[..., Planners]
) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", "CREATE VIEW v AS TABLE t")
    for of in (
        planners(url=db, dbtable="t", where="id > 0"),
        planners(url=db, query="SELECT * FROM t"),
        planners(url=db, dbtable="v"),
    ):
        of.load_and_plan()
        # The server may still be ending one; one that is kept would stay for longer than this waits.
        wait_until(lambda: not session_names(pg, "pgsnapshot:planning"))


@pytest.mark.usefixtures("own_driver")
@pytest.mark.parametrize(("where", "same"), [(None, True), ("id > 0", False)])
def test_a_task_takes_over_the_session_of_another_scans(where: str | None, same: bool, db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", "CREATE TABLE u AS SELECT 1 AS id")

    def session_after_reading(table: str, execution: str) -> tuple[int, str]:
        given = {"url": db, "dbtable": table} | ({} if where is None else {"where": where})
        plan = make_plan(options := parse_snapshot_options(given))
        source, [part] = plan_ranges(plan, options)
        assert [batch.num_rows for batch in read_range(plan, source, part, execution)] == [1]
        ((pid, name),) = run(pg, "SELECT pid, application_name FROM pg_stat_activity WHERE application_name ~ '[?]'")
        return pid, name

    (first, first_name), (second, second_name) = session_after_reading("t", "1"), session_after_reading("u", "2")
    assert (first == second) is same
    # The keeper goes by the names.
    assert (first_name.split(":")[2].split("?")[0], second_name.split(":")[2].split("?")[0]) == ("1", "2")


@pytest.mark.parametrize("wants", [{"lsnColumn": "lsn"}, {"consistentPoint": "require"}])
def test_an_action_has_an_lsn_where_only_one_of_its_scans_wants_it(
    wants: dict[str, str], spark: SparkSession, db: str, pg: Session
) -> None:
    run(pg, "CREATE TABLE t AS SELECT generate_series(1, 3) AS id")
    silent = load(spark, db, dbtable="t")
    assert silent.count() == 3
    wanting = load(spark, db, dbtable="t", **wants)
    # The first scan of the action asks for the snapshot of both.
    rows = silent.join(wanting, "id").collect()
    assert len(rows) == 3
    assert "lsnColumn" not in wants or len({row.lsn for row in rows} - {None}) == 1


def test_a_full_server_is_waited_for(
    db: str, pg: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    with role(pg, db) as login:
        run(pg, f"GRANT SELECT ON t TO {login['user']}", f"ALTER ROLE {login['user']} CONNECTION LIMIT 0")
        options = parse_snapshot_options({"url": conninfo(login), "dbtable": "t"})
        with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
            planned = pool.submit(make_plan, options)
            wait_until(lambda: caplog.messages)
            run(pg, f"ALTER ROLE {login['user']} CONNECTION LIMIT -1")
            assert [column.name for column in planned.result(60).columns] == ["id"]
        [message] = caplog.messages
        assert "too many connections" in message
        assert message.endswith("waiting for a connection, at most 60 s")

        run(pg, f"ALTER ROLE {login['user']} CONNECTION LIMIT 0")
        monkeypatch.setattr(connections, "FULL_SECONDS", 1.0)
        with pytest.raises(ServerFullError, match="after 1 s of waiting for a connection") as full:
            make_plan(options)
        assert "let fewer tasks read at a time" in full.value.remedy


def test_planning_waits_in_line(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id")
    options = parse_snapshot_options({"url": db, "dbtable": "t"})
    most = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, len(session_names(pg, "pgsnapshot:planning")))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            plans = list(pool.map(lambda _: make_plan(options), range(40)))
    finally:
        ended.set()
        looking.join()
    assert len(plans) == 40
    # A session may still be ending on the server while the next one begins.
    assert 1 <= most <= 4


def test_a_snapshot_does_without_a_slot_where_slots_are_short_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _said.clear()
    with second_server({"max_wal_senders": "0"}) as url, caplog.at_level(logging.WARNING):
        for _ in range(2):
            with open_snapshot(url) as snapshot:
                assert snapshot.lsn is None
    [message] = caplog.messages
    assert message.startswith("snapshots have no LSN while this lasts, which is said once (consistentPoint=auto): ")
    assert "max_wal_senders" in message
