"""Whatever would make a stream lose changes is an error that says so, what it is about, and what to do."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest
from databases import connect
from driving import Driver, driving, prepare, querying, run, values
from losses import RestartableServer
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from psycopg2.extras import LogicalReplicationConnection
from pyspark.sql import SparkSession
from roles import conninfo, role
from servers import second_server
from watch import wait_until

from pg_cdc_source.errors import (
    ConnectError,
    DefiniteError,
    PgCdcError,
    ServerSetupError,
    SlotLostError,
    TransientError,
)
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.spark import pgcdc
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.stream import next_offset
from pg_cdc_source.stream.tables import slot_history

Drive = Callable[..., Driver]
THERE = "FROM pg_replication_slots WHERE slot_name = 's'"


@pytest.fixture
def table(pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")


pytestmark = pytest.mark.usefixtures("table")


def begun(drive: Drive, **options: str) -> Driver:
    """A stream that has read the table and a change, and stands still."""
    driver = drive(dbtable="t", **options)
    driver.take(1)
    return driver


def released(pg: Session) -> None:
    wait_until(lambda: run(pg, f"SELECT 1 {THERE} AND NOT active"))


def while_lost(pg: Session, *statements: str) -> None:
    """Run statements while the reader's session is lost and it has not come back."""

    def done() -> bool:
        run(pg, f"SELECT pg_terminate_backend(active_pid) {THERE} AND active")
        try:
            run(pg, *statements)
        except psycopg2.errors.ObjectInUse:
            return False
        return True

    wait_until(lambda: run(pg, f"SELECT 1 {THERE} AND active"))
    wait_until(done)


# --- the slot --------------------------------------------------------------------------------------------------------


def test_a_slot_that_is_gone_at_the_start(pg: Session, drive: Drive) -> None:
    driver = begun(drive)
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    driver.take(1)
    driver.stop()
    released(pg)
    run(pg, "SELECT pg_drop_replication_slot('s')", "INSERT INTO t VALUES (3, 'c')")
    for _ in range(2):
        driver.restart()
        driver.refusal("slot s does not exist any more", "new checkpoint location", kind=SlotLostError)
        # Nothing is made in its place, which would hold WAL for nobody.
        assert run(pg, f"SELECT count(*) {THERE}") == [(0,)]


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made anew"])
def test_a_slot_that_is_dropped_while_the_query_runs(again: bool, pg: Session, drive: Drive) -> None:
    driver = begun(drive)
    if again:
        # At once: who looks between the two finds none.
        anew = "SELECT pg_drop_replication_slot('s'), pg_create_logical_replication_slot('s', 'pgoutput')"
        while_lost(pg, "INSERT INTO t SELECT max(id) + 1 FROM t", anew)
        driver.refusal("past the end of the checkpoint", kind=SlotLostError, rows=None)
    else:
        while_lost(pg, "SELECT pg_drop_replication_slot('s')")
        driver.refusal("slot s does not exist any more", kind=SlotLostError)


@pytest.mark.matrix("loss is an error")
def test_a_slot_that_was_read_by_somebody_else(pg: Session, drive: Drive) -> None:
    driver = begun(drive)
    driver.stop()
    released(pg)
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    ((read,),) = run(pg, "SELECT end_lsn::text FROM pg_replication_slot_advance('s', pg_current_wal_lsn())")
    driver.start()
    end = Lsn(driver.offset.position.next_lsn)
    driver.refusal(f"slot s stands at {read}, past the end of the checkpoint at {end}", kind=SlotLostError)


def test_a_slot_that_somebody_else_reads_while_the_session_is_lost(pg: Session, drive: Drive) -> None:
    driver = begun(drive)
    insert = "INSERT INTO t SELECT max(id) + 1 FROM t"
    while_lost(pg, insert, "SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())")
    driver.refusal("slot s stands at ", "past the end of the checkpoint", kind=SlotLostError, rows=None)


def test_a_database_that_is_renamed_is_the_same_one(
    server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    names = [f"{name}_{secrets.token_hex(4)}" for name in ("shop", "shop_now")]
    before, now = (make_dsn(**{**parse_dsn(server), "dbname": name}) for name in names)
    prepare(monkeypatch)
    driver = Driver(before, dbtable="t")
    with connect(server) as admin:
        run(admin, f"CREATE DATABASE {names[0]}")
        try:
            with connect(before) as pg:
                run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
            driver.start().take(1)
            driver.stop()
            wait_until(lambda: not run(admin, f"SELECT FROM pg_stat_activity WHERE datname = '{names[0]}'"))
            run(admin, f"ALTER DATABASE {names[0]} RENAME TO {names[1]}")
            with connect(now) as pg:
                run(pg, "INSERT INTO t VALUES (2, 'b')")
            for key in (2, 3):
                driver.restart(url=now)
                assert values(driver.take(1), "id") == [(key,)]
                with connect(now) as pg:
                    run(pg, f"INSERT INTO t VALUES ({key + 1}, 'c')")
            assert driver.offset.identity.database == names[1]
            assert caplog.text.count(f"database {names[0]} is called {names[1]} now") >= 1
        finally:
            driver.stop()
            wait_until(lambda: not run(admin, f"SELECT 1 {THERE} AND active"))
            run(admin, f"SELECT pg_drop_replication_slot(slot_name) {THERE}")
            for name in names:
                run(admin, f"DROP DATABASE IF EXISTS {name}")


@pytest.mark.parametrize("option", ["database", "slot"])
def test_a_checkpoint_of_another_place(option: str, server: str, pg: Session, drive: Drive) -> None:
    driver = begun(drive)
    other = f"other_{secrets.token_hex(4)}"
    if option == "slot":
        run(pg, f"SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')")
        driver.restart(slot=other, publication="s")
        driver.refusal(
            "the checkpoint was made with another server or slot", f"slot '{other}' instead of 's'", kind=SlotLostError
        )
        return
    with connect(server) as admin:
        run(admin, f"CREATE DATABASE {other} TEMPLATE template0")
        try:
            url = make_dsn(**{**parse_dsn(driver.options["url"]), "dbname": other})
            with connect(url) as session:
                run(session, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION s FOR TABLE t")
            driver.restart(url=url)
            # Its slot is the other database's, which some Sparks learn before they tell of the checkpoint.
            driver.refusal(f"'{other}' instead of " if HAS_LIMITS else other, kind=PgCdcError)
        finally:
            driver.stop()
            run(admin, f"DROP DATABASE {other} WITH (FORCE)")


def test_a_slot_that_is_in_use(pg: Session, db: str, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    # How long it is asked for is counted in tests/stream/test_slot_history.py.
    monkeypatch.setattr(slot_history, "IN_USE", Backoff(0.2, attempts=4))
    first = begun(drive)
    first.batch()
    ((pid,),) = wait_until(lambda: run(pg, f"SELECT active_pid {THERE} AND active"))
    second = Driver(db, dbtable="t")
    second._committed = first._committed
    second.start()
    began = time.monotonic()
    try:
        text = second.refusal(
            f"slot s is in use by pid {pid} (application_name 'pgcdc:s:changes', from ", "connected for ", "s)",
            f"pg_terminate_backend({pid})", kind=TransientError)  # fmt: skip
    finally:
        second.stop()
    assert sum(slot_history.IN_USE.pauses()) < time.monotonic() - began < 15, text
    # The first one has not noticed; and when it ends, the second one goes on from there.
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    first.take(1)
    first.stop()
    second._committed = first._committed
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    second.restart()
    try:
        second.take(1)
    finally:
        second.stop()


@pytest.fixture
def _soon_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that somebody has is asked for twice; test_a_slot_that_is_in_use has that this goes on."""
    monkeypatch.setattr(slot_history, "IN_USE", Backoff(0.2, attempts=2))


def refused_a_slot(second: Driver, pid: int, session: str, kind: type[PgCdcError] = TransientError) -> None:
    """Run a second query on the slot: it names who has it, and does not say to drop what somebody reads."""
    second.start()
    try:
        text = second.refusal(
            f"in use by pid {pid} (application_name 'pgcdc:{session}', from ", "connected for ", kind=kind
        )
    finally:
        second.stop()
    assert "drop" not in text, text


@pytest.mark.usefixtures("_soon_refused")
@pytest.mark.parametrize("start_from", ["snapshot", "slot", "now"])
def test_a_new_query_on_a_slot_that_is_read(start_from: str, pg: Session, db: str, drive: Drive) -> None:
    first = begun(drive)
    first.batch()
    ((pid,),) = wait_until(lambda: run(pg, f"SELECT active_pid {THERE} AND active"))
    refused_a_slot(Driver(db, dbtable="t", startFrom=start_from), pid, "s:changes")
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    first.take(1)


@pytest.mark.usefixtures("_soon_refused")
@pytest.mark.parametrize(("slot", "shown"), [("s", "s"), ("s" * 63, "s" * 39 + "~4614ff0e")], ids=["short", "long"])
def test_a_new_query_on_a_slot_whose_tables_are_being_read(
    slot: str, shown: str, pg: Session, db: str, drive: Drive
) -> None:
    first = drive(dbtable="t", slot=slot, publication="s")
    rows = first.batch()
    # Nobody reads the slot yet.
    assert run(pg, f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'") == [(False,)]
    ((pid,),) = run(pg, f"SELECT pid FROM pg_stat_activity WHERE application_name = 'pgcdc:{shown}:snapshot'")
    refused_a_slot(Driver(db, dbtable="t", slot=slot, publication="s"), pid, f"{shown}:snapshot")
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    first.take(1)
    assert len(rows) == 1


@pytest.mark.skipif(not HAS_LIMITS, reason="without its start, a stream may go on from a checkpoint")
def test_what_is_published_since_the_slot_was_made_is_warned_of(
    pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, "CREATE TABLE v (id int PRIMARY KEY)", "CREATE PUBLICATION s FOR TABLE t")

    def is_made() -> bool:
        """Make the slot; again, where transactions of other databases were open that are older than the publication."""
        run(pg, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = 's'",
            "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")  # fmt: skip
        return run(
            pg,
            "SELECT age(xmin) > (SELECT age(catalog_xmin) FROM pg_replication_slots WHERE slot_name = 's')"
            " FROM pg_publication WHERE pubname = 's'",
        ) == [(True,)]

    wait_until(is_made)
    first = drive(tables="public.*", startFrom="slot")
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    first.take(1)
    first.stop()
    assert "may be younger" not in caplog.text
    run(pg, "ALTER PUBLICATION s ADD TABLE v")
    drive(tables="public.*", startFrom="slot").batch()
    assert "v may be younger than slot s, or altered since: the stream lacks" in caplog.text


def test_an_old_checkpoint_of_a_slot_that_is_read(pg: Session, db: str, drive: Drive) -> None:
    first = begun(drive)
    old = first._committed
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    first.take(1)
    end = first.offset.position.lsn
    run(pg, "INSERT INTO t VALUES (3, 'c')")
    first.take(1)  # which commits the one before
    wait_until(lambda: run(pg, f"SELECT confirmed_flush_lsn {THERE} AND confirmed_flush_lsn >= '{end}'"))
    ((pid,),) = run(pg, f"SELECT active_pid {THERE}")
    second = Driver(db, dbtable="t")
    second._committed = old
    # Other Sparks tell of the checkpoint only later.
    refused_a_slot(second, pid, "s:changes", SlotLostError if HAS_LIMITS else TransientError)
    run(pg, "INSERT INTO t VALUES (4, 'd')")
    first.take(1)


def test_a_new_slot_that_has_to_wait_says_for_whom(db: str, pg: Session, drive: Drive) -> None:
    with connect(db) as writer, writer.cursor() as cursor:
        cursor.execute("BEGIN; INSERT INTO t VALUES (9, 'z'); SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
        driver = drive(dbtable="t", slotTimeout="1s")
        driver.refusal("slot s found no consistent point within 1 s", f"pid {pid} for ", "slotTimeout",
                       kind=TransientError)  # fmt: skip
        # The server says that it has given up before it has cleaned up.
        wait_until(lambda: run(pg, f"SELECT count(*) {THERE}") == [(0,)])
        cursor.execute("COMMIT")
    driver.restart(slotTimeout="60s")
    # The writer's row is committed before the slot begins: it is the snapshot's.
    assert sorted(values(driver.take(2), "_change_type", "id")) == [("snapshot", 1), ("snapshot", 9)]


# --- rights and settings ---------------------------------------------------------------------------------------------


def test_a_role_without_replication(db: str, pg: Session, drive: Drive) -> None:
    with role(pg, db) as login:
        run(pg, f"GRANT SELECT ON t TO {login['user']}", "CREATE PUBLICATION s FOR TABLE t")
        driver = Driver(conninfo(login), dbtable="t").start()
        try:
            driver.refusal("lacks", f"ALTER ROLE {login['user']} REPLICATION", kind=ServerSetupError)
        finally:
            driver.stop()
    assert run(pg, f"SELECT count(*) {THERE}") == [(0,)]


def test_a_role_that_only_replicates_and_reads_is_enough(db: str, pg: Session, drive: Drive) -> None:
    run(pg, "CREATE PUBLICATION s FOR TABLE t")
    with role(pg, db, "REPLICATION") as login:
        run(pg, f"GRANT SELECT ON t TO {login['user']}")
        driver = drive(dbtable="t")
        driver.restart(url=conninfo(login))
        driver.take(1)
        run(pg, "INSERT INTO t VALUES (2, 'b')")
        driver.take(1)
        driver.stop()
        released(pg)
        wait_until(lambda: not run(pg, f"SELECT 1 FROM pg_stat_activity WHERE usename = '{login['user']}'"))


def test_a_password_that_is_wrong_is_not_shown(db: str) -> None:
    url = make_dsn(**{**parse_dsn(db), "password": "Geheim-123"})
    with pytest.raises(ConnectError) as caught:
        Driver(url, dbtable="t").start()
    assert "Geheim-123" not in str(caught.value)
    assert str(caught.value).count("Remedy: ") == 1


def prepared(url: str) -> contextlib.AbstractContextManager[Session]:
    @contextlib.contextmanager
    def opened() -> Iterator[Session]:
        with connect(url) as session:
            run(session, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
            yield session

    return opened()


def test_a_row_filter_that_cannot_be_computed(pg: Session, drive: Drive) -> None:
    if pg.server_version < 150000:
        pytest.skip("row filters came with PostgreSQL 15")
    run(pg, "CREATE TABLE filtered (id int PRIMARY KEY, n int NOT NULL)", "INSERT INTO filtered VALUES (1, 1)",
        "CREATE PUBLICATION s FOR TABLE filtered WHERE (1 / id > 0)")  # fmt: skip
    driver = drive(dbtable="filtered")
    driver.take(1)
    run(pg, "INSERT INTO filtered VALUES (0, 0)")
    driver.refusal("division by zero", "row filter of the publication", "drop the slot", kind=DefiniteError)


def test_a_server_without_logical_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        second_server({"wal_level": "replica"}) as url,
        prepared(url) as pg,
        driving(pg, url, monkeypatch) as drive,
    ):
        drive(dbtable="t").refusal("wal_level=logical", "restart PostgreSQL", kind=ServerSetupError)
        assert run(pg, "SELECT count(*) FROM pg_publication") == [(0,)]


@pytest.mark.matrix("loss is an error")
def test_another_server_limits_and_lost_wal(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more server, with one slot, two walsenders, and little WAL for those that lag."""
    settings = {
        "max_replication_slots": "1",
        # One alone may still be ending when the stream wants its next.
        "max_wal_senders": "2",
        "max_slot_wal_keep_size": "1MB",
        "min_wal_size": "32MB",
        "max_wal_size": "32MB",
    }
    here = begun(drive)
    with second_server(settings) as url, prepared(url) as pg, driving(pg, url, monkeypatch) as drive_there:
        # A checkpoint of another cluster.
        url_here = here.options["url"]
        run(pg, "CREATE PUBLICATION s FOR TABLE t")
        here.restart(url=url)
        here.refusal("the checkpoint was made with another server or slot", "system identifier ", kind=SlotLostError)
        here.restart(url=url_here)
        here.stop()
        run(pg, f"SELECT pg_drop_replication_slot(slot_name) {THERE}")

        # No slot is left.
        run(pg, "SELECT pg_create_physical_replication_slot('full')")
        driver = drive_there(dbtable="t")
        driver.refusal("slot s cannot be created: ", "max_replication_slots", kind=ServerSetupError)
        run(pg, "SELECT pg_drop_replication_slot('full')")

        # No walsender is left.
        driver.take(1)
        driver.batch()
        wait_until(lambda: run(pg, f"SELECT 1 {THERE} AND active"))
        other = Driver(url, dbtable="t", slot="other").start()
        with contextlib.closing(psycopg2.connect(url, connection_factory=LogicalReplicationConnection)):
            other.refusal("max_wal_senders", kind=ServerSetupError)
        other.stop()

        # The slot is given up while nobody reads it.
        driver.stop()
        released(pg)
        run(pg, "CREATE TABLE junk (v text)")

        def given_up() -> bool:
            run(pg, "INSERT INTO junk SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
                "SELECT pg_switch_wal()", "CHECKPOINT")  # fmt: skip
            return run(pg, f"SELECT wal_status {THERE}") == [("lost",)]

        wait_until(given_up, 120)
        # As if it had been given up right after it was looked at.
        options = parse_connection_options({"url": url})
        with pytest.raises(SlotLostError, match=r"(?s)given up by the server.*Remedy: "):
            ReplicationStream(options, "pgcdc:s:changes", "s", ["s"], Lsn(1), streaming=False).receive()
        driver.start()
        driver.refusal("slot s was given up by the server", "wal_removed", "max_slot_wal_keep_size", kind=SlotLostError)


def test_wal_that_a_slot_holds_and_that_the_server_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a crash. The server does not know; a checkpoint must not give the slot up before."""
    with second_server({}) as url, prepared(url) as pg, driving(pg, url, monkeypatch) as drive_there:
        driver = drive_there(dbtable="t")
        driver.take(1)
        driver.stop()
        released(pg)
        ((file,),) = run(
            pg, f"SELECT current_setting('data_directory') || '/pg_wal/' || pg_walfile_name(restart_lsn) {THERE}"
        )
        run(pg, "INSERT INTO t VALUES (3, 'c')", "SELECT pg_switch_wal()")
        Path(file).unlink()
        driver.start()
        driver.refusal("has already been removed", "onSlotLost=resnapshot", kind=SlotLostError)


# --- a quiet stream --------------------------------------------------------------------------------------------------


def test_the_slot_of_a_quiet_table_moves_and_batches_are_few(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE u (v int)")
    driver = begun(drive)
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    driver.take(1)
    ((before,),) = run(pg, f"SELECT confirmed_flush_lsn {THERE}")
    ((written,),) = run(pg, "INSERT INTO u SELECT generate_series(1, 1000)", "SELECT pg_current_wal_lsn()")
    batches, questions, started = driver.batches, 0, time.monotonic()
    moved = f"SELECT 1 {THERE} AND confirmed_flush_lsn >= '{written}'::pg_lsn"
    while questions < 10 or not run(pg, moved):
        assert time.monotonic() < started + 40, [*run(pg, f"SELECT confirmed_flush_lsn {THERE}"), before, written]
        assert driver.batch() == []
        questions += 1
        run(pg, "INSERT INTO u VALUES (1)")
    # The position moves by empty batches, one in IDLE_SECONDS and not one a question; the first is confirmed with the
    # second.
    assert driver.batches - batches <= 2 + (time.monotonic() - started) / next_offset.IDLE_SECONDS


def test_an_idle_stream_makes_no_batches(pg: Session, drive: Drive) -> None:
    driver = begun(drive)
    run(pg, "INSERT INTO t VALUES (2, 'b')")
    driver.take(1)
    batches, until = driver.batches, time.monotonic() + 4 * next_offset.IDLE_SECONDS
    while time.monotonic() < until:
        assert driver.batch() == []
    # What the server itself writes may move the stream on once.
    assert driver.batches <= batches + 1


# --- in Spark --------------------------------------------------------------------------------------------------------


def test_a_query_ends_with_one_clear_error(spark: SparkSession, tmp_path: Path, db: str, pg: Session) -> None:
    with querying(spark, tmp_path, pg, db, dbtable="t") as query:
        query.start()
        query.take(1)
        run(pg, "INSERT INTO t VALUES (2, 'b')")
        query.take(2)
        while_lost(pg, "SELECT pg_drop_replication_slot('s')")
        query.refusal("SlotLostError: [SLOT_LOST] slot s does not exist any more", "new checkpoint location")
        # So it does each time it is started.
        query.start()
        query.refusal("SlotLostError: [SLOT_LOST] slot s does not exist any more")
        assert run(pg, f"SELECT count(*) {THERE}") == [(0,)]


# More than a server that was set back writes in this test.
LOST = "INSERT INTO t SELECT 2, string_agg(md5(i::text), '') FROM generate_series(1, 100000) i"


@pytest.mark.parametrize("to_next_timeline", [True, False])
def test_a_server_that_was_restored(to_next_timeline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream goes on if it has read no more than what this server has as well.

    A copy of the server's directory goes on in the same timeline.
    """
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    said = "promoted or restored and left timeline 1 at " if to_next_timeline else "the server was set back"
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(second_server({}))
        server = stack.enter_context(contextlib.closing(RestartableServer(url)))
        backup = server.data.with_name("backup")
        with prepared(url) as pg:
            behind, ahead, buffered, died = (
                Driver(url, dbtable="t", slot=slot).start() for slot in ("s", "u", "b", "d")
            )
            for driver in (behind, ahead, buffered, died):
                stack.callback(driver.stop)
                driver.take(1)
            behind.stop()
            died.stop()
        server.stop("immediate")
        subprocess.run(["cp", "-a", server.data, backup], check=True)
        server.start()
        with connect(url) as pg:
            wait_until(lambda: run(pg, "SELECT count(*) FROM pg_replication_slots WHERE active") == [(2,)])
            run(pg, LOST)
        ahead.take(1)
        # Its end is in the checkpoint, and its rows are nowhere.
        died.start()
        wait_until(lambda: died.attempt(read=False) is not None)
        died.stop()
        reader = wait_until(lambda: buffered._reader._capture._parts.reader.current)
        wait_until(lambda: reader.waiting(buffered.offset.position).rows)
        server.stop("immediate")
        shutil.rmtree(server.data)
        backup.rename(server.data)
        if to_next_timeline:
            server.to_next_timeline()
        server.start()
        with connect(url) as pg:
            wait_until(lambda: run(pg, "SELECT pg_is_in_recovery()") == [(False,)])
            run(pg, "INSERT INTO t VALUES (3, 'c')")
        for _ in range(2):
            ahead.refusal(said, "new checkpoint", kind=SlotLostError)
            ahead.restart()
        died.start().refusal(said, "new checkpoint", kind=SlotLostError)
        wait_until(lambda: reader._buffer.error is not None)
        if to_next_timeline:
            # What waited for Spark is gone, and Spark has had nothing of it.
            assert values(buffered.take(1), "id", "v") == [(3, "c")]
        else:
            # How far the server was set back, nobody knows.
            buffered.refusal(said, "new checkpoint", kind=SlotLostError)
        behind.start()
        assert values(behind.take(1), "id", "v") == [(3, "c")]
        assert behind.offset.identity.timeline == 1 + to_next_timeline


def test_a_server_is_shut_down_while_nobody_takes_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgcdc, "execution", lambda: "test")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(second_server({}))
        server = stack.enter_context(contextlib.closing(RestartableServer(url)))
        with prepared(url) as pg:
            driver = Driver(url, dbtable="t", slot="s", maxRowsPerBatch="10").start()
            stack.callback(driver.stop)
            driver.take(1)
            # More than sockets hold.
            run(pg, "INSERT INTO t SELECT i, repeat('x', 20000) FROM generate_series(2, 1501) i")
        reader = wait_until(lambda: driver._reader._capture._parts.reader.current)
        wait_until(lambda: reader._watch._session is not None)
        began = time.monotonic()
        server.stop("fast")
        assert time.monotonic() - began < 15
        server.start()
        driver.restart(maxRowsPerBatch="1000")
        assert [row["id"] for row in driver.take(1500)] == [*range(2, 1502)]
