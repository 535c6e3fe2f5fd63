"""Hot standbys: reading from them, streaming from them, and promoting one under a stream."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from databases import connect
from driving import Driver, run, values
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from refusals import refusal
from roles import conninfo, role
from servers import second_server
from standby import PHYSICAL_SLOT, Standby, standby_of
from watch import keeper_sessions, readers, slots, wait_until

from pg_cdc_source.errors import OptionError, ServerSetupError, SlotLostError, SnapshotLostError, TransientError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.postgres import exported_snapshots, snapshots, standby_snapshots
from pg_cdc_source.postgres.instances import read_instance
from pg_cdc_source.postgres.minor_versions import INCOMPLETE_EXPORT
from pg_cdc_source.snapshot import reader, receiving
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import GivenSnapshot, plan_ranges
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.spark.open_snapshot import OpenSnapshot, open_snapshot

Drive = Callable[..., Driver]
# The versions that brought scans of ranges, slots on standbys, and copies of slots.
RANGES, STREAMS, FAILOVER = 140000, 160000, 170000


@dataclass(frozen=True)
class Pair:
    """A primary and its standby."""

    primary: str
    standby: Standby
    version: int

    def write(self, *statements: str) -> None:
        """Run statements on the primary and wait until the standby has them."""
        with connect(self.primary) as session:
            run(session, *statements)
        self.standby.catch_up(self.primary)

    @contextlib.contextmanager
    def in_transaction(self) -> Iterator[None]:
        """Have a transaction run on the primary: else its log, every 15 s, might be what a slot waits for."""
        with connect(self.primary) as session:
            run(session, "BEGIN; SELECT txid_current()")
            yield

    @contextlib.contextmanager
    def logging_transactions(self) -> Iterator[None]:
        """Have the primary log again and again what a slot on the standby waits for."""
        stop = threading.Event()

        def log() -> None:
            with connect(self.primary) as session:
                while not stop.wait(0.1):
                    run(session, "SELECT pg_log_standby_snapshot()")

        thread = threading.Thread(target=log)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def paired(**settings: str) -> Iterator[Pair]:
    # Else the standby's idle slots would be lost to VACUUM on the primary; and conflicts strike at once.
    on_standby = {"hot_standby_feedback": "on", "max_standby_streaming_delay": "0", **settings}
    with second_server({}) as url, standby_of(url, on_standby) as standby, connect(url) as session:
        run(session, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
        standby.catch_up(url)
        yield Pair(url, standby, session.server_version)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with paired() as pair:
        yield pair


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """``drive(url, …)`` starts a stream of the table t."""
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    with contextlib.ExitStack() as stack:

        def drive(url: str, **options: str) -> Driver:
            driver = Driver(url, dbtable="t", **options)
            stack.callback(driver.stop)
            return driver.start()

        yield drive


# --- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix("snapshot of a standby")
def test_all_scans_of_an_action_see_one_snapshot_of_a_standby(spark: SparkSession, pair: Pair) -> None:
    pair.write("CREATE TABLE growing AS SELECT i AS id FROM generate_series(1, 20000) AS i")
    stop = threading.Event()

    def grow() -> None:
        with connect(pair.primary) as session:
            while not stop.wait(0.002):
                run(session, "INSERT INTO growing VALUES (0)")

    grower = threading.Thread(target=grow)
    grower.start()
    try:
        with connect(pair.standby.url) as session:
            wait_until(lambda: run(session, "SELECT count(*) > 20000 FROM growing") == [(True,)])
        for _ in range(2):
            left = load(spark, pair.standby.url, dbtable="growing", numPartitions=4)
            right = load(spark, pair.standby.url, dbtable="growing", numPartitions=2, lsnColumn="lsn")
            both = left.selectExpr("count(*) AS l").crossJoin(right.selectExpr("count(*) AS r", "max(lsn) AS lsn"))
            (row,) = both.collect()
            assert row.l == row.r > 20000
            # Knowing it would mean to wait for the primary.
            assert row.lsn is None
    finally:
        stop.set()
        grower.join()
    with connect(pair.standby.url) as session:
        assert len(keeper_sessions(session)) == 1


@contextlib.contextmanager
def with_many_subtransactions(primary: str) -> Iterator[Session]:
    """A transaction on the primary with more subtransactions than a standby keeps track of."""
    with connect(primary) as many:
        run(many, "BEGIN", *("SAVEPOINT s; INSERT INTO many VALUES (1); RELEASE s" for _ in range(70)))
        yield many
        run(many, "ROLLBACK")


def test_a_standby_that_leaves_out_running_transactions_is_not_read(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who imports its snapshot would see rows of two points, and break the standby's pages for everybody."""
    with connect(pair.primary) as admin, role(admin, pair.standby.url) as poor:
        pair.write("CREATE TABLE many (id int)", "CREATE TABLE few AS SELECT 1 AS id")
        with connect(pair.primary) as other, with_many_subtransactions(pair.primary):
            run(other, "BEGIN", "UPDATE few SET id = 2")
            # So that those which run are not behind the end of a snapshot.
            pair.write("INSERT INTO many VALUES (2)")
            with connect(pair.standby.url) as session:
                run(session, "BEGIN ISOLATION LEVEL REPEATABLE READ")
                [(given,)] = run(session, "SELECT pg_export_snapshot()")
                if INCOMPLETE_EXPORT.is_in(session.server_version):
                    with pytest.raises(TransientError, match="more than 64 subtransactions"):
                        exported_snapshots.export_snapshot(session)
                    with connect(pair.standby.url) as reading:
                        source = GivenSnapshot(given, read_instance(reading))
                        with pytest.raises(TransientError, match="more than 64 subtransactions"):
                            source.import_into(reading, "test", "reading t")
                else:
                    exported_snapshots.export_snapshot(session)
                run(session, "ROLLBACK")
                with pytest.raises(SnapshotLostError, match=f"snapshot {given} has ended"):
                    standby_snapshots.require_complete(session, given)
            monkeypatch.setattr(standby_snapshots, "_has_said", False)
            with connect(conninfo(poor)) as session:
                for _ in range(2):
                    run(session, "BEGIN ISOLATION LEVEL REPEATABLE READ")
                    exported_snapshots.export_snapshot(session)
                    run(session, "ROLLBACK")
                is_said = "may export snapshots that lack transactions" in caplog.text
                assert is_said == INCOMPLETE_EXPORT.is_in(session.server_version)
                assert caplog.text.count("may export snapshots that lack transactions") <= 1
            run(other, "ROLLBACK")
    pair.standby.catch_up(pair.primary)
    with connect(pair.standby.url) as session:
        run(session, "BEGIN ISOLATION LEVEL REPEATABLE READ")
        assert exported_snapshots.export_snapshot(session)
    pair.write("DROP TABLE many, few")


def test_sessions_that_would_be_serializable_read_a_standby(pair: Pair) -> None:
    with connect(pair.primary) as session, role(session, pair.standby.url) as login:
        user = login["user"]
        run(
            session,
            f"GRANT SELECT ON t TO {user}",
            f"ALTER ROLE {user} SET default_transaction_isolation = serializable",
        )
        pair.standby.catch_up(pair.primary)
        make_plan(parse_snapshot_options({"url": conninfo(login), "dbtable": "t"}))


def test_a_conflict_with_recovery_fails_the_action_and_not_the_next_one(spark: SparkSession, pair: Pair) -> None:
    pair.write("CREATE TABLE truncated AS SELECT i AS id FROM generate_series(1, 20000) AS i")
    slow = load(spark, pair.standby.url, dbtable="truncated", numPartitions=2, where="pg_sleep(0.001) IS NOT NULL")
    with connect(pair.standby.url) as session:

        def conflict() -> None:
            wait_until(lambda: readers(session), 120)
            pair.write("TRUNCATE truncated", "INSERT INTO truncated VALUES (1)")

        truncating = threading.Thread(target=conflict)
        truncating.start()
        refusal(slow.count, "Remedy: run the action again: it takes a new snapshot")
        truncating.join()
    assert load(spark, pair.standby.url, dbtable="truncated").collect() == [(1,)]


def test_each_action_on_a_standby_has_what_its_own_options_say(spark: SparkSession, pair: Pair) -> None:
    def lsns(point: str) -> set[int | None]:
        df = load(spark, pair.standby.url, dbtable="t", lsnColumn="lsn", consistentPoint=point, slotTimeout="30s")
        return {row.lsn for row in df.collect()}

    if pair.version < STREAMS:
        assert lsns("auto") == {None}
        return
    with pair.logging_transactions():
        assert lsns("auto") == {None}
        assert None not in lsns("require")
        assert lsns("auto") == {None}


@contextlib.contextmanager
def removing_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A pair with the table ``quiet``, whose standby removes rows under snapshots; readers come when it has done so."""
    with paired(hot_standby_feedback="off", max_standby_streaming_delay="3s") as pair:
        pair.write("CREATE TABLE quiet AS SELECT i AS id FROM generate_series(1, 10) AS i")
        received = receiving.receive

        def receive_late(*arguments: Any) -> Iterator[receiving.Decoded]:
            pair.standby.catch_up(pair.primary)
            yield from received(*arguments)

        monkeypatch.setattr(reader, "receive", receive_late)
        yield pair


def begin_to_remove(pair: Pair) -> None:
    """Have the standby wait for those that have a snapshot now, to remove a row that they see."""
    with connect(pair.primary) as primary, connect(pair.standby.url) as session:
        run(primary, "DELETE FROM quiet WHERE id = 5", "VACUUM quiet")
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event LIKE 'RecoveryConflict%%'"
        wait_until(lambda: run(session, waits) == [(1,)])


def expect_missed(opened: OpenSnapshot, planned: Callable[[], object]) -> None:
    options = parse_snapshot_options({**opened.options, "dbtable": "quiet"})
    plan = make_plan(options)
    source, [scan_range] = plan_ranges(plan, options)
    planned()
    with pytest.raises(SnapshotLostError, match="may have removed rows that it sees"):
        list(read_range(plan, source, scan_range, "test"))


def test_rows_that_a_standby_removes_under_a_late_reader_are_missed_by_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standby ends the transactions that have the snapshot when it begins to wait for them, and no later one."""
    with removing_rows(monkeypatch) as pair:
        if pair.version < RANGES:
            return
        with open_snapshot(pair.standby.url) as opened:
            expect_missed(opened, lambda: begin_to_remove(pair))


def test_rows_that_a_standby_removes_while_a_slot_gives_up_its_snapshot_are_missed_by_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever takes over the snapshot does so when the standby has begun to wait for those that have it."""
    with removing_rows(monkeypatch) as pair:
        if pair.version < STREAMS:
            return
        exported = exported_snapshots.export_snapshot

        def export_and_remove(exporter: Session, **options: bool) -> str:
            monkeypatch.setattr(snapshots, "export_snapshot", exported)
            snapshot_id = exported(exporter, **options)
            begin_to_remove(pair)
            return snapshot_id

        monkeypatch.setattr(snapshots, "export_snapshot", export_and_remove)
        with pair.logging_transactions(), open_snapshot(pair.standby.url, consistentPoint="require") as opened:
            expect_missed(opened, lambda: None)


def test_a_stage_on_a_standby_never_reads_a_second_snapshot(spark: SparkSession, pair: Pair) -> None:
    if pair.version < RANGES:
        pytest.skip("a table that is not cut is not read on in another session")
    pair.write("CREATE TABLE staged AS SELECT i AS id FROM generate_series(1, 20000) AS i")
    slow = load(spark, pair.standby.url, dbtable="staged", numPartitions=4, where="pg_sleep(0.0005) IS NOT NULL")
    with connect(pair.standby.url) as session:

        def lose_the_snapshot() -> None:
            wait_until(lambda: readers(session), 120)
            pair.write("INSERT INTO staged VALUES (0)")
            run(
                session,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^pgsnapshot:.*[:?]'",
            )

        losing = threading.Thread(target=lose_the_snapshot)
        losing.start()
        refusal(slow.rdd.collect, "PostgreSQL ended all sessions that held it")
        losing.join()
    assert load(spark, pair.standby.url, dbtable="staged").rdd.count() == 20001


def test_a_consistent_point_on_a_standby(pair: Pair) -> None:
    """From 16 on, if the primary says in time which transactions run."""
    with contextlib.ExitStack() as stack:

        def held(**options: str) -> OpenSnapshot:
            return stack.enter_context(open_snapshot(pair.standby.url, tables=["t"], **options))

        began = time.monotonic()
        assert held(slotTimeout="30s").lsn is None
        assert time.monotonic() - began < 15
        if pair.version < STREAMS:
            with pytest.raises(ServerSetupError, match="on a standby needs PostgreSQL 16 or later"):
                held(consistentPoint="require")
            return
        text = r"within 0.5 s, because on a standby .*\n.*pg_log_standby_snapshot\(\)"
        with pair.in_transaction(), pytest.raises(TransientError, match=text):
            held(consistentPoint="require", slotTimeout="500ms")
        with pair.logging_transactions():
            assert held(consistentPoint="require").lsn is not None


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.matrix("stream from a standby", since="PostgreSQL 16")
def test_a_stream_from_a_standby(pair: Pair, drive: Drive) -> None:
    """From 16 on: its publication is made on the primary, its slot on the standby."""
    if pair.version < STREAMS:
        drive(pair.standby.url).refusal("on a standby needs PostgreSQL 16 or later", kind=ServerSetupError)
        return
    driver = drive(pair.standby.url)
    text = driver.refusal("publication s does not exist, and a standby cannot create it", kind=ServerSetupError)
    assert "Remedy: on the primary, as the tables' owner: CREATE PUBLICATION" in text
    pair.write(text.split("owner: ")[1])
    with pair.in_transaction():
        driver.restart(slotTimeout="500ms").refusal("pg_log_standby_snapshot()", kind=TransientError)
    driver.restart(slotTimeout="60s")
    with pair.logging_transactions():
        assert values(driver.take(1), "_change_type", "id", "v") == [("snapshot", 1, "a")]
        pair.write("INSERT INTO t VALUES (2, 'b')", "UPDATE t SET v = 'B' WHERE id = 2")
        assert values(driver.take(2), "_change_type", "id", "v") == [("insert", 2, "b"), ("update", 2, "B")]
    driver.restart()
    pair.write("DELETE FROM t WHERE id = 2")
    assert values(driver.take(1), "_change_type", "id") == [("delete", 2)]
    says = "from PostgreSQL 17 on" if pair.version < FAILOVER else "a standby makes no slots"
    driver.restart(failover="true").refusal(says, kind=ServerSetupError)
    driver.restart(failover="false")
    # VACUUM on the primary takes away what the slot needs to know of the catalog.
    with connect(pair.standby.url) as session:
        run(session, "ALTER SYSTEM SET hot_standby_feedback = off", "SELECT pg_reload_conf()")
    with connect(pair.primary) as session:
        wait_until(
            lambda: (
                run(session, f"SELECT xmin IS NULL FROM pg_replication_slots WHERE slot_name = '{PHYSICAL_SLOT}'")
                == [(True,)]
            )
        )
        run(session, "CREATE TABLE dropped ()", "DROP TABLE dropped", "VACUUM pg_class")
    pair.standby.catch_up(pair.primary)
    driver.refusal("given up by the server", kind=SlotLostError)


def test_a_stream_goes_on_when_its_standby_is_promoted(drive: Drive) -> None:
    with paired() as pair:
        if pair.version < STREAMS:
            return
        pair.write("CREATE PUBLICATION s FOR TABLE t", "CREATE PUBLICATION stopped FOR TABLE t")
        with pair.logging_transactions():
            running, stopped = (drive(pair.standby.url, slot=slot) for slot in ("s", "stopped"))
            for driver in (running, stopped):
                driver.take(1)
            pair.write("INSERT INTO t VALUES (2, 'b')")
            for driver in (running, stopped):
                driver.take(1)
        stopped.stop()
        pair.write("INSERT INTO t VALUES (3, 'c')")
        pair.standby.promote()
        with connect(pair.standby.url) as session:
            run(session, "INSERT INTO t VALUES (4, 'd')")
        stopped.start()
        for driver in (running, stopped):
            assert values(driver.take(2), "id", "v") == [(3, "c"), (4, "d")]
            assert driver.offset.identity.timeline == 2


@pytest.mark.matrix("failover slots", since="PostgreSQL 17")
def test_failover(drive: Drive, db: str, pg: Session) -> None:
    """From 17 on a standby's copy of the slot goes on from what it has seen, and from nothing else."""
    if pg.server_version < FAILOVER:
        run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)")
        drive(db, failover="true").refusal("from PostgreSQL 17 on", kind=ServerSetupError)
        assert slots(pg) == []
        return
    with paired() as pair, connect(pair.primary) as primary, connect(pair.standby.url) as standby:
        url = pair.standby.url
        names = ("s", "stopped", "ahead")
        first, stopped, ahead = (drive(pair.primary, slot=slot, failover="true") for slot in names)
        plain = drive(pair.primary, slot="plain")
        for driver in (first, stopped, ahead, plain):
            driver.take(1)
        ids = itertools.count(2)

        def write() -> None:
            run(primary, f"INSERT INTO t VALUES ({next(ids)}, 'x')")

        def synchronized() -> bool:
            # A copy is made once the slot needs nothing from before it was begun, so the slots have to move on.
            write()
            run(primary, "SELECT pg_log_standby_snapshot()")
            for driver in (first, stopped, ahead):
                driver.take(1)
            pair.standby.catch_up(pair.primary)
            return run(standby, "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary") == [(3,)]

        run(standby, "ALTER SYSTEM SET sync_replication_slots = on", "SELECT pg_reload_conf()")
        wait_until(synchronized, 120)
        drive(url, slot="stopped").refusal("is this standby's copy of its primary's slot", kind=OptionError)
        plain.restart(failover="true").refusal("slot plain was made without failover", kind=OptionError)
        stopped.stop()
        write()
        for driver in (first, ahead):
            driver.take(1)
        pair.standby.catch_up(pair.primary)
        # The primary dies, and one stream has had of it what its standby has not.
        run(standby, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
        wait_until(lambda: run(standby, "SELECT count(*) FROM pg_stat_wal_receiver") == [(0,)])
        first.stop()
        write()
        ahead.take(1)
        pair.standby.promote()
        run(standby, "INSERT INTO t VALUES (0, 'on the new primary')")
        first.start(url=url)
        assert values(first.take(1), "id") == [(0,)]
        stopped.start(url=url)
        assert values(stopped.take(2), "id") == [(next(ids) - 2,), (0,)]
        ahead.restart(url=url)
        ahead.refusal("promoted or restored and left timeline 1 at ", "synchronized_standby_slots", kind=SlotLostError)
        plain.restart(url=url, failover="false").refusal("slot plain does not exist any more", kind=SlotLostError)
        # Nor does the new primary's stream go back to the old one.
        first.restart(url=pair.primary).refusal("timeline 1 instead of 2", kind=SlotLostError)
